"""Warnings: which tensors have a problem, and what to do about it.

Scales are made just in time: the largest magnitude of a tensor always becomes the largest code, so
that FP8 itself cannot overflow and a saturated code is no sign of trouble. The 16-bit values before
quantization can: *near overflow* is an amax within a factor of `HEADROOM` of the largest number of
their dtype. It takes fp16, or a run that diverges.

A low SQNR gives no warning, since it cannot happen for finite values. Values in a format's normal
range have an error of at most half a step, 24 dB in E4M3. Smaller values have so small an error
relative to the amax that even many that become zero hardly lower the SQNR. The warning is about the
share of values that become zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp8pass.dialect.formats import E4M3
from fp8pass.stability.monitor.statistics import Row, TensorName

HEADROOM = 8
MOSTLY = 0.5  # share of values that become zero
SENT = "gradient sent"  # to other ranks
LISTED = 5  # tensors named in one warning


@dataclass(frozen=True)
class Measured:
    """A row, and the name of its tensor in the graph, which `skip` patterns match."""

    row: Row
    name: TensorName


@dataclass(frozen=True)
class Symptom:
    """A problem that a tensor can have.

    Attributes:
        label: the problem, in a message.
        applies: whether a tensor has it.
        figure: the number that shows it, as text.
        advice: what to do about the tensors that have it.
    """

    label: str
    applies: Callable[[Measured], bool]
    figure: Callable[[Row], str]
    advice: Callable[[Sequence[Measured]], str]


def _near_overflow(found: Measured) -> bool:
    return found.row.amax * HEADROOM > torch.finfo(found.name.dtype).max


def _overflow_advice(found: Sequence[Measured]) -> str:
    if all(y.name.dtype != torch.float16 for y in found):
        return "Training diverges: lower the learning rate"
    if all(y.name.tensor == "gradient" for y in found):
        return "Lower the loss scale, or train in bfloat16"
    return "Train in bfloat16"


def _nonfinite_advice(found: Sequence[Measured]) -> str:
    return f"The first of them, {found[0].row.module or 'top level'}, is where to look"


def _underflow_advice(found: Sequence[Measured]) -> str:
    advice = []
    if any(y.name.tensor == "gradient" and y.name.format == E4M3.name for y in found):
        advice.append("Gradients: gradient_format='e5m2' has a wider range")
    if any(y.name.tensor.startswith("saved") for y in found):
        advice.append(
            "Saved values: a lower tolerance, or save_format='e4m3' or 'none', keeps more of them"
        )
    if any(y.name.tensor == SENT for y in found):
        advice.append("On the wire: compress(model, gradients='none') sends them as they are")
    linear = [y for y in found if not y.name.tensor.startswith("saved")]
    if modules := tuple(dict.fromkeys(y.name.module for y in linear if y.name.module)):
        advice.append(f"Layers stay in high precision with skip={modules!r}")
    return ". ".join(advice) or "fp8pass.Config has what could help"


SYMPTOMS = (
    Symptom(
        "not finite",
        lambda y: y.row.nonfinite > 0,
        lambda r: f"{r.nonfinite} of {r.elements}",
        _nonfinite_advice,
    ),
    Symptom(
        "near overflow",
        _near_overflow,
        lambda r: f"amax {r.amax:.3g} in {r.dtype}",
        _overflow_advice,
    ),
    Symptom(
        "mostly zero once quantized",
        lambda y: y.row.underflow > MOSTLY,
        lambda r: f"{r.underflow:.0%}",
        _underflow_advice,
    ),
)


class Findings:
    """Warns about tensors, about each tensor once for each symptom."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str]] = set()

    def new(self, rows: Sequence[Measured]) -> list[str]:
        """A message for each symptom of tensors that have not been warned about for it."""
        return [
            _message(symptom, found)
            for symptom in SYMPTOMS
            if (found := [y for y in rows if symptom.applies(y) and self._is_new(symptom, y.row)])
        ]

    def _is_new(self, symptom: Symptom, row: Row) -> bool:
        key = symptom.label, row.module, row.tensor
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def _message(symptom: Symptom, found: Sequence[Measured]) -> str:
    listed = [
        f"{y.row.module or 'top level'} {y.row.tensor} ({symptom.figure(y.row)})"
        for y in found[:LISTED]
    ]
    if len(found) > LISTED:
        listed.append(f"and {len(found) - LISTED} more in monitor.latest")
    step, advice = found[0].row.step, symptom.advice(found)
    return f"step {step}: {symptom.label}: {', '.join(listed)}. {advice}."
