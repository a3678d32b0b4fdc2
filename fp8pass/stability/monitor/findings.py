"""Warnings about tensors with a problem, and advice.

FP8 itself cannot overflow: scales are computed just in time, so that amax always becomes the
largest FP8 value. A saturated element is not a problem. The 16-bit tensor before quantization can
overflow: *near overflow* is an amax within a factor of `HEADROOM` of the largest number of its
dtype. This happens in fp16, or in a run that diverges.

There is no warning about a low SQNR, because it cannot occur for finite tensors. In a format's
normal range the error is at most half a step, which is 24 dB in E4M3. Smaller elements have errors
so small relative to amax that even many zeros hardly lower the SQNR. The share of elements that
become zero has its own warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp8pass.dialect.formats import E4M3
from fp8pass.stability.monitor.statistics import Row, TensorName

HEADROOM = 8
MOSTLY = 0.5  # share of elements that become zero
SENT = "gradient sent"  # `Row.tensor` of gradients sent to other ranks
MOST_NAMED = 5  # tensors in one warning


@dataclass(frozen=True)
class Measured:
    """A row, and the name of its tensor in the graph. `skip` patterns match the latter."""

    row: Row
    name: TensorName


@dataclass(frozen=True)
class Symptom:
    """A problem that a tensor can have.

    Attributes:
        label: name of the problem.
        applies: returns whether a tensor has it.
        figure: formats the number that shows it.
        advice: returns what to do about the tensors that have it.
    """

    label: str
    applies: Callable[[Measured], bool]
    figure: Callable[[Row], str]
    advice: Callable[[Sequence[Measured]], str]


def _is_near_overflow(found: Measured) -> bool:
    return found.row.amax * HEADROOM > torch.finfo(found.name.dtype).max


def _advise_on_overflow(found: Sequence[Measured]) -> str:
    if all(y.name.dtype != torch.float16 for y in found):
        return "Training diverges: lower the learning rate"
    if all(y.name.tensor == "gradient" for y in found):
        return "Lower the loss scale, or train in bfloat16"
    return "Train in bfloat16"


def _advise_on_nonfinite(found: Sequence[Measured]) -> str:
    return f"Look first at {found[0].row.module or 'top level'}, which comes first"


def _advise_on_underflow(found: Sequence[Measured]) -> str:
    advice = []
    if any(y.name.tensor == "gradient" and y.name.format == E4M3.name for y in found):
        advice.append("Gradients: gradient_format='e5m2' has a wider range")
    if any(y.name.tensor.startswith("saved") for y in found):
        advice.append(
            "Saved tensors: a lower tolerance, or save_format='e4m3' or 'none', is more precise"
        )
    if any(y.name.tensor == SENT for y in found):
        advice.append("Sent gradients: compress(model, gradients='none') does not quantize them")
    linear = [y for y in found if not y.name.tensor.startswith("saved")]
    if modules := tuple(dict.fromkeys(y.name.module for y in linear if y.name.module)):
        advice.append(f"Layers stay in high precision with skip={modules!r}")
    return ". ".join(advice) or "See fp8pass.Config for formats"


SYMPTOMS = (
    Symptom(
        "not finite",
        lambda y: y.row.nonfinite > 0,
        lambda r: f"{r.nonfinite} of {r.elements}",
        _advise_on_nonfinite,
    ),
    Symptom(
        "near overflow",
        _is_near_overflow,
        lambda r: f"amax {r.amax:.3g} in {r.dtype}",
        _advise_on_overflow,
    ),
    Symptom(
        "mostly zero once quantized",
        lambda y: y.row.underflow > MOSTLY,
        lambda r: f"{r.underflow:.0%}",
        _advise_on_underflow,
    ),
)


class Findings:
    """Finds symptoms. Each symptom of each tensor is reported once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str]] = set()

    def find_new(self, rows: Sequence[Measured]) -> list[str]:
        """Return one message per symptom, about the tensors that did not have it before."""
        return [
            _format_message(symptom, found)
            for symptom in SYMPTOMS
            if (found := [y for y in rows if symptom.applies(y) and self._is_new(symptom, y.row)])
        ]

    def _is_new(self, symptom: Symptom, row: Row) -> bool:
        key = symptom.label, row.module, row.tensor
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def _format_message(symptom: Symptom, found: Sequence[Measured]) -> str:
    listed = [
        f"{y.row.module or 'top level'} {y.row.tensor} ({symptom.figure(y.row)})"
        for y in found[:MOST_NAMED]
    ]
    if len(found) > MOST_NAMED:
        listed.append(f"and {len(found) - MOST_NAMED} more in monitor.latest")
    step, advice = found[0].row.step, symptom.advice(found)
    return f"step {step}: {symptom.label}: {', '.join(listed)}. {advice}."
