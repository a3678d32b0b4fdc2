"""Which values may be kept in low bits, derived from the gradients that the backward computes.

The maths of every region of a joint graph (`regions.py`) is perturbed to first order
(`derivation.py`). The *amplification* of a value is the relative error of the gradients per unit
relative error of the value, as a worst case (`bound`) and for independent rounding errors
(`expected`). A format is allowed if

    bound × half step of the format ≤ error_tolerance

Attention has a rule of its own (`attention.py`). A value whose rule cannot be derived stays exact,
and the reason is kept. So do values that are not floats, and values that a mask may have made huge
in places (`ranges.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect.formats import E2M5, E4M3, Format
from fp8pass.error_analysis import attention as attention_rule
from fp8pass.error_analysis.derivation import (
    MASKED,
    UNITY,
    Amplification,
    Known,
    RegionRule,
    derive,
)
from fp8pass.error_analysis.differences import expanded_distances
from fp8pass.error_analysis.expressions import has_formula
from fp8pass.error_analysis.regions import DERIVABLE, Region, Splitter
from fp8pass.error_analysis.samples import Moments
from fp8pass.error_analysis.scans import SCANNED, scanned
from fp8pass.error_analysis.small_parameters import CANCELLATION, factors_of_small_gradients
from fp8pass.graph.classify import FLEX_ATTENTION, Kind, attention_output, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.names import operator_name
from fp8pass.graph.output_heads import fused_gradients
from fp8pass.graph.tags import HIGH_PRECISION_BY_CHOICE

aten = torch.ops.aten

# Their gradients are linear in the value kept for them, so that both have the same relative error.
LINEAR_KINDS = (Kind.GEMM, Kind.CONVOLUTION, Kind.QUANTIZE)

UNUSED = Amplification(0.0, 0.0, 0.0)

ADDED_TO_GRADIENT = "the backward adds it to a gradient, and the sum may be used as no gradient is"
IN_A_DISTANCE = "a distance is computed from its square and its products, which nearly cancel"
OF_THE_HEAD = "the forward computes it from the logits, for the gradients of an output head"
FEW_TOKENS = "attention over few tokens, where gradients of scores cancel and errors do not"


@dataclass
class _Findings:
    """What the rules of all regions say.

    Attributes:
        rules: of each region.
        wild: values that may be huge or infinite in a few places.
        ungrouped: values whose elements cannot share a scale, with the reason.
        compared: members that must not be computed from inexact values.
    """

    rules: dict[Region, RegionRule] = field(default_factory=dict)
    wild: set[fx.Node] = field(default_factory=set)
    ungrouped: dict[fx.Node, str] = field(default_factory=dict)
    compared: set[fx.Node] = field(default_factory=set)

    def add(self, region: Region, rule: RegionRule) -> None:
        """Another region's."""
        members = (*region.inputs, *region.nodes)
        self.rules[region] = rule
        self.ungrouped.update((members[i], why) for i, why in rule.ungrouped.items())
        self.wild.update(members[i] for i in rule.wild)
        self.compared.update(members[i] for i in rule.compared)


class Rules:
    """The error rules of one joint graph.

    Args:
        g: the joint graph.
        config: the user's choices, perhaps with `calibration` of values. Values without have unit
            variance.
        facts: which inputs and outputs of the graph are parameters, activations, gradients.
    """

    def __init__(self, g: fx.Graph, config: Config, facts: JointFacts) -> None:
        self.graph = g
        self.error_tolerance = config.error_tolerance
        self.backward = graph.tangent_dependent(g)
        self.coded_outputs = self._coded_outputs() if config.attention_output != "exact" else set()
        inputs = {n for n in g.nodes if n.op in ("placeholder", "get_attr")}
        inexact = (facts.leaves | facts.activations) - facts.parameters
        exact = inputs - self.backward - inexact
        splitter = Splitter(g, self.backward, frozenset(exact), has_formula)
        self.regions = splitter.split()
        self.junctions = splitter.junctions
        self.constants = splitter.constants
        self.discrete = splitter.discrete
        self.differences = splitter.differences
        self._head_gradients = fused_gradients(g).values - self.constants
        self._small_sums = factors_of_small_gradients(g, self.backward, facts.num_fwd_outputs)
        self._distances = expanded_distances(g) - self.constants - self.backward
        self._weights = self._computed_from(facts.weights)
        self._members = {n for region in self.regions for n in region.nodes}
        self._moments = _moments_of(g, config)

    def _coded_outputs(self) -> set[fx.Node]:
        """The outputs of attention that may be inexact because the user says so."""
        found = (attention_output(n) for n in self.backward)
        return {n for n in found if n is not None and n not in self.backward}

    def _computed_from(self, inputs: Set[fx.Node]) -> set[fx.Node]:
        """`inputs`, and constants that are computed from these alone."""
        found = set(inputs)
        for node in self.graph.nodes:
            operands = node.all_input_nodes
            if operands and node in self.constants and found.issuperset(operands):
                found.add(node)
        return found

    @cached_property
    def _findings(self) -> _Findings:
        """The rule of each region; none are derived if any error is tolerated."""
        if self._are_off:
            return _Findings(rules={region: RegionRule() for region in self.regions})
        with compat.real_tensors():  # the passes run where tensors are fake
            return self._derive_in_order()

    def _derive_in_order(self) -> _Findings:
        """The rules, each once its inputs are known to be wild or not."""
        found = _Findings()
        ready = self.by_last_input()
        for node in self.graph.nodes:
            if node in self.junctions and not found.wild.isdisjoint(node.all_input_nodes):
                found.wild.add(node)
                found.ungrouped[node] = MASKED
            for region in ready.get(node, ()):
                found.add(region, derive(region, self._known(region, found.wild)))
        return found

    def by_last_input(self) -> dict[fx.Node, list[Region]]:
        """The regions by the last of their forward inputs."""
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        found: dict[fx.Node, list[Region]] = {}
        for region in self.regions:
            forward = [n for n in region.inputs if n not in self.backward]
            last = max(forward, key=order.__getitem__, default=region.nodes[0])
            found.setdefault(last, []).append(region)
        return found

    @cached_property
    def _derived(self) -> set[fx.Node]:
        """Members of regions with a rule."""
        return {n for r in self.regions if not self.reason_of(r) for n in r.nodes}

    @cached_property
    def _scanned(self) -> tuple[set[Region], set[Region]]:
        """The regions beside sums over positions: those whose values are exact, and the others."""
        rules = self._findings.rules
        exact, bounded = set[Region](), set[Region]()
        for beside in scanned(self.regions, self.backward):
            may_grow = any(rules[region].reason or rules[region].grows for region in beside)
            (exact if may_grow else bounded).update(beside)
        return exact, bounded - exact

    @cached_property
    def _found(self) -> dict[fx.Node, list[Amplification | str]]:
        """Each node's uses in regions: the amplification, or the reason why there is none."""
        found: dict[fx.Node, list[Amplification | str]] = {}
        for region in self.regions:
            self._record(region, self._findings.rules[region], found)
        return found

    @property
    def _are_off(self) -> bool:
        """Whether errors of any size are tolerated, so that nothing has to be derived."""
        return math.isinf(self.error_tolerance)

    def why_ungrouped(self, node: fx.Node) -> str:
        """Why elements of `node` cannot share a scale; '' if they can, as far as is known."""
        return self._findings.ungrouped.get(node, "")

    def reason_of(self, region: Region) -> str:
        """Why no rule of `region` could be derived; '' if one was."""
        return self._findings.rules[region].reason

    def why_exact(self, node: fx.Node) -> str:
        """Why the backward needs `node` exactly; '' if it does not."""
        uses = self._uses(node)
        if self._are_off:  # the user's choices are not
            uses = (self._by_choice(user) for user in node.users)
        return next((x for x in uses if x and isinstance(x, str)), "")

    def amplification(self, node: fx.Node) -> Amplification:
        """How much an error of `node` is amplified in the gradients: the worst of all its uses."""
        if self._are_off:
            return UNITY
        uses = [x for x in self._uses(node) if isinstance(x, Amplification)]
        worst = max(uses, key=lambda x: (x.bound, x.expected), default=UNUSED)
        spread = max((x.spread for x in uses), default=0.0)
        return replace(worst, spread=spread, needs_signs=any(x.needs_signs for x in uses))

    def uses_of_recomputed(self, node: fx.Node) -> list[Amplification]:
        """How much an error that `node` inherits is amplified, use by use.

        The amplifications of a region's inputs include what the region does with its members, and
        the errors of those that others use.
        """
        if self._are_off:
            return []
        inside = node in self._members
        uses = self._uses_outside(node) if inside else self._uses(node)
        return [x for x in uses if isinstance(x, Amplification) and not (inside and x is UNITY)]

    def allows(self, node: fx.Node, format: Format) -> bool:
        """Whether `node` may have the rounding error of `format`."""
        allowed = self.amplification(node).allows(format, self.error_tolerance)
        return allowed and not self.why_exact(node)

    def may_be_recomputed(self, node: fx.Node, format: Format) -> bool:
        """Whether `node` may be computed from operands that were stored in `format`.

        Inside a region it may: the amplifications of the region's inputs include it.
        """
        if format.lossless or node in self.constants:
            return True
        if node in self.discrete or node in self.differences:
            return False
        if self._are_off:
            return True
        summed = node in self.junctions or node in self._small_sums
        if summed or kind(node) in (Kind.GEMM, Kind.CONVOLUTION):
            return self.allows(node, format)
        if kind(node) is Kind.ATTENTION:
            return False
        return kind(node) not in DERIVABLE or (
            node in self._derived and node not in self._findings.compared
        )

    def _uses(self, node: fx.Node) -> Iterator[Amplification | str]:
        if node in self._distances:
            yield IN_A_DISTANCE
        if node in self._head_gradients:
            yield OF_THE_HEAD
        yield from self._found.get(node, ())
        yield from self._uses_outside(node)

    def _uses_outside(self, node: fx.Node) -> Iterator[Amplification | str]:
        """Uses by operators outside of regions, and by sums that end in other regions."""
        if node in self._small_sums:
            yield Amplification(CANCELLATION, CANCELLATION, CANCELLATION, needs_signs=True)
        for user in node.users:
            yield from self._use_by(user, node)

    def _use_by(self, user: fx.Node, node: fx.Node) -> Iterator[Amplification | str]:
        if user.op == "output" or user in self._members:
            return
        if user in self.junctions:
            yield ADDED_TO_GRADIENT if self._leaves_the_forward(user, node) else UNITY
        elif chosen := self._by_choice(user):
            yield chosen
        elif kind(user) in LINEAR_KINDS:
            yield UNITY
        elif kind(user) is Kind.ATTENTION:
            if user in self.backward:
                coded = node in self.coded_outputs and node is attention_output(user)
                yield self._output(user) if coded else self._attention(user)
        elif kind(user) not in (Kind.SYMBOL, Kind.CREATION, Kind.VIEW) and user in self.backward:
            name = operator_name(user)
            yield f"no rule bounds errors in the operator {name} of the backward, which reads it"

    def _leaves_the_forward(self, junction: fx.Node, node: fx.Node) -> bool:
        """Whether a forward value is added to a gradient.

        The sum has the error of its operands, but may be used as no gradient is: `logcumsumexp` and
        backwards written by hand take its exponential.
        """
        return junction in self.backward and node not in self.backward

    def _by_choice(self, user: fx.Node) -> str:
        """Why `user` needs its operands exactly: its layer stays in high precision by choice.

        '' for other operators.
        """
        chosen = user.meta.get(HIGH_PRECISION_BY_CHOICE) and user in self.backward
        return "a layer that stays in high precision by choice reads it" if chosen else ""

    def _attention(self, user: fx.Node) -> Amplification | str:
        """The rule for the operands of an attention operator, by the first of them."""
        if user.target in FLEX_ATTENTION:
            return "no rule bounds FlexAttention, whose scores may be changed by any function"
        sizes = _attention_sizes(user)
        bound = attention_rule.relative_bound(*sizes)
        if bound * E4M3.half_step > self.error_tolerance:
            return f"attention may amplify errors {bound:.0f}×"
        with compat.real_tensors():
            expected = attention_rule.expected(*sizes)
        if expected * E4M3.half_step > self.error_tolerance:
            return FEW_TOKENS
        return Amplification(max(bound, expected), expected)

    def _output(self, user: fx.Node) -> Amplification | str:
        """The rule for an output that the user lets be inexact: what is expected, no bound."""
        with compat.real_tensors():
            expected = attention_rule.expected(*_attention_sizes(user), "o")
        if expected * E2M5.half_step > self.error_tolerance:
            return FEW_TOKENS
        return Amplification(expected, expected)

    def known_of(self, region: Region) -> Known:
        """What is known of the values that enter a region."""
        return self._known(region, self._findings.wild)

    def _known(self, region: Region, wild: Set[fx.Node]) -> Known:
        moments = {n: self._moments[n] for n in region.values if n in self._moments}
        return Known(moments, self._weights, wild)

    def _record(
        self, region: Region, rule: RegionRule, record: dict[fx.Node, list[Amplification | str]]
    ) -> None:
        used = bool(region.backward or region.cached)
        exact, bounded = self._scanned
        reason = rule.reason or (SCANNED if region in exact else "")
        for index, node in enumerate((*region.inputs, *region.nodes)):
            found = record.setdefault(node, [])
            if reason and used and node not in self.constants:
                found.append(reason)
            elif (amplification := rule.by_index.get(index)) is not None:
                needs_signs = amplification.needs_signs or region in bounded
                found.append(replace(amplification, needs_signs=needs_signs))


def _moments_of(g: fx.Graph, config: Config) -> dict[fx.Node, Moments]:
    known = {name: Moments.rounded(mean, std) for name, mean, std in config.calibration}
    if not known:
        return {}
    return {n: known[name] for n, name in graph.value_names(g).items() if name in known}


def _attention_sizes(user: fx.Node) -> tuple[int, int]:
    """Tokens and head dimension of an attention operator, by the first of its operands."""
    operand = next(n for n in user.all_input_nodes if _is_matrix(n))
    *_, length, head_dim = (compat.size_hint(s) for s in graph.tensor(operand).shape)
    return length, head_dim


def _is_matrix(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.ndim >= 2 and val.is_floating_point()
