"""Which values may be kept in low bits, derived from what the backward computes from them.

For every region of a joint graph (`regions.py`) the maths is written down (`expressions.py`) and
perturbed to first order (`perturbation.py`): the *amplification* of a value is the relative error
of the gradients per unit relative error of the value, as a worst case (`bound`) and for independent
rounding errors (`expected`). A format is allowed where

    bound × half step of the format ≤ tolerance

Attention has a rule of its own (`attention_rule.py`). Where nothing can be derived, the value
stays exact and the reason is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import sympy
from sympy import Symbol
from torch import fx

from fp8pass import compat, graph
from fp8pass.formats import E4M3, Format
from fp8pass.passes import amplification, attention_rule
from fp8pass.passes.amplification import Moments, Samples
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.context import Context
from fp8pass.passes.expressions import Expressions, Underivable, express
from fp8pass.passes.linear import KEPT_BY_CHOICE
from fp8pass.passes.perturbation import Factors, Norms, bound, gradient_factors, respond, size
from fp8pass.passes.regions import Region, Splitter

# Linear in what they keep for the backward: its relative error is the gradient's.
LINEAR_KINDS = (Kind.GEMM, Kind.CONVOLUTION, Kind.QUANTIZE)


@dataclass(frozen=True)
class Amplification:
    """Relative error of gradients per unit relative error of a stored value.

    Attributes:
        bound: to first order at most this, for any perturbation.
        expected: root mean square, for independent perturbations.
    """

    bound: float
    expected: float

    def allows(self, format: Format, tolerance: float) -> bool:
        """Whether a value may be stored in `format`."""
        return math.isinf(tolerance) or self.bound * format.half_step <= tolerance


UNITY = Amplification(1.0, 1.0)
UNUSED = Amplification(0.0, 0.0)


@dataclass(frozen=True)
class RegionRule:
    """Amplifications in one region, of each input and member that may be stored, by index.

    Attributes:
        by_index: of nodes numbered as in `(*region.inputs, *region.nodes)`.
        recompute: Case 1, only inputs stored and all else recomputed: the sum of their bounds.
        cache: Case 2, also what the backward reads directly.
        reason: why nothing could be derived, '' where it was.
    """

    by_index: dict[int, Amplification] = field(default_factory=dict)
    recompute: float = 0.0
    cache: float = 0.0
    reason: str = ""

    @property
    def prefers_cache(self) -> bool:
        """Whether reading cached intermediates is strictly the tighter case."""
        return self.cache < self.recompute * (1 - 1e-9)


class Rules:
    """The error rules of one joint graph.

    Args:
        g: the joint graph.
        ctx: its context.
        moments: statistics of values, where they were measured; unit variance elsewhere.
    """

    def __init__(
        self, g: fx.Graph, ctx: Context, moments: Mapping[fx.Node, Moments] | None = None
    ) -> None:
        self.tolerance = ctx.config.tolerance
        self.backward = graph.tangent_dependent(g)
        inputs = {n for n in g.nodes if n.op in ("placeholder", "get_attr")}
        exact = {n for n in inputs - self.backward if n not in ctx.held | ctx.activations}
        splitter = Splitter(g, self.backward, frozenset(exact))
        self.regions = splitter.split()
        self.junctions = splitter.junctions
        self.constants = splitter.constants
        self._moments = moments or {}
        self._derived: dict[object, RegionRule] = {}
        self._underived: set[fx.Node] = set()

    @cached_property
    def _found(self) -> dict[fx.Node, list[Amplification | str]]:
        """Uses of nodes in regions: an amplification, or why there is none."""
        found: dict[fx.Node, list[Amplification | str]] = {}
        with compat.real_tensors():  # the passes run where tensors are fake
            for region in self.regions:
                self._record(region, self._rule(region), found)
        return found

    def why_exact(self, node: fx.Node) -> str:
        """Why the backward needs `node` exactly; '' where it does not."""
        if math.isinf(self.tolerance):
            return ""
        return next((x for x in self._uses(node) if isinstance(x, str)), "")

    def amplification(self, node: fx.Node) -> Amplification:
        """What an error of `node` does to the gradients: the worst of all its uses."""
        uses = [x for x in self._uses(node) if isinstance(x, Amplification)]
        return max(uses, key=lambda x: (x.bound, x.expected), default=UNUSED)

    def allows(self, node: fx.Node, format: Format) -> bool:
        """Whether `node` may be as inexact as `format` makes it."""
        allowed = self.amplification(node).allows(format, self.tolerance)
        return allowed and not self.why_exact(node)

    def may_be_recomputed(self, node: fx.Node, format: Format) -> bool:
        """Whether `node` may be computed from operands that were stored in `format`.

        Inside a region the amplifications of its inputs cover that.
        """
        if format.lossless:
            return True
        return self.allows(node, format) if node in self.junctions else node not in self._underived

    def _uses(self, node: fx.Node) -> Iterator[Amplification | str]:
        yield from self._found.get(node, ())
        for user in node.users:
            yield from self._use_by(user, node)

    def _use_by(self, user: fx.Node, node: fx.Node) -> Iterator[Amplification | str]:
        """Uses by operators that are in no region."""
        if user.op == "output" or user in self._found or user in self.junctions:
            return
        if user.meta.get(KEPT_BY_CHOICE) and user in self.backward:
            yield f"{operator_name(user)} in high precision by choice"
        elif kind(user) in LINEAR_KINDS:
            yield UNITY
        elif kind(user) is Kind.ATTENTION:
            if user in self.backward:
                yield self._attention(user)
        elif kind(user) not in (Kind.SYMBOL, Kind.CREATION, Kind.VIEW) and user in self.backward:
            yield f"{operator_name(user)} has no derivation"

    def _attention(self, user: fx.Node) -> Amplification | str:
        """The rule for the operands of an attention operator, by the first of them."""
        operand = next(n for n in user.all_input_nodes if _is_matrix(n))
        *_, length, head_dim = (compat.size_hint(s) for s in graph.tensor(operand).shape)
        bound = attention_rule.relative_bound(length, head_dim)
        if bound * E4M3.half_step > self.tolerance:
            return f"attention may amplify errors {bound:.0f}×"
        with compat.real_tensors():
            return Amplification(bound, attention_rule.expected(length, head_dim))

    def _rule(self, region: Region) -> RegionRule:
        known = {n: self._moments[n] for n in region.values if n in self._moments}
        key = (region.key(), tuple((n.name, m) for n, m in known.items()))
        if key not in self._derived:
            self._derived[key] = derive(region, known)
        return self._derived[key]

    def _record(
        self, region: Region, rule: RegionRule, record: dict[fx.Node, list[Amplification | str]]
    ) -> None:
        used = bool(region.backward or region.cached)
        if rule.reason:
            self._underived.update(region.nodes)
        for index, node in enumerate((*region.inputs, *region.nodes)):
            found = record.setdefault(node, [])
            if rule.reason and used and node not in self.constants:
                found.append(rule.reason)
            elif index in rule.by_index:
                found.append(rule.by_index[index])


def derive(region: Region, moments: Mapping[fx.Node, Moments]) -> RegionRule:
    """The rule of a region: amplifications of everything in it that may be stored."""
    try:
        expressions = express(region)
    except Underivable as error:
        return RegionRule(reason=str(error))
    derivation = Derivation(region, expressions, moments)
    stored = [
        (i, n)
        for i, n in enumerate((*region.inputs, *region.nodes))
        if n not in region.backward
        and expressions.symbols.get(n) is not None
        and expressions.symbols[n] not in expressions.constants | set(expressions.gradients)
    ]
    by_symbol = {
        symbol: derivation.of(symbol, frozenset((symbol,)))
        for symbol in dict.fromkeys(expressions.symbols[n] for _, n in stored)
    }
    recompute, cache = derivation.cases()
    return RegionRule({i: by_symbol[expressions.symbols[n]] for i, n in stored}, recompute, cache)


class Derivation:
    """Bounds of one region, as symbols and as numbers.

    Attributes:
        factors: per output, its gradient factors, or itself for a forward value.
    """

    def __init__(
        self, region: Region, expressions: Expressions, moments: Mapping[fx.Node, Moments]
    ) -> None:
        self.region, self.expressions = region, expressions
        self.norms = Norms(expressions)
        self.samples = Samples(expressions, {expressions.symbols[n]: m for n, m in moments.items()})
        self.factors: dict[Symbol, list[Factors]] = {}
        for node in region.outputs:
            symbol = expressions.symbols[node]
            if node in region.backward:
                self.factors[symbol] = gradient_factors(expressions, symbol)
            else:
                self.factors[symbol] = [Factors(symbol, order=sympy.Integer(2))]

    def symbolic(self, source: Symbol, kept: frozenset[Symbol]) -> dict[Symbol, sympy.Expr]:
        """‖Δ‖ of each output's factors per unit relative perturbation of `source`."""
        responses = respond(self.expressions, source, source, kept)
        return {
            output: sum((bound(f, responses, self.norms) for f in factors), sympy.Integer(0))
            for output, factors in self.factors.items()
        }

    def of(self, source: Symbol, kept: frozenset[Symbol]) -> Amplification:
        """The worst amplification of a source over the region's outputs."""
        expected = self.samples.expected(source, list(self.factors))
        return Amplification(
            max(self._relative(source, kept).values(), default=0.0),
            max(expected.values(), default=0.0),
        )

    def _relative(self, source: Symbol, kept: frozenset[Symbol]) -> dict[Symbol, float]:
        return {
            output: amplification.relative(
                self.samples,
                perturbed,
                sum((size(f, self.norms) for f in self.factors[output]), sympy.Integer(0)),
            )
            for output, perturbed in self.symbolic(source, kept).items()
        }

    def cases(self) -> tuple[float, float]:
        """The bound of Case 1 and of Case 2, over all that is stored in each."""
        inputs = frozenset(self.expressions.values)
        cached = {self.expressions.symbols[n] for n in self.region.cached}
        return tuple(  # type: ignore[return-value]
            max(self._total(kept).values(), default=0.0)
            for kept in (inputs, inputs | cached - self.expressions.constants)
        )

    def _total(self, kept: frozenset[Symbol]) -> dict[Symbol, float]:
        total = dict.fromkeys(self.factors, 0.0)
        for source in sorted(kept, key=str):
            for output, value in self._relative(source, kept).items():
                total[output] += value
        return total


def _is_matrix(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.ndim >= 2 and val.is_floating_point()


def operator_name(node: fx.Node) -> str:
    """The operator of a node, as people write it."""
    if node.op != "call_function":
        return node.op
    return str(graph.operator_of(node).target).removesuffix(".default")
