"""Derive the error rule of one region: how much gradients amplify an error of each stored value."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from sympy import Symbol
from torch import fx

from fp8pass.config import checks_are_on
from fp8pass.dialect.formats import Format
from fp8pass.error_analysis.amplification import (
    Amplifications,
    compute_bounds,
    estimate_expected,
)
from fp8pass.error_analysis.expressions import Expressions, express
from fp8pass.error_analysis.factors import Factors, check_cost
from fp8pass.error_analysis.jumps import find_jumps, find_sign_roots
from fp8pass.error_analysis.ranges import (
    DIVISOR,
    find_divisors,
    find_outliers,
    grows_exponentially,
)
from fp8pass.error_analysis.regions import Region
from fp8pass.error_analysis.samples import Moments, Samples
from fp8pass.graph.symbols import Underivable

log = logging.getLogger("fp8pass")


@dataclass(frozen=True)
class Amplification:
    """Relative error of gradients per unit relative error of a stored value."""

    bound: float  # an upper limit of the amplification of any perturbation, to first order
    expected: float  # the root mean square amplification of independent perturbations
    # The bound for errors relative to the largest element of a row. Formats that round small
    # elements to zero have such errors.
    flush_bound: float = 1.0
    # Whether a format must preserve the value's signs, because the backward compares the value with
    # zero (ReLU), or sums products of the value over positions.
    needs_signs: bool = False

    def allows(self, format: Format, tolerance: float) -> bool:
        if self.needs_signs and not format.keeps_signs:
            return False
        rounded, flushed = self.bound * format.half_step, self.flush_bound * format.flushed_share
        return max(rounded, flushed) <= tolerance


MASKED = "a mask may have set some elements to huge values, and elements of a group share a scale"

UNITY = Amplification(1.0, 1.0)


@dataclass(frozen=True)
class RegionRule:
    """The error rule of one region. An integer i stands for the node `(*inputs, *nodes)[i]`."""

    # The amplification of each node that may be stored.
    amplifications: dict[int, Amplification] = field(default_factory=dict)
    # Members that must not be computed from inexact values, because a small error could change the
    # outcome of a comparison (`jumps.py`).
    jumping: frozenset[int] = frozenset()
    # Maps nodes whose elements cannot share a scale to the reason.
    ungrouped: Mapping[int, str] = field(default_factory=dict)
    outliers: frozenset[int] = frozenset()  # nodes that may have a few huge or infinite elements
    # Whether the region's results grow exponentially with its inputs (`ranges.py`).
    grows: bool = False
    reason: str = ""  # why no rule could be derived; '' if a rule was derived


@dataclass(frozen=True)
class InputFacts:
    """Facts about the inputs of regions, in addition to the structure of the regions."""

    # The mean and the standard deviation of the inputs' elements, if known.
    moments: Mapping[fx.Node, Moments] = field(default_factory=dict)
    # The inputs that are exact because they are computed from parameters alone.
    weights: Collection[fx.Node] = ()
    outliers: Collection[fx.Node] = ()  # the inputs that may have a few huge or infinite elements

    def key(self, region: Region) -> tuple[object, ...]:
        """Return a key that is equal for regions of equal structure with equal facts."""
        facts = tuple(
            (self.moments.get(n), n in self.weights, n in self.outliers) for n in region.inputs
        )
        return region.key(), facts


_rule_cache: dict[object, RegionRule] = {}
_LARGEST_CACHE = 1 << 12  # number of rules; a full cache is emptied


def derive(region: Region, facts: InputFacts) -> RegionRule:
    """Return the rule of a region. Regions of equal structure and equal facts share one rule."""
    key = facts.key(region)
    if key not in _rule_cache:
        if len(_rule_cache) >= _LARGEST_CACHE:
            _rule_cache.clear()
        _rule_cache[key] = _derive(region, facts)
    return _rule_cache[key]


def _derive(region: Region, facts: InputFacts) -> RegionRule:
    try:
        return Derivation(region, facts).rule()
    except Underivable as error:
        return RegionRule(reason=str(error))
    except Exception as error:  # values without a rule stay exact; tests raise the exception
        if checks_are_on():
            raise
        log.debug("no error rule was derived for a region:", exc_info=True)
        return RegionRule(reason=f"no rule was found ({type(error).__name__}: {error})")


class Derivation:
    """Derives the rule of one region from random samples of its values."""

    def __init__(self, region: Region, facts: InputFacts | None = None) -> None:
        self.region, self._facts = region, facts or InputFacts()
        self.expressions: Expressions = express(region)
        symbols = self.expressions.symbols
        moments = {symbols[n]: m for n, m in self._facts.moments.items() if n in symbols}
        self.samples = Samples(self.expressions, moments)
        check_cost(self.expressions, self.outputs)
        self.grows = grows_exponentially(self.expressions, self.samples, self.outputs)
        if self.grows and not moments.keys() >= set(self.expressions.values):
            raise Underivable("its formula contains an exponential that may have any size")

    @cached_property
    def outputs(self) -> list[Symbol]:
        return self._symbols(self.region.outputs)

    @cached_property
    def storable(self) -> list[Symbol]:
        """The symbols of forward values that may be stored. Constants and statistics may not."""
        found, nodes = self.expressions, (*self.region.inputs, *self.region.nodes)
        other = found.constants.union(found.statistics, found.gradients)
        forward = self._symbols(n for n in nodes if n not in self.region.backward)
        return [s for s in forward if s not in other]

    def _symbols(self, nodes: Iterable[fx.Node]) -> list[Symbol]:
        symbols = self.expressions.symbols
        return list(dict.fromkeys(symbols[n] for n in nodes if n in symbols))

    def rule(self) -> RegionRule:
        found, symbols = self.expressions, self.expressions.symbols
        nodes = (*self.region.inputs, *self.region.nodes)
        first = {symbols[n]: i for i, n in reversed(list(enumerate(nodes))) if n in symbols}
        signs, exact = find_jumps(found, self.samples, self.outputs)
        amplifications = self._amplifications(signs)
        weights, masked = map(self._symbols, (self._facts.weights, self._facts.outliers))
        outliers = find_outliers(found, self.samples, weights, set(masked))
        reasons = dict.fromkeys(find_divisors(found, self.samples), DIVISOR)
        reasons |= dict.fromkeys(found.statistics, "one number that is computed from many values")
        reasons |= dict.fromkeys(outliers, MASKED)
        of_nodes = [(i, n, symbols[n]) for i, n in enumerate(nodes) if n in symbols]
        return RegionRule(
            {
                i: amplifications[s]
                for i, n, s in of_nodes
                if n not in self.region.backward and s in amplifications
            },
            # Later nodes with the same symbol are casts or views of the first node.
            frozenset(first[s] for s in exact | signs - set(found.values)),
            {i: reasons[s] for i, _, s in of_nodes if s in reasons},
            frozenset(i for i, _, s in of_nodes if s in outliers),
            self.grows,
        )

    def _amplifications(self, compared: Collection[Symbol]) -> dict[Symbol, Amplification]:
        """Return the amplification of each storable symbol: the largest over all outputs.

        Formats must preserve the signs of the symbols in `compared`.
        """
        bounds = self.bounds(self.storable)
        flush_bounds = self.bounds(self.storable, relative_to_row=True)
        expected = estimate_expected(self.samples, self.storable, self.outputs)
        roots = find_sign_roots(self.expressions)
        found = {}
        for s in self.storable:
            mean = max(expected[s].values(), default=0.0)
            found[s] = Amplification(
                # If the slope is infinite, e.g. of a square root at 0, no bound exists.
                math.inf if math.isinf(mean) else max(bounds[s].values(), default=0.0),
                mean,
                max(flush_bounds[s].values(), default=0.0),
                needs_signs=roots.get(s, s) in compared,
            )
        return found

    @torch.enable_grad()  # compilers disable gradients
    def bounds(
        self,
        sources: Collection[Symbol],
        stored: Collection[Symbol] = (),
        relative_to_row: bool = False,
    ) -> Amplifications:
        """Bound how much each output amplifies a relative error of each source.

        The backward reads the values of `stored` instead of recomputing them.

        Raises:
            Underivable: the region is not linear in gradients.
        """
        factors = self._factors
        if stored:
            known = {s: self.samples.values[s] for s in stored}
            factors = Factors(self.expressions, self.samples.inputs, known)
        return compute_bounds(factors, sources, self.outputs, relative_to_row)

    @cached_property
    def _factors(self) -> Factors:
        return Factors(self.expressions, self.samples.inputs)

    def cases(self) -> tuple[dict[Symbol, float], dict[Symbol, float]]:
        """Return the bounds of each output in Case 1 and Case 2 of section 4.1 of the AGoQ paper.

        Case 1 stores the inputs. Case 2 also stores the values that the backward reads.
        """
        cached = {self.expressions.symbols[n] for n in self.region.cached}
        return self._total(set()), self._total(cached - self.expressions.constants)

    def _total(self, cached: set[Symbol]) -> dict[Symbol, float]:
        inputs = set(self.expressions.values)
        bounds = self.bounds(sorted(inputs | cached, key=str), cached - inputs)
        return {o: sum(of_source[o] for of_source in bounds.values()) for o in self.outputs}
