"""Compute how much the gradients of a region amplify errors of the region's values.

The formulas follow sections 4.1 and 8.1 of the AGoQ paper. The *bound* is an upper limit of this
amplification for any perturbation, to first order. Let a value k be stored as k (1 + δ), with a
relative error δ_j of each element j. Then each gradient factor h (`factors.py`) changes by

    Δh = c δ + Σ_t e_t Σ_j ω_t,j δ_j   (directly, and through statistics t of k)

where c is the derivative of h by δ, e_t the derivative of h by t, and ω_t,j the derivative of t by
δ_j. The triangle inequality and ‖A x‖ ≤ ‖A‖ ‖x‖ give a bound of ‖Δh‖ / ‖δ‖_∞. For RMSNorm
the bounds are Eq. 15 and 20 of the paper. `formulas.py` writes the same bounds in symbols.

The *expected* amplification is the root mean square effect of independent errors δ_j. It is the
Frobenius norm of the output's derivative by δ, divided by the norm of the output.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from sympy import Symbol
from torch import Tensor

from fp8pass.error_analysis.factors import Factors, Jacobian, Key
from fp8pass.error_analysis.samples import ON_CPU, Samples

Amplifications = dict[Symbol, dict[Symbol, float]]  # [source][output], for an inexact source
BySource = dict[Symbol, Tensor]  # sources that have no effect are missing


def compute_bounds(
    factors: Factors,
    sources: Collection[Symbol],
    outputs: Sequence[Symbol],
    relative_to_row: bool = False,
) -> Amplifications:
    """Bound the relative change of each output's factors per unit relative change of each source.

    With `relative_to_row`, the change of a source's element is relative to the largest element of
    its row. Formats that round small elements to zero have such errors. The result is the largest
    bound over the scales of the samples.
    """
    bounds = Bounds(factors, sources, relative_to_row)
    found: Amplifications = {s: dict.fromkeys(outputs, 0.0) for s in sources}
    for output in outputs:
        jacobians = factors.jacobians(output)
        size = sum((bounds.norm(j) for j in jacobians), torch.zeros(1, 1, 1, **ON_CPU))
        for source, change in _sum(map(bounds.perturbation, jacobians)).items():
            found[source][output] = _largest_ratio(change, size)
    return found


class Bounds:
    """Computes bounds of the norms of Jacobians, and of their changes if `sources` are inexact."""

    def __init__(
        self, factors: Factors, sources: Collection[Symbol], relative_to_row: bool
    ) -> None:
        self.length = factors.expressions.length
        self._values = {s: factors.values[s] for s in sources}
        self._sizes = {s: x.detach().abs() for s, x in self._values.items()}
        if relative_to_row:
            self._sizes = {s: x.amax(-1, keepdim=True) for s, x in self._sizes.items()}
        inputs: dict[Key, Tensor] = {**self._values, **factors.cut}
        self._inputs = {key: x for key, x in inputs.items() if x.requires_grad}
        self._rows: dict[Key, BySource] = {}
        for key, each in factors.contributions.items():
            self._rows[key] = self._row(each)

    def norm(self, jacobian: Jacobian[Tensor]) -> Tensor:
        """Bound ‖J‖₂ by the inequalities of `perturbation`, so both bounds are equally loose."""
        total = torch.zeros(1, 1, 1, **ON_CPU)
        if jacobian.diagonal is not None:
            total = total + self._norm(jacobian.diagonal, jacobian.order)
        for column, row in jacobian.pairs:
            total = total + self._norm(column, 2) * self._norm(row, 2)
        return total

    def perturbation(self, jacobian: Jacobian[Tensor]) -> BySource:
        """Bound ‖ΔJ‖₂ for each source, per unit of the source's ‖δ‖_∞."""
        terms = []
        if jacobian.diagonal is not None:
            terms.append(self._perturbation(jacobian.diagonal, jacobian.order))
        for column, row in jacobian.pairs:
            terms.append(_scale(self._perturbation(column, 2), self._norm(row, 2)))
            terms.append(_scale(self._perturbation(row, 2), self._norm(column, 2)))
        return _sum(terms)

    def _perturbation(self, factor: Tensor, order: float) -> BySource:
        """Bound the `order`-norm of Δfactor (Eq. 8 and 12 of the AGoQ paper)."""
        local, through = self._differentiate(factor)
        terms = [{s: self._norm(x * self._sizes[s], order) for s, x in local.items()}]
        for key, slope in through.items():
            rows = {s: self._norm(row * self._sizes[s], 1) for s, row in self._rows[key].items()}
            terms.append(_scale(rows, self._norm(slope, order)))
        return _sum(terms)

    def _row(self, each: Tensor) -> BySource:
        """Return ω: the derivatives of a statistic, which is the sum of `each`, by the sources."""
        local, through = self._differentiate(each)
        terms = [local]
        for key, slope in through.items():
            terms.append(_scale(self._rows[key], slope.mean(-1, keepdim=True) * self.length))
        return _sum(terms)

    def _differentiate(self, x: Tensor) -> tuple[BySource, dict[Key, Tensor]]:
        """Return the element-wise derivatives of `x` by sources and by statistics.

        Each element of `x` depends only on elements at its position, so these are gradients of
        `x.sum()`.
        """
        if not x.requires_grad or not self._inputs:
            return {}, {}
        inputs = list(self._inputs.values())
        slopes = torch.autograd.grad(x.sum(), inputs, retain_graph=True, allow_unused=True)
        found = {k: x for k, x in zip(self._inputs, slopes, strict=True) if x is not None}
        local = {s: found[s] for s in self._values if s in found}
        return local, {key: x for key, x in found.items() if key not in local}

    def _norm(self, x: Tensor, order: float) -> Tensor:
        """Estimate the norm of `x` over all elements that a statistic reduces, from the samples."""
        x = x.detach().abs()
        if order == 1:
            return x.mean(-1, keepdim=True) * self.length
        if order == 2:
            return (x.square().mean(-1, keepdim=True) * self.length).sqrt()
        return x.amax(-1, keepdim=True)


def _scale(terms: BySource, factor: Tensor) -> BySource:
    return {s: factor * x for s, x in terms.items()}


def _sum(terms: Iterable[BySource]) -> BySource:
    total: BySource = {}
    for term in terms:
        for source, x in term.items():
            total[source] = total[source] + x if source in total else x
    return total


def _largest_ratio(change: Tensor, size: Tensor) -> float:
    """Average `change` and `size` over rows, and return their largest ratio over the scales."""
    change, size = change.mean((-2, -1)), size.mean((-2, -1))
    ratio = torch.where(change == 0, 0.0, change / size)
    largest = float(ratio.max())
    return largest if math.isfinite(largest) else math.inf


@torch.enable_grad()  # compilers disable gradients
def estimate_expected(
    samples: Samples, sources: Sequence[Symbol], outputs: Sequence[Symbol]
) -> Amplifications:
    """Return the relative RMS change of each output per unit relative RMS error of each source.

    The squared Frobenius norm of a Jacobian is the expected squared norm of its product with a
    vector of random signs. So one pass of autograd for each output is enough.
    """
    inexact = set(samples.expressions.values)
    leaves = {
        s: x[:1].detach().clone().requires_grad_(s in inexact) for s, x in samples.inputs.items()
    }
    values = samples.run(leaves)
    found: Amplifications = {s: dict.fromkeys(outputs, 0.0) for s in sources}
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
