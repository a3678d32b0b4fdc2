"""Warnings about tensors with a problem, and advice.

FP8 data cannot overflow, because scales follow the current amax. So saturation is not a problem.
The 16-bit tensor before quantization can overflow, in fp16 or in a training that diverges. This
tensor is *near overflow* if its amax is within a factor of `HEADROOM` of the largest number of its
dtype.

A low SQNR causes no warning. Rounding errors in the normal range of E4M3 give 24 dB, and elements
that become zero hardly lower the SQNR. A separate warning reports the share of these elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fp8pass.dialect.formats import E4M3
from fp8pass.stability.monitor.statistics import TensorName, TensorStatistics

HEADROOM = 8
MOSTLY = 0.5  # share of nonzero elements that become zero, above which a warning is logged
SENT = "gradient sent"  # `TensorStatistics.tensor` of gradients sent to other ranks
MOST_NAMED = 5  # tensors in one warning
NOT_FINITE, NEAR_OVERFLOW, MOSTLY_ZERO = SYMPTOMS = (
    "not finite",
    "near overflow",
    "mostly zero once quantized",
)


@dataclass(frozen=True)
class Measured:
    """A sampled row, and the tensor's name in its graph. `skip` patterns match `name.module`."""

    row: TensorStatistics
    name: TensorName

    def find_symptoms(self) -> Iterator[tuple[str, str]]:
        """Yield symptoms such as `(MOSTLY_ZERO, "93%")`."""
        row = self.row
        if row.nonfinite > 0:
            yield NOT_FINITE, f"{row.nonfinite} of {row.elements}"
        if row.amax * HEADROOM > torch.finfo(self.name.dtype).max:
            yield NEAR_OVERFLOW, f"amax {row.amax:.3g} in {row.dtype}"
        if row.underflow > MOSTLY:
            yield MOSTLY_ZERO, f"{row.underflow:.0%}"


def _advise(symptom: str, found: Sequence[Measured]) -> str:
    if symptom == NOT_FINITE:
        return f"Look first at {found[0].row.module or 'the top level'}, which runs first"
    if symptom == MOSTLY_ZERO:
        return ". ".join(_advise_on_zeros(found)) or "Choose another format (see fp8pass.Config)"
    if all(y.name.dtype != torch.float16 for y in found):
        return "Training diverges: lower the learning rate"
    if all(y.name.tensor == "gradient" for y in found):
        return "Lower the loss scale, or train in bfloat16"
    return "Train in bfloat16"


def _advise_on_zeros(found: Sequence[Measured]) -> Iterator[str]:
    if any(y.name.tensor == "gradient" and y.name.format == E4M3.name for y in found):
        yield "Gradients: use gradient_format='e5m2', which has a wider range"
    if any(y.name.tensor.startswith("saved") for y in found):
        yield "Saved tensors: lower error_tolerance, or use save_format='e4m3' or 'none'"
    if any(y.name.tensor == SENT for y in found):
        yield "Sent gradients: compress(model, gradients='none') sends them in high precision"
    linear = [y for y in found if not y.name.tensor.startswith("saved")]
    if modules := tuple(dict.fromkeys(y.name.module for y in linear if y.name.module)):
        yield f"To keep these layers in high precision, set skip={modules!r}"


class Findings:
    """Reports each symptom of a tensor only once."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str]] = set()

    def find_new(self, rows: Sequence[Measured]) -> list[str]:
        found: dict[str, list[tuple[Measured, str]]] = {symptom: [] for symptom in SYMPTOMS}
        for measured in rows:
            for symptom, figure in measured.find_symptoms():
                key = symptom, measured.row.module, measured.row.tensor
                if key not in self._known:
                    self._known.add(key)
                    found[symptom].append((measured, figure))
        return [_format_message(symptom, pairs) for symptom, pairs in found.items() if pairs]


def _format_message(symptom: str, found: Sequence[tuple[Measured, str]]) -> str:
    listed = [
        f"{y.row.module or 'top level'} {y.row.tensor} ({figure})"
        for y, figure in found[:MOST_NAMED]
    ]
    if len(found) > MOST_NAMED:
        listed.append(f"and {len(found) - MOST_NAMED} more in monitor.latest")
    advice = _advise(symptom, [y for y, _ in found])
    return f"step {found[0][0].row.step}: {symptom}: {', '.join(listed)}. {advice}."
