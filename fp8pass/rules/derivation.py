"""The error rule of one region: how much each value that may be stored amplifies errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

import sympy
from sympy import Expr, Symbol
from torch import fx

from fp8pass.dialect.formats import Format
from fp8pass.graph.symbols import Sign, Underivable, UnitStep
from fp8pass.rules.amplification import Moments, Samples
from fp8pass.rules.expressions import Expressions, express
from fp8pass.rules.perturbation import (
    GradientFactors,
    Norms,
    bound,
    gradient_factors,
    respond,
    size,
)
from fp8pass.rules.regions import Region


@dataclass(frozen=True)
class Amplification:
    """Relative error of gradients per unit relative error of a stored value.

    Attributes:
        bound: the most that any perturbation gives, to first order.
        expected: the root mean square for independent perturbations.
        needs_signs: whether both hold only for formats that round no value to zero, because the
            backward compares with zero, as that of ReLU does.
    """

    bound: float
    expected: float
    needs_signs: bool = False

    def allows(self, format: Format, tolerance: float) -> bool:
        """Whether a value may be stored in `format`."""
        if math.isinf(tolerance):
            return True
        signs = format.keeps_signs or not self.needs_signs
        return signs and self.bound * format.half_step <= tolerance


UNITY = Amplification(1.0, 1.0)


@dataclass(frozen=True)
class RegionRule:
    """The amplifications of the inputs and members of one region that may be stored.

    Attributes:
        by_index: the amplification of a node by its number in `(*region.inputs, *region.nodes)`.
        reason: why no rule could be derived; '' if one was.
    """

    by_index: dict[int, Amplification] = field(default_factory=dict)
    reason: str = ""


_rule_cache: dict[object, RegionRule] = {}
_LARGEST_CACHE = 1 << 12  # rules; then the cache is emptied


def derive(region: Region, moments: Mapping[fx.Node, Moments]) -> RegionRule:
    """The rule of a region; regions of equal structure, repeated layers, are derived once."""
    inputs = list(region.inputs)
    key = (region.key(), tuple((inputs.index(n), m) for n, m in moments.items()))
    if key not in _rule_cache:
        if len(_rule_cache) >= _LARGEST_CACHE:
            _rule_cache.clear()
        _rule_cache[key] = _derive(region, moments)
    return _rule_cache[key]


def _derive(region: Region, moments: Mapping[fx.Node, Moments]) -> RegionRule:
    try:
        derivation = Derivation(region, moments)
    except Underivable as error:
        return RegionRule(reason=str(error))
    by_symbol = cache(derivation.amplification)
    numbered = enumerate((*region.inputs, *region.nodes))
    stored = {i: symbol for i, n in numbered if (symbol := derivation.storable(n)) is not None}
    return RegionRule({i: by_symbol(symbol) for i, symbol in stored.items()})


class Derivation:
    """Bounds of one region, as symbols and as numbers.

    Attributes:
        factors: the gradient factors of each output; a forward value is its own factor.

    Raises:
        Underivable: the region has an operator that no bound can be derived for.
    """

    def __init__(self, region: Region, moments: Mapping[fx.Node, Moments]) -> None:
        self.region = region
        self.expressions: Expressions = express(region)
        symbols = self.expressions.symbols
        self.norms = Norms(self.expressions)
        self.samples = Samples(self.expressions, {symbols[n]: m for n, m in moments.items()})
        self.factors: dict[Symbol, list[GradientFactors]] = {}
        for output, node in ((symbols[n], n) for n in region.outputs):
            if node in region.backward:
                self.factors[output] = gradient_factors(self.expressions, output)
            else:
                self.factors[output] = [GradientFactors(output, order=sympy.Integer(2))]
        self._sizes = {
            output: self.samples.evaluate(_sum(size(f, self.norms) for f in factors))
            for output, factors in self.factors.items()
        }

    def storable(self, node: fx.Node) -> Symbol | None:
        """The symbol of an element-wise forward value; None for other nodes."""
        symbol = self.expressions.symbols.get(node)
        exact = self.expressions.constants | self.expressions.statistics
        if node in self.region.backward or symbol in exact:
            return None
        return None if symbol in self.expressions.gradients else symbol

    def amplification(self, source: Symbol) -> Amplification:
        """The worst over the region's outputs, with all other values recomputed from `source`."""
        bounds = self.relative_bounds(source, frozenset((source,)))
        expected = self.samples.expected(source, list(self.factors))
        largest = max(bounds.values(), default=0), max(expected.values(), default=0)
        return Amplification(*largest, needs_signs=self.has_comparison)

    @cached_property
    def has_comparison(self) -> bool:
        """Whether the region compares a value with zero."""
        return any(d.value.has(UnitStep, Sign) for d in self.expressions.definitions)

    def bounds(self, source: Symbol, kept: frozenset[Symbol]) -> dict[Symbol, Expr]:
        """‖Δ‖ of each output's factors per unit relative perturbation of `source`.

        Symbols in `kept` are stored: the backward reads them and does not recompute them.
        """
        responses = respond(self.expressions, source, source, kept)
        return {
            output: _sum(bound(f, responses, self.norms) for f in factors)
            for output, factors in self.factors.items()
        }

    def relative_bounds(self, source: Symbol, kept: frozenset[Symbol]) -> dict[Symbol, float]:
        """`bounds` relative to the norm of the unperturbed factors, as numbers."""
        return {
            output: self._relative(output, perturbed)
            for output, perturbed in self.bounds(source, kept).items()
        }

    def _relative(self, output: Symbol, perturbed: Expr) -> float:
        if perturbed == 0:
            return 0.0
        whole = self._sizes[output]
        return self.samples.evaluate(perturbed) / whole if whole else math.inf

    def cases(self) -> tuple[dict[Symbol, float], dict[Symbol, float]]:
        """Bounds of each output in Case 1 and Case 2, summed over the stored values (AGoQ 4.1).

        Case 1 stores the inputs and recomputes all other values; Case 2 also stores the values that
        the backward reads.
        """
        inputs = frozenset(self.expressions.values)
        cached = {self.expressions.symbols[n] for n in self.region.cached}
        return self._total(inputs), self._total(inputs | cached - self.expressions.constants)

    def _total(self, kept: frozenset[Symbol]) -> dict[Symbol, float]:
        total = dict.fromkeys(self.factors, 0.0)
        for source in sorted(kept, key=str):
            for output, value in self.relative_bounds(source, kept).items():
                total[output] += value
        return total


def _sum(terms: Iterable[Expr]) -> Expr:
    return sum(terms, sympy.S.Zero)
