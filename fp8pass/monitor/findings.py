"""Which tensors to warn about, and what to do about them.

Scales are made just in time: the largest magnitude of a tensor always becomes the largest code, so
that FP8 itself cannot overflow and a saturated code is no sign of trouble. What overflows are the
16-bit values before: *near overflow* is an amax within a factor of `HEADROOM` of the largest
number of their dtype. That takes fp16, or a run that diverges.

A low SQNR gives no warning. It cannot happen for finite values: those in a format's normal range
are off by at most half a step, 24 dB in E4M3, and those below by so little beside the amax that
many small values becoming zero hardly show. The share that does is what is warned about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fp8pass.dialect.formats import E4M3
from fp8pass.monitor.statistics import Quantized, Row

HEADROOM = 8
MOSTLY = 0.5
# Tensors that one warning names.
LISTED = 5


@dataclass(frozen=True)
class Measured:
    """A row, and the name of its tensor in the graph, which `skip` patterns are matched with."""

    row: Row
    name: Quantized


@dataclass(frozen=True)
class Kind:
    """Something to warn about.

    Attributes:
        what: is the matter, after a number of tensors.
        applies: whether it is.
        figure: the number that says so, for people.
        advice: what to do, about the tensors found.
    """

    what: str
    applies: Callable[[Measured], bool]
    figure: Callable[[Row], str]
    advice: Callable[[Sequence[Measured]], str]


def _near_overflow(found: Measured) -> bool:
    return found.row.amax * HEADROOM > torch.finfo(found.name.dtype).max


def _against_overflow(found: Sequence[Measured]) -> str:
    if all(y.name.tensor == "gradient" for y in found):
        return "Lower the loss scale, or train in bfloat16"
    return "Train in bfloat16; if you do, training diverges: lower the learning rate"


def _against_nonfinite(found: Sequence[Measured]) -> str:
    return f"Begin with what comes first: {found[0].row.module or 'top level'}"


def _against_underflow(found: Sequence[Measured]) -> str:
    advice = []
    if any(y.name.tensor == "gradient" and y.name.format == E4M3.name for y in found):
        advice.append("Gradients: gradient_format='e5m2' has a wider range")
    if any(y.name.tensor.startswith("saved") for y in found):
        advice.append(
            "Saved values: a lower tolerance, or save_format='e4m3' or 'none', keeps more of them"
        )
    linear = [y for y in found if not y.name.tensor.startswith("saved")]
    if modules := tuple(dict.fromkeys(y.name.module for y in linear if y.name.module)):
        advice.append(f"Layers stay in high precision with skip={modules!r}")
    return ". ".join(advice) or "fp8pass.Config has what could help"


KINDS = (
    Kind(
        "not finite",
        lambda y: y.row.nonfinite > 0,
        lambda r: f"{r.nonfinite} of {r.elements}",
        _against_nonfinite,
    ),
    Kind(
        "near overflow",
        _near_overflow,
        lambda r: f"amax {r.amax:.3g} in {r.dtype}",
        _against_overflow,
    ),
    Kind(
        "mostly zero once quantized",
        lambda y: y.row.underflow > MOSTLY,
        lambda r: f"{r.underflow:.0%}",
        _against_underflow,
    ),
)


class Findings:
    """Finds what to warn about, each tensor once for each kind."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str]] = set()

    def new(self, rows: Sequence[Measured]) -> list[str]:
        """A message for each kind that applies to tensors not warned about yet."""
        return [
            _message(kind, found)
            for kind in KINDS
            if (found := [y for y in rows if kind.applies(y) and self._is_new(kind, y.row)])
        ]

    def _is_new(self, kind: Kind, row: Row) -> bool:
        key = kind.what, row.module, row.tensor
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def _message(kind: Kind, found: Sequence[Measured]) -> str:
    listed = [
        f"{y.row.module or 'top level'} {y.row.tensor} ({kind.figure(y.row)})"
        for y in found[:LISTED]
    ]
    if len(found) > LISTED:
        listed.append(f"and {len(found) - LISTED} more in monitor.latest")
    return f"step {found[0].row.step}: {kind.what}: {', '.join(listed)}. {kind.advice(found)}."
