"""Find comparisons that make results of a region jump at a threshold.

At a jump, the backward must use the outcome that the comparison had in the forward.

A relative perturbation of x never changes `x > 0`. The backward may repeat this comparison with an
inexact x in a format that preserves signs, but not with an x that is recomputed from inexact
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Expressions, Pointwise
from fp8pass.error_analysis.factors import Factors, split_at_gradients
from fp8pass.error_analysis.samples import ON_CPU, Samples, evaluate
from fp8pass.graph.symbols import Magnitude, Sign, Underivable, UnitStep

# Results that differ by less than this share of the largest result are equal within rounding.
JUMP_TOLERANCE = 2**-7

# The search for thresholds tries these magnitudes of an input, with both signs.
GRID = torch.logspace(-6, 7, 53, base=2, **ON_CPU)
OTHER_SAMPLES = 8  # samples of the inputs that are not varied
BISECTIONS = 40
LARGEST_BATCH = 4096  # number of thresholds along one input; further thresholds are ignored


class ThresholdComparison(NamedTuple):
    """The comparison `compared > 0` in the formula of `symbol`."""

    symbol: Symbol
    compared: Expr
    root: Symbol | None  # the earliest symbol that determines the sign of `compared`, if any
    is_mask: bool  # whether the formula is the comparison and nothing else


def find_jumps(
    expressions: Expressions, samples: Samples, outputs: list[Symbol]
) -> tuple[set[Symbol], set[Symbol]]:
    """Find comparisons of inexact values that make an output jump at the threshold.

    Return two sets of symbols: symbols that are compared with zero and need exact signs, and
    results of comparisons that need exact operands.
    """
    signs, exact, parts = set[Symbol](), set[Symbol](), set[str]()
    if comparisons := _list_comparisons(expressions):
        search = ThresholdSearch(expressions, samples, comparisons)
        for comparison in search.find_jumping(outputs):
            if comparison.root is not None:
                signs.add(comparison.root)
            elif comparison.is_mask:
                exact.add(comparison.symbol)
            else:
                parts.add(str(comparison.symbol))
    if parts:
        raise Underivable(f"{min(parts)} jumps at the threshold of a comparison")
    return signs, exact


def _list_comparisons(expressions: Expressions) -> list[ThresholdComparison]:
    roots = find_sign_roots(expressions)
    fixed = expressions.constants | expressions.statistics
    found: list[ThresholdComparison] = []
    for definition in expressions.definitions:
        if not isinstance(definition, Pointwise):
            continue
        for atom in sorted(definition.value.atoms(Sign), key=str):
            (compared,) = atom.args
            if compared.free_symbols - fixed:
                step = UnitStep(compared)
                is_mask = definition.value in (step, 1 - step)
                root = _find_root(compared, roots, expressions.constants)
                found.append(ThresholdComparison(definition.symbol, compared, root, is_mask))
    return found


def find_sign_roots(expressions: Expressions) -> dict[Symbol, Symbol]:
    """Map each pointwise symbol to the earliest symbol that determines its sign."""
    roots: dict[Symbol, Symbol] = {}
    for definition in expressions.definitions:
        if isinstance(definition, Pointwise):
            root = _find_root(definition.value, roots, expressions.constants)
            roots[definition.symbol] = definition.symbol if root is None else root
    return roots


def _find_root(value: Expr, roots: Mapping[Symbol, Symbol], fixed: set[Symbol]) -> Symbol | None:
    """Return the only symbol that may change the sign of an expression, or None."""
    if isinstance(value, (sympy.tanh, sympy.erf, Magnitude)):
        return _find_root(value.args[0], roots, fixed)
    factors = set(sympy.Mul.make_args(value))
    for step in value.atoms(UnitStep):  # relu(x) = |x| · (x > 0)
        factors -= {step} if Magnitude(step.args[0]) in factors else set()
    varying = [f for f in factors if not f.is_positive and f.free_symbols - fixed]
    if len(varying) != 1:
        return None
    (factor,) = varying
    if isinstance(factor, Symbol):
        return roots.get(factor, factor)
    return None if factor == value else _find_root(factor, roots, fixed)


class Crossings(NamedTuple):
    """Pairs of points on both sides of a threshold."""

    # The inputs of the two points, [inputs, pairs].
    below: Tensor
    above: Tensor
    comparison: Tensor  # the index of the comparison whose outcomes differ, [pairs]
    row: Tensor  # the row of `Samples` that both points take their statistics from, [pairs]


class ThresholdSearch:
    """Searches a grid along each input for thresholds, and compares the results on both sides."""

    def __init__(
        self, expressions: Expressions, samples: Samples, comparisons: list[ThresholdComparison]
    ) -> None:
        self.expressions, self.comparisons = expressions, comparisons
        gradients = set(expressions.gradients)
        self._inputs = {s: x for s, x in samples.inputs.items() if s not in gradients}
        self._factors = Factors(expressions, self._inputs)
        self._statistics = {k: x[0, :, 0].detach() for k, x in self._factors.cut.items()}
        self._forward, _ = split_at_gradients(expressions)

    def find_jumping(self, outputs: list[Symbol]) -> list[ThresholdComparison]:
        """Return the comparisons that make an output or one of its factors jump.

        If another comparison changes together with a mask and causes no jump alone, only the mask
        counts.
        """
        found = [c for s in self.expressions.values if len((c := self._search_along(s)).row)]
        if not found:
            return []
        crossings = self._bisect(Crossings(*(torch.cat(x, -1) for x in zip(*found, strict=True))))
        below = self._evaluate(crossings.below, crossings.row)
        above = self._evaluate(crossings.above, crossings.row)
        masks = {c.symbol: below.values[c.symbol] for c in self.comparisons if c.is_mask}
        masked = self._evaluate(crossings.above, crossings.row, masks)
        results = _list_results(self._factors, outputs)
        if not results:
            raise Underivable("only discrete values are computed from it")
        scales = [float(x.abs().nan_to_num().max()) for x in results]
        before, after, rest = (_list_results(f, outputs) for f in (below, above, masked))
        jumping = set(crossings.comparison[_differs(before, rest, scales)].tolist())
        at_masks = crossings.comparison[_differs(before, after, scales)].tolist()
        jumping |= {i for i in at_masks if self.comparisons[i].is_mask}
        return [c for i, c in enumerate(self.comparisons) if i in jumping]

    def _search_along(self, varied: Symbol) -> Crossings:
        grid = torch.cat([-GRID.flip(0), GRID])
        rows = min(self._inputs[varied].shape[1], OTHER_SAMPLES)
        shape = len(grid), rows
        points = torch.stack([x[0, :rows, 0].expand(shape) for x in self._inputs.values()])
        points[list(self._inputs).index(varied)] = grid[:, None]
        row = torch.arange(rows).expand(shape).flatten()
        outcomes = self._compare(points.flatten(1), row).unflatten(1, shape)
        changes = torch.nonzero(outcomes[:, 1:] != outcomes[:, :-1], as_tuple=True)
        comparison, place, column = (x[:LARGEST_BATCH] for x in changes)
        below, above = points[:, place, column], points[:, place + 1, column]
        return Crossings(below, above, comparison, column)

    def _bisect(self, crossings: Crossings) -> Crossings:
        below, above, comparison, row = crossings

        def compare(points: Tensor) -> Tensor:
            return self._compare(points, row).gather(0, comparison[None])[0]

        start = compare(below)
        for _ in range(BISECTIONS):
            middle = (below + above) / 2
            as_below = compare(middle) == start
            below = torch.where(as_below, middle, below)
            above = torch.where(as_below, above, middle)
        return crossings._replace(below=below, above=above)

    def _compare(self, points: Tensor, row: Tensor) -> Tensor:
        """Return the outcomes of all comparisons, [comparisons, points]."""
        values = dict(zip(self._inputs, points, strict=True))
        for definition in self._forward:
            statistic = self._statistics.get(definition.symbol)
            values[definition.symbol] = (
                evaluate(definition.value, values) if statistic is None else statistic[row]
            )
        return torch.stack(
            [(evaluate(c.compared, values) > 0).expand(row.shape) for c in self.comparisons]
        )

    def _evaluate(
        self, points: Tensor, row: Tensor, stored: Mapping[Symbol, Tensor] | None = None
    ) -> Factors:
        inputs = dict(zip(self._inputs, points, strict=True))
        statistics = {key: x[row] for key, x in self._statistics.items()}
        return Factors(self.expressions, inputs, stored, statistics)


def _list_results(factors: Factors, outputs: list[Symbol]) -> list[Tensor]:
    jacobians = [jacobian for output in outputs for jacobian in factors.jacobians(output)]
    found = [factor for jacobian in jacobians for factor in jacobian.list_factors()]
    return [x.detach() for x in (*found, *factors.contributions.values())]


def _differs(before: list[Tensor], after: list[Tensor], scales: list[float]) -> Tensor:
    found = torch.zeros(before[0].shape, dtype=torch.bool)
    for a, b, scale in zip(before, after, scales, strict=True):
        largest = max(scale, float(a.abs().nan_to_num().max()), float(b.abs().nan_to_num().max()))
        found |= ~((b - a).abs() <= JUMP_TOLERANCE * largest)
    return found
