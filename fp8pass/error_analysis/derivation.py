"""The error rule of one region: how much each value that may be stored amplifies errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sympy import Symbol
from torch import fx

from fp8pass.config import checks_are_on
from fp8pass.dialect.formats import Format
from fp8pass.error_analysis.amplification import Relative, Size, expected, relative_bounds
from fp8pass.error_analysis.divisors import DIVISOR, divisors
from fp8pass.error_analysis.expressions import Expressions, express
from fp8pass.error_analysis.growth import grows
from fp8pass.error_analysis.jumps import Jumps, find_jumps, sign_roots
from fp8pass.error_analysis.ranges import wild_symbols
from fp8pass.error_analysis.regions import Region
from fp8pass.error_analysis.samples import Moments, Samples
from fp8pass.error_analysis.work import check_work
from fp8pass.graph.symbols import Underivable

log = logging.getLogger("fp8pass")


@dataclass(frozen=True)
class Amplification:
    """Relative error of gradients per unit relative error of a stored value.

    Attributes:
        bound: the most that any perturbation gives, to first order.
        expected: the root mean square for independent perturbations.
        spread: as `bound`, per unit error relative to the largest value of a row, however small
            the value itself is.
        needs_signs: whether these hold only for formats that round no value to zero, because the
            backward compares with zero, as that of ReLU does, or sums up over positions.
    """

    bound: float
    expected: float
    spread: float = 1.0
    needs_signs: bool = False

    def allows(self, format: Format, tolerance: float) -> bool:
        """Whether a value may be stored in `format`."""
        if math.isinf(tolerance):
            return True
        if self.needs_signs and not format.keeps_signs:
            return False
        return max(self.bound * format.half_step, self.spread * format.flushed_share) <= tolerance


MASKED = "a mask may have made it huge in places, and a group shares one scale"

UNITY = Amplification(1.0, 1.0)


@dataclass(frozen=True)
class RegionRule:
    """What holds for the inputs and members of one region, by their number.

    That is their place in `(*region.inputs, *region.nodes)`.

    Attributes:
        by_index: the amplification of each that may be stored.
        compared: members that must not be computed from inexact values, since a comparison would
            jump.
        ungrouped: those whose elements cannot share a scale, each with the reason.
        wild: members that may be huge or infinite in a few places.
        grows: whether an exponential that nothing but the moments of values bounds is in it.
        reason: why no rule could be derived; '' if one was.
    """

    by_index: dict[int, Amplification] = field(default_factory=dict)
    compared: frozenset[int] = frozenset()
    ungrouped: Mapping[int, str] = field(default_factory=dict)
    wild: frozenset[int] = frozenset()
    grows: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Known:
    """What is known of the inputs of a region besides their roles.

    Attributes:
        moments: of values.
        weights: exact inputs that are parameters.
        wild: values that may be huge or infinite in a few places.
    """

    moments: Mapping[fx.Node, Moments] = field(default_factory=dict)
    weights: Collection[fx.Node] = ()
    wild: Collection[fx.Node] = ()

    def key(self, region: Region) -> tuple[object, ...]:
        """Equal for the inputs of equal regions of which the same is known."""
        return tuple(
            (self.moments.get(n), n in self.weights, n in self.wild) for n in region.inputs
        )


_rule_cache: dict[object, RegionRule] = {}
_LARGEST_CACHE = 1 << 12  # rules; then the cache is emptied


def derive(region: Region, known: Known) -> RegionRule:
    """The rule of a region; regions of equal structure, repeated layers, are derived once."""
    key = region.key(), known.key(region)
    if key not in _rule_cache:
        if len(_rule_cache) >= _LARGEST_CACHE:
            _rule_cache.clear()
        _rule_cache[key] = _derive(region, known)
    return _rule_cache[key]


def _derive(region: Region, known: Known) -> RegionRule:
    try:
        return Derivation(region, known).rule()
    except Underivable as error:
        return RegionRule(reason=str(error))
    except Exception as error:  # to have no rule is always safe; a bug here fails a test
        if checks_are_on():
            raise
        log.debug("no rule was found:", exc_info=True)
        return RegionRule(reason=f"no rule was found ({type(error).__name__}: {error})")


class Derivation:
    """The rule of one region, on samples.

    Attributes:
        expressions: the region in symbols.
        samples: values of its symbols.
        grows: whether an exponential that nothing bounds is in it.

    Raises:
        Underivable: the region has an operator that no bound can be derived for.
    """

    def __init__(self, region: Region, known: Known | None = None) -> None:
        self.region, self.known = region, known or Known()
        self.expressions: Expressions = express(region)
        symbols = self.expressions.symbols
        moments = {symbols[n]: m for n, m in self.known.moments.items() if n in symbols}
        self.samples = Samples(self.expressions, moments)
        check_work(self.expressions, self.outputs)
        self.grows = grows(self.expressions, self.samples, self.outputs)
        if self.grows and not moments.keys() >= set(self.expressions.values):
            raise Underivable("an exponential in it may be of any size")

    @cached_property
    def outputs(self) -> list[Symbol]:
        """The symbols of what leaves the region."""
        return list(dict.fromkeys(self.expressions.symbols[n] for n in self.region.outputs))

    @cached_property
    def storable(self) -> list[Symbol]:
        """The symbols of element-wise forward values."""
        symbols, found = self.expressions.symbols, self.expressions
        other = found.constants | found.statistics | set(found.gradients)
        forward = (n for n in (*self.region.inputs, *self.region.nodes) if n in symbols)
        stored = (symbols[n] for n in forward if n not in self.region.backward)
        return [s for s in dict.fromkeys(stored) if s not in other]

    @cached_property
    def jumps(self) -> Jumps:
        """The comparisons that need more than any inexact operand.

        Raises:
            Underivable: one of them is part of a larger formula.
        """
        found = find_jumps(self.expressions, self.samples, self.outputs)
        if found.others:
            raise Underivable(f"a comparison in {min(map(str, found.others))} jumps")
        return found

    def rule(self) -> RegionRule:
        """The rule of the region."""
        nodes = (*self.region.inputs, *self.region.nodes)
        symbols = self.expressions.symbols
        first = {symbols[n]: i for i, n in reversed(list(enumerate(nodes))) if n in symbols}
        amplifications = self.amplifications()
        storable = {
            i: amplifications[symbols[n]]
            for i, n in enumerate(nodes)
            if n not in self.region.backward and symbols.get(n) in amplifications
        }
        barriers = self.jumps.exact | self.jumps.signs - set(self.expressions.values)
        reasons = dict.fromkeys(divisors(self.expressions, self.samples), DIVISOR)
        reasons |= dict.fromkeys(self.expressions.statistics, "one number for many values")
        wild = self._wild()
        reasons |= dict.fromkeys(wild, MASKED)
        return RegionRule(
            storable,
            frozenset(first[s] for s in barriers),  # what follows are casts and views of it
            {i: reasons[symbols[n]] for i, n in enumerate(nodes) if symbols.get(n) in reasons},
            frozenset(i for i, n in enumerate(nodes) if symbols.get(n) in wild),
            self.grows,
        )

    def amplifications(self) -> dict[Symbol, Amplification]:
        """The worst over the region's outputs, with all other values recomputed from a value."""
        bounds = self.relative_bounds(self.storable)
        spreads = self.relative_bounds(self.storable, relative_to=Size.LARGEST)
        means = expected(self.samples, self.storable, self.outputs)
        roots = sign_roots(self.expressions)
        found = {}
        for s in self.storable:
            mean = max(means[s].values(), default=0.0)
            found[s] = Amplification(
                # Where a slope is infinite, as that of a root is at 0, no bound can be trusted.
                math.inf if math.isinf(mean) else max(bounds[s].values(), default=0.0),
                mean,
                max(spreads[s].values(), default=0.0),
                needs_signs=roots.get(s, s) in self.jumps.signs,
            )
        return found

    def relative_bounds(
        self,
        sources: Collection[Symbol],
        kept: Collection[Symbol] = (),
        relative_to: Size = Size.OWN,
    ) -> Relative:
        """The bound of each output by each source; symbols in `kept` are not recomputed."""
        return relative_bounds(self.samples, list(sources), self.outputs, kept, relative_to)

    def cases(self) -> tuple[dict[Symbol, float], dict[Symbol, float]]:
        """Bounds of each output in Case 1 and Case 2, summed over the stored values (AGoQ 4.1).

        Case 1 stores the inputs and recomputes all other values; Case 2 also stores the values that
        the backward reads.
        """
        inputs = set(self.expressions.values)
        cached = {self.expressions.symbols[n] for n in self.region.cached}
        return self._total(inputs), self._total(inputs | cached - self.expressions.constants)

    def _total(self, kept: set[Symbol]) -> dict[Symbol, float]:
        bounds = self.relative_bounds(sorted(kept, key=str), kept - set(self.expressions.values))
        return {o: sum(of_source[o] for of_source in bounds.values()) for o in self.outputs}

    def _wild(self) -> set[Symbol]:
        symbols = self.expressions.symbols
        weights = {symbols[n] for n in self.known.weights if n in symbols}
        wild = {symbols[n] for n in self.known.wild if n in symbols}
        return wild_symbols(self.expressions, self.samples, weights, wild)
