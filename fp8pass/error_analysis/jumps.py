"""Which comparisons of a region make its results jump when their operands are perturbed.

A comparison does no harm where both of its outcomes give the same at the threshold: softplus is x
above 20 and log(1 + exp(x)) below, and at 20 these are equal but for rounding. Where its outcomes
differ, as for a mask or the gradient of ReLU6, the backward must compare what the forward compared.

Each threshold is looked for along each input, from samples on, and approached by bisection from
both sides; then results and gradient factors on one side are compared with those on the other.

A comparison of x with zero is special: no perturbation that is relative to x crosses zero. So the
backward may compute it from an inexact x, of any format that keeps signs, or from what has the sign
of x. It may not compute x itself from anything inexact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Expressions, Pointwise
from fp8pass.error_analysis.factors import Factors, Key, Reduction
from fp8pass.error_analysis.samples import ON_CPU, Samples, evaluate
from fp8pass.graph.symbols import Magnitude, Sign, Underivable, UnitStep

# Results that differ by less than this share of their largest are equal within rounding.
TOLERANCE = 2**-7

# Inputs that thresholds are looked for at: both signs of these magnitudes.
GRID = torch.logspace(-6, 7, 53, base=2, **ON_CPU)
COLUMNS = 8  # samples of the other inputs
BISECTIONS = 40
LARGEST_BATCH = 4096  # thresholds that are approached at once


@dataclass(frozen=True)
class Jumps:
    """What must not be computed from inexact values, so that no comparison jumps.

    Attributes:
        signs: symbols that are compared with zero: what has their sign may be inexact.
        exact: symbols of comparisons that need their exact operands.
        others: symbols whose formula compares, but which are no comparison that could be kept.
    """

    signs: set[Symbol] = field(default_factory=set)
    exact: set[Symbol] = field(default_factory=set)
    others: set[Symbol] = field(default_factory=set)


@dataclass(frozen=True)
class Comparison:
    """`compared` > 0, somewhere in the formula of a definition; `root` has its sign, if any has."""

    definition: Pointwise
    compared: Expr
    root: Symbol | None

    @property
    def symbol(self) -> Symbol:
        """The symbol of the definition."""
        return self.definition.symbol

    @property
    def is_mask(self) -> bool:
        """Whether the definition is the comparison and nothing else."""
        step = UnitStep(self.compared)
        return self.definition.value in (step, 1 - step)


@dataclass(frozen=True)
class Crossings:
    """Samples on both sides of thresholds, one of each comparison: inputs, [samples]."""

    below: dict[Symbol, Tensor]
    above: dict[Symbol, Tensor]
    comparison: Tensor  # its number, [samples]
    row: Tensor  # the row of the samples whose statistics hold, [samples]


def find_jumps(expressions: Expressions, samples: Samples, outputs: list[Symbol]) -> Jumps:
    """The comparisons of inexact values whose outcome matters at the threshold."""
    comparisons = _comparisons(expressions)
    jumps = Jumps()
    if not comparisons:
        return jumps
    search = Search(expressions, samples, comparisons)
    for comparison in search.that_jump(outputs):
        if comparison.root is not None:
            jumps.signs.add(comparison.root)
        elif comparison.is_mask:
            jumps.exact.add(comparison.symbol)
        else:
            jumps.others.add(comparison.symbol)
    return jumps


def _comparisons(expressions: Expressions) -> list[Comparison]:
    """The comparisons with operands that vary from element to element."""
    roots = sign_roots(expressions)
    fixed = expressions.constants | expressions.statistics
    found: list[Comparison] = []
    for definition in expressions.definitions:
        if not isinstance(definition, Pointwise):
            continue
        atoms = definition.value.atoms(UnitStep, Sign)
        for atom in sorted(atoms, key=str):
            compared = atom.args[0]
            if compared.free_symbols - fixed:
                root = _root(compared, roots, expressions.constants)
                found.append(Comparison(definition, compared, root))
    return found


def sign_roots(expressions: Expressions) -> dict[Symbol, Symbol]:
    """For each forward symbol the earliest one that has its sign, perhaps the opposite one."""
    roots: dict[Symbol, Symbol] = {}
    for definition in expressions.definitions:
        if isinstance(definition, Pointwise):
            root = _root(definition.value, roots, expressions.constants)
            roots[definition.symbol] = definition.symbol if root is None else root
    return roots


def _root(value: Expr, roots: Mapping[Symbol, Symbol], constants: set[Symbol]) -> Symbol | None:
    """The symbol whose sign an expression has: that of its only factor whose sign may change."""
    if isinstance(value, (sympy.tanh, sympy.erf, Magnitude)):
        return _root(value.args[0], roots, constants)
    factors = set(sympy.Mul.make_args(value))
    for step in value.atoms(UnitStep):  # relu(x) = |x| · (x > 0)
        factors -= {step} if Magnitude(step.args[0]) in factors else set()
    varying = [f for f in factors if not f.is_positive and f.free_symbols - constants]
    if len(varying) != 1:
        return None
    (factor,) = varying
    if isinstance(factor, Symbol):
        return roots.get(factor, factor)
    return None if factor == value else _root(factor, roots, constants)


class Search:
    """Looks for the thresholds of comparisons, and at both sides of them."""

    def __init__(
        self, expressions: Expressions, samples: Samples, comparisons: list[Comparison]
    ) -> None:
        self.expressions, self.samples, self.comparisons = expressions, samples, comparisons
        gradients = set(expressions.gradients)
        self._inputs = {s: x for s, x in samples.inputs.items() if s not in gradients}
        self._known: dict[Key, Tensor] = {}  # statistics of the samples

    def that_jump(self, outputs: list[Symbol]) -> list[Comparison]:
        """The comparisons at whose threshold an output or one of its factors jumps.

        Where masks flip together with something else, they are to blame if nothing jumps while they
        are held.
        """
        reduce = Reduction(self.expressions.length)
        everywhere = Factors(self.expressions, self._inputs, reduce)
        self._known = {key: leaf[0, :, 0].detach() for key, leaf in everywhere.cut.items()}
        crossings = self._crossings()
        if crossings is None:
            return []
        below, above = self._at(crossings.below, crossings), self._at(crossings.above, crossings)
        masks = {s: below.values[s] for c in self.comparisons if c.is_mask and (s := c.symbol)}
        held = self._at(crossings.above, crossings, masks)
        results = _results(everywhere, outputs)
        if not results:
            raise Underivable("only discrete values are computed from it")
        scales = [float(x.abs().nan_to_num().max()) for x in results]
        jumps = _jumps(_results(below, outputs), _results(above, outputs), scales)
        others = _jumps(_results(below, outputs), _results(held, outputs), scales)
        to_blame = set(crossings.comparison[others].tolist())
        to_blame |= {i for i in crossings.comparison[jumps].tolist() if self.comparisons[i].is_mask}
        return [c for i, c in enumerate(self.comparisons) if i in to_blame]

    # --- where the thresholds are -----------------------------------------------------------------

    def _crossings(self) -> Crossings | None:
        """Both sides of thresholds along each input, of every comparison that has some."""
        found = [c for s in self.expressions.values if (c := self._along(s)) is not None]
        if not found:
            return None
        merged = Crossings(
            {s: torch.cat([c.below[s] for c in found]) for s in found[0].below},
            {s: torch.cat([c.above[s] for c in found]) for s in found[0].above},
            torch.cat([c.comparison for c in found]),
            torch.cat([c.row for c in found]),
        )
        return self._bisected(merged)

    def _along(self, varied: Symbol) -> Crossings | None:
        """Neighbouring points of the grid of one input between which comparisons change."""
        grid = torch.cat([-GRID.flip(0), GRID])
        rows = min(self.samples.inputs[varied].shape[1], COLUMNS)
        shape = len(grid), rows
        point = {s: x[0, :rows, 0].expand(shape) for s, x in self._inputs.items()}
        point[varied] = grid[:, None].expand(shape)
        row = torch.arange(rows).expand(shape)
        outcomes = self._outcomes({s: x.flatten() for s, x in point.items()}, row.flatten())
        outcomes = outcomes.unflatten(1, shape)
        number, place, column = torch.nonzero(outcomes[:, 1:] != outcomes[:, :-1], as_tuple=True)
        if not len(number):
            return None
        number, place, column = (x[:LARGEST_BATCH] for x in (number, place, column))
        return Crossings(
            {s: x[place, column] for s, x in point.items()},
            {s: x[place + 1, column] for s, x in point.items()},
            number,
            column,
        )

    def _bisected(self, crossings: Crossings) -> Crossings:
        below, above = dict(crossings.below), dict(crossings.above)
        start = self._own(below, crossings)
        for _ in range(BISECTIONS):
            middle = {s: (below[s] + above[s]) / 2 for s in below}
            as_below = self._own(middle, crossings) == start
            below = {s: torch.where(as_below, x, below[s]) for s, x in middle.items()}
            above = {s: torch.where(as_below, above[s], x) for s, x in middle.items()}
        return Crossings(below, above, crossings.comparison, crossings.row)

    def _own(self, inputs: Mapping[Symbol, Tensor], crossings: Crossings) -> Tensor:
        """The outcome of each sample's own comparison."""
        outcomes = self._outcomes(inputs, crossings.row)
        return outcomes.gather(0, crossings.comparison[None])[0]

    def _outcomes(self, inputs: Mapping[Symbol, Tensor], row: Tensor) -> Tensor:
        """The outcome of all comparisons, [comparisons, samples]."""
        values = dict(inputs)
        for definition in self.expressions.definitions:
            known = self._known.get(definition.symbol)
            if known is not None:
                values[definition.symbol] = known[row]
            elif definition.value.free_symbols <= values.keys():  # else it depends on gradients
                values[definition.symbol] = evaluate(definition.value, values)
        return torch.stack(
            [(evaluate(c.compared, values) > 0).expand(row.shape) for c in self.comparisons]
        )

    def _at(
        self,
        inputs: Mapping[Symbol, Tensor],
        crossings: Crossings,
        kept: Mapping[Symbol, Tensor] | None = None,
    ) -> Factors:
        """The region at some samples, where statistics are those of the samples' rows."""

        def look_up(key: Key, each: Tensor, over_rows: bool) -> Tensor:
            return self._known[key][crossings.row]

        return Factors(self.expressions, inputs, look_up, kept)


def _results(factors: Factors, outputs: list[Symbol]) -> list[Tensor]:
    """What must not jump: the outputs' factors, and what elements add to statistics."""
    found = [f for o in outputs for jacobian in factors.jacobians(o) for f in jacobian.factors()]
    found += factors.contributions.values()
    return [x.detach() for x in found]


def _jumps(before: list[Tensor], after: list[Tensor], scales: list[float]) -> Tensor:
    """Where any of some results differs on the two sides."""
    found = torch.zeros(before[0].shape, dtype=torch.bool)
    for a, b, scale in zip(before, after, scales, strict=True):
        largest = max(scale, float(a.abs().nan_to_num().max()), float(b.abs().nan_to_num().max()))
        found |= ~((b - a).abs() <= TOLERANCE * largest)
    return found
