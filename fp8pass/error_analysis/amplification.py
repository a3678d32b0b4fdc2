"""How much errors of a region's values are amplified in its gradients (AGoQ 4.1, 8.1), as numbers.

The *bound* is the most that any perturbation gives, to first order. Storing a value k as k (1 + δ)
perturbs each gradient factor h (`factors.py`) by

    Δh = c δ + Σ_t e_t Σ_j ω_t,j δ_j   (directly, and through statistics t of k)

Taking norms with ‖A x‖ ≤ ‖A‖ ‖x‖ and the triangle inequality gives a bound per unit of ‖δ‖_∞:
AGoQ's Eq. 15 and 20 are this for RMSNorm. `formulas.py` writes the same in symbols.

The *expected* amplification is the effect of independent perturbations on average, the Frobenius
norm of an output's derivative by the value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from sympy import Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Expressions
from fp8pass.error_analysis.factors import Factors, Jacobian, Key, Reduction
from fp8pass.error_analysis.samples import ON_CPU, Samples, compute


class Size(Enum):
    """What a perturbation of a value is relative to."""

    OWN = "own"  # the value: as formats round
    LARGEST = "largest"  # the largest value of the row: as formats flush to zero


Relative = dict[Symbol, dict[Symbol, float]]


@torch.enable_grad()  # compilers run without
def relative_bounds(
    samples: Samples,
    sources: Sequence[Symbol],
    outputs: Sequence[Symbol],
    kept: Collection[Symbol] = (),
    relative_to: Size = Size.OWN,
) -> Relative:
    """‖Δ‖ of each output's factors, relative to theirs, per unit relative perturbation of a source.

    The backward computes all values again but those in `kept` and the source.

    Raises:
        Underivable: the region is not linear in gradients.
    """
    expressions = samples.expressions
    stored = {s: samples.values[s] for s in kept}
    factors = Factors(expressions, samples.inputs, Reduction(expressions.length), stored)
    return Bounds(factors, sources, relative_to).relative(outputs)


@dataclass(frozen=True)
class Derivatives:
    """Of one factor or statistic, element by element: by the sources, and by the cut statistics."""

    sources: list[Tensor | None]
    statistics: dict[Key, Tensor]


class Bounds:
    """Bounds of the perturbation of factors, for all sources at once."""

    def __init__(
        self, factors: Factors, sources: Sequence[Symbol], relative_to: Size = Size.OWN
    ) -> None:
        self.factors, self.sources = factors, sources
        self.length = factors.expressions.length
        self._values = [factors.values[s] for s in sources]
        self._sizes = [x.detach().abs() for x in self._values]
        if relative_to is Size.LARGEST:
            self._sizes = [x.amax(-1, keepdim=True) for x in self._sizes]
        self._inputs = [x for x in (*self._values, *factors.cut.values()) if x.requires_grad]
        self._rows: dict[Key, list[Tensor | None]] = {}
        for key in factors.contributions:
            self._rows[key] = self._row_of(key)

    def relative(self, outputs: Sequence[Symbol]) -> Relative:
        """The bounds relative to the factors, the worst over the scales of the samples."""
        found: Relative = {s: dict.fromkeys(outputs, 0.0) for s in self.sources}
        for output in outputs:
            jacobians = self.factors.jacobians(output)
            size = sum((self._size(j) for j in jacobians), torch.zeros(1, 1, 1, **ON_CPU))
            changes = [self._change(j) for j in jacobians]
            for i, source in enumerate(self.sources):
                changed = [c[i] for c in changes if c[i] is not None]
                if changed:
                    found[source][output] = _ratio(sum(changed), size)  # type: ignore[arg-type]
        return found

    def _change(self, jacobian: Jacobian) -> list[Tensor | None]:
        """‖ΔJ‖₂ per unit of ‖δ‖_∞ of each source."""
        totals: list[Tensor | None] = [None] * len(self.sources)
        if jacobian.diagonal is not None:
            totals = self._perturbation(jacobian.diagonal, jacobian.order)
        for column, row in jacobian.pairs:
            of_column, of_row = self._perturbation(column, 2), self._perturbation(row, 2)
            width, height = self._norm(row, 2), self._norm(column, 2)
            for i, (c, r) in enumerate(zip(of_column, of_row, strict=True)):
                totals[i] = _plus(totals[i], None if c is None else c * width)
                totals[i] = _plus(totals[i], None if r is None else r * height)
        return totals

    def _size(self, jacobian: Jacobian) -> Tensor:
        """‖J‖₂, bounded by the same inequalities."""
        total = torch.zeros(1, 1, 1, **ON_CPU)
        if jacobian.diagonal is not None:
            total = total + self._norm(jacobian.diagonal, jacobian.order)
        for column, row in jacobian.pairs:
            total = total + self._norm(column, 2) * self._norm(row, 2)
        return total

    def _perturbation(self, factor: Tensor, order: float) -> list[Tensor | None]:
        """The `order`-norm of Δfactor per unit of ‖δ‖_∞ of each source: AGoQ's Eq. 8 and Eq. 12."""
        slopes = self._derivatives(factor)
        totals: list[Tensor | None] = [
            None if local is None else self._norm(local * size, order)
            for local, size in zip(slopes.sources, self._sizes, strict=True)
        ]
        for key, slope in slopes.statistics.items():
            height = self._norm(slope, order)
            for i, (row, size) in enumerate(zip(self._rows[key], self._sizes, strict=True)):
                if row is not None:
                    totals[i] = _plus(totals[i], height * self._norm(row * size, 1))
        return totals

    def _row_of(self, key: Key) -> list[Tensor | None]:
        """ω: the derivative of a statistic by the elements of each source."""
        each = self.factors.contributions[key]
        slopes = self._derivatives(each)
        total = list(slopes.sources)
        for other, slope in slopes.statistics.items():
            share = slope.mean(-1, keepdim=True) * self.length
            for i, row in enumerate(self._rows[other]):
                total[i] = _plus(total[i], None if row is None else share * row)
        return total

    def _derivatives(self, of: Tensor) -> Derivatives:
        """Element-wise derivatives: the sum's gradient, since no element acts on another."""
        if not of.requires_grad or not self._inputs:
            return Derivatives([None] * len(self.sources), {})
        found = torch.autograd.grad(of.sum(), self._inputs, retain_graph=True, allow_unused=True)
        by_input = dict(zip(map(id, self._inputs), found, strict=True))
        statistics = {
            key: slope
            for key, leaf in self.factors.cut.items()
            if (slope := by_input.get(id(leaf))) is not None
        }
        return Derivatives([by_input.get(id(x)) for x in self._values], statistics)

    def _norm(self, x: Tensor, order: float) -> Tensor:
        """The norm over the elements of a statistic, of which the samples are a part."""
        x = x.detach().abs()
        if order == 1:
            return x.mean(-1, keepdim=True) * self.length
        if order == 2:
            return (x.square().mean(-1, keepdim=True) * self.length).sqrt()
        return x.amax(-1, keepdim=True)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _ratio(change: Tensor, size: Tensor) -> float:
    """The worst over scales of two bounds, each averaged over rows; infinite if not a number."""
    change, size = change.mean((-2, -1)), size.mean((-2, -1))
    ratio = torch.where(change == 0, 0.0, change / size)
    worst = float(ratio.max())
    return worst if math.isfinite(worst) else math.inf


@torch.enable_grad()
def expected(samples: Samples, sources: Sequence[Symbol], outputs: Sequence[Symbol]) -> Relative:
    """Relative RMS change of each output, per unit relative RMS perturbation of each source.

    A product of a Jacobian with random signs r has the expected square norm of the Jacobian itself:
    one pass of autograd for each output.
    """
    values = _differentiable(samples)
    found: Relative = {s: dict.fromkeys(outputs, 0.0) for s in sources}
    varying = [s for s in sources if values[s].requires_grad]
    tensors = [values[s] for s in varying]
    random = torch.Generator().manual_seed(0)
    for output in outputs:
        result = values[output]
        size = float(result.detach().norm())
        if not result.requires_grad or not size:
            continue
        signs = torch.randint(0, 2, result.shape, generator=random).to(**ON_CPU) * 2 - 1
        slopes = torch.autograd.grad(result, tensors, signs, retain_graph=True, allow_unused=True)
        for source, value, slope in zip(varying, tensors, slopes, strict=True):
            if slope is not None:
                change = float((slope * value.detach()).norm()) / size
                found[source][output] = change if math.isfinite(change) else math.inf
    return found


def _differentiable(samples: Samples) -> Mapping[Symbol, Tensor]:
    """The values of all symbols at the first scale, with autograd's graph."""
    expressions: Expressions = samples.expressions
    inexact = set(expressions.values)
    values = {
        s: x[:1].detach().clone().requires_grad_(s in inexact) for s, x in samples.inputs.items()
    }
    for definition in expressions.definitions:
        values[definition.symbol] = compute(definition, values)
    return values
