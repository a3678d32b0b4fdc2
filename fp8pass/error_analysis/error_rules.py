"""Decide which values may be stored in which low-bit formats.

The *amplification* of a value is the relative error of the gradients per unit relative error of the
value, in the worst case (`bound`) and for independent rounding errors (`expected`). A value may be
stored in a format if

    bound × half step of the format ≤ error_tolerance

Values without a rule stay exact. Attention has a separate rule (`attention.py`). Values that a mask
may have made huge are not stored in groups with a common scale (`ranges.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect.formats import E2M5, E4M3, Format
from fp8pass.error_analysis.attention import bound_amplification, estimate_amplification
from fp8pass.error_analysis.derivation import (
    MASKED,
    UNITY,
    Amplification,
    InputFacts,
    RegionRule,
    derive,
)
from fp8pass.error_analysis.differences import find_expanded_distances
from fp8pass.error_analysis.regions import DERIVABLE, Region, Splitter
from fp8pass.error_analysis.samples import Moments
from fp8pass.error_analysis.summed_values import (
    CANCELLATION,
    SCANNED,
    find_factors_of_small_gradients,
    find_scan_regions,
)
from fp8pass.graph.classify import FLEX_ATTENTION, Kind, attention_output, kind
from fp8pass.graph.joint_facts import JointFacts
from fp8pass.graph.names import operator_name
from fp8pass.graph.output_heads import fused_gradients
from fp8pass.graph.tags import HIGH_PRECISION_BY_CHOICE

# The gradients of these operators are linear in the stored value, so the relative error of the
# gradients equals the relative error of the value.
LINEAR_KINDS = (Kind.GEMM, Kind.CONVOLUTION, Kind.QUANTIZE)

UNUSED = Amplification(0.0, 0.0, 0.0)

ADDED_TO_GRADIENT = "the backward adds this tensor to a gradient and may use the sum nonlinearly"
BY_CHOICE = "read by a layer that the options keep in high precision"
IN_A_DISTANCE = "used in a distance, where its squares and products nearly cancel"
OF_THE_HEAD = "computed from the logits in the forward, for the gradients of an output head"
FEW_TOKENS = "attention over few tokens: terms of score gradients nearly cancel, but errors do not"

Use = Amplification | str  # the amplification of a use, or the reason why the value must be exact


@dataclass
class _Findings:
    rules: dict[Region, RegionRule] = field(default_factory=dict)
    # Values that may have a few huge or infinite elements.
    outliers: set[fx.Node] = field(default_factory=set)
    # Maps values whose elements cannot share a scale to the reason.
    ungrouped: dict[fx.Node, str] = field(default_factory=dict)
    # Members of regions that may be computed from inexact values.
    recomputable: set[fx.Node] = field(default_factory=set)

    def add(self, region: Region, rule: RegionRule) -> None:
        nodes = (*region.inputs, *region.nodes)
        self.rules[region] = rule
        self.ungrouped.update((nodes[i], why) for i, why in rule.ungrouped.items())
        self.outliers.update(nodes[i] for i in rule.outliers)
        if not rule.reason:
            self.recomputable.update(set(region.nodes) - {nodes[i] for i in rule.jumping})


class Rules:
    """The error rules of one joint graph. Uncalibrated values are assumed to have unit variance."""

    def __init__(self, g: fx.Graph, config: Config, facts: JointFacts) -> None:
        self.graph, self.config, self.facts = g, config, facts
        self.error_tolerance = config.error_tolerance
        self.backward = graph.tangent_dependent(g)
        outputs = {attention_output(n) for n in self.backward} - self.backward - {None}
        self.inexact_outputs = outputs if config.attention_output != "exact" else set()
        inputs = {n for n in g.nodes if n.op in ("placeholder", "get_attr")}
        inexact = (facts.leaves | facts.activations) - facts.parameters
        splitter = Splitter(g, self.backward, inputs - self.backward - inexact)
        self.regions = splitter.split()
        self.junctions = splitter.junctions
        self.constants = splitter.constants
        self.discrete = splitter.discrete
        self.differences = splitter.differences
        self._head_gradients = fused_gradients(g).values - self.constants
        self._small_sums = find_factors_of_small_gradients(g, self.backward, facts.num_fwd_outputs)
        self._distances = find_expanded_distances(g) - self.constants - self.backward
        self._weights = self._find_computed_from(facts.weights)
        self._members = {n for region in self.regions for n in region.nodes}
        self._moments = _read_moments(g, config)

    def _find_computed_from(self, inputs: Set[fx.Node]) -> set[fx.Node]:
        found = set(inputs)
        for node in self.graph.nodes:
            operands = node.all_input_nodes
            if operands and node in self.constants and found.issuperset(operands):
                found.add(node)
        return found

    @cached_property
    def _findings(self) -> _Findings:
        """The rules of all regions, derived in graph order, because outliers propagate forward."""
        if self._are_off:
            return _Findings({region: RegionRule() for region in self.regions})
        found = _Findings()
        ready = self.by_last_input()
        with compat.real_tensors():  # passes run under a fake tensor mode
            for node in self.graph.nodes:
                if node in self.junctions and not found.outliers.isdisjoint(node.all_input_nodes):
                    found.outliers.add(node)
                    found.ungrouped[node] = MASKED
                for region in ready.get(node, ()):
                    found.add(region, derive(region, self.input_facts(region, found.outliers)))
        return found

    def by_last_input(self) -> dict[fx.Node, list[Region]]:
        """Map each node to the regions whose last forward input is this node, in graph order."""
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        found: dict[fx.Node, list[Region]] = {}
        for region in self.regions:
            forward = [n for n in region.inputs if n not in self.backward]
            last = max(forward, key=order.__getitem__, default=region.nodes[0])
            found.setdefault(last, []).append(region)
        return found

    def input_facts(self, region: Region, outliers: Set[fx.Node] | None = None) -> InputFacts:
        """Return facts about a region's inputs, given the `outliers` known so far."""
        moments = {n: self._moments[n] for n in region.values if n in self._moments}
        outliers = self._findings.outliers if outliers is None else outliers
        return InputFacts(moments, self._weights, outliers)

    @cached_property
    def _uses_in_regions(self) -> dict[fx.Node, list[Use]]:
        """The uses of each node in regions.

        If an exponential may grow next to a scan, the values of all regions next to the scan must
        be exact. Otherwise their formats must preserve signs.
        """
        rules = self._findings.rules
        exact, bounded = set[Region](), set[Region]()
        for near in find_scan_regions(self.regions, self.backward):
            may_grow = any(rules[region].reason or rules[region].grows for region in near)
            (exact if may_grow else bounded).update(near)
        found: dict[fx.Node, list[Use]] = {}
        for region in self.regions:
            rule, used = rules[region], bool(region.backward or region.cached)
            reason = rule.reason or (SCANNED if region in exact else "")
            signs = region in bounded - exact
            for index, node in enumerate((*region.inputs, *region.nodes)):
                uses = found.setdefault(node, [])
                if reason and used and node not in self.constants:
                    uses.append(reason)
                elif (use := rule.amplifications.get(index)) is not None:
                    uses.append(replace(use, needs_signs=use.needs_signs or signs))
        return found

    @property
    def _are_off(self) -> bool:
        return math.isinf(self.error_tolerance)

    def why_ungrouped(self, node: fx.Node) -> str:
        return self._findings.ungrouped.get(node, "")

    def reason_of(self, region: Region) -> str:
        """Return why no rule of `region` could be derived, or ''."""
        return self._findings.rules[region].reason

    def why_exact(self, node: fx.Node) -> str:
        """Return why the backward needs `node` exactly, or ''."""
        uses = self._uses(node)
        if self._are_off:  # the user's choices still apply
            uses = (BY_CHOICE for user in node.users if self._is_by_choice(user))
        return next((x for x in uses if isinstance(x, str)), "")

    def amplification(self, node: fx.Node) -> Amplification:
        """Return how much the gradients amplify an error of `node` in the worst of its uses."""
        if self._are_off:
            return UNITY
        uses = [x for x in self._uses(node) if isinstance(x, Amplification)]
        worst = max(uses, key=lambda x: (x.bound, x.expected), default=UNUSED)
        flush_bound = max((x.flush_bound for x in uses), default=0.0)
        needs_signs = any(x.needs_signs for x in uses)
        return replace(worst, flush_bound=flush_bound, needs_signs=needs_signs)

    def uses_of_recomputed(self, node: fx.Node) -> list[Amplification]:
        """Return how much each use amplifies an error of a recomputed `node`.

        Uses inside the node's region are left out, because the amplifications of the region's
        inputs include them.
        """
        if self._are_off:
            return []
        inside = node in self._members
        uses = self._uses_outside(node) if inside else self._uses(node)
        return [x for x in uses if isinstance(x, Amplification) and not (inside and x is UNITY)]

    def allows(self, node: fx.Node, format: Format) -> bool:
        allowed = self.amplification(node).allows(format, self.error_tolerance)
        return allowed and not self.why_exact(node)

    def may_be_recomputed(self, node: fx.Node, format: Format) -> bool:
        """Whether `node` may be computed from operands that were stored in `format`.

        The amplifications of a region's inputs already include the errors of the region's members.
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
        if kind(node) in DERIVABLE:
            return node in self._findings.recomputable
        return kind(node) is not Kind.ATTENTION

    def _uses(self, node: fx.Node) -> Iterator[Use]:
        if node in self._distances:
            yield IN_A_DISTANCE
        if node in self._head_gradients:
            yield OF_THE_HEAD
        yield from self._uses_in_regions.get(node, ())
        yield from self._uses_outside(node)

    def _uses_outside(self, node: fx.Node) -> Iterator[Use]:
        """Yield uses by operators outside of regions, and in gradients of small parameters."""
        if node in self._small_sums:
            yield Amplification(CANCELLATION, CANCELLATION, CANCELLATION, needs_signs=True)
        for user in node.users:
            if user.op != "output" and user not in self._members:
                yield from self._uses_by(user, node)

    def _uses_by(self, user: fx.Node, node: fx.Node) -> Iterator[Use]:
        is_backward = user in self.backward
        if user in self.junctions:
            # The backward of `logcumsumexp`, like some custom backwards, takes the exponential of
            # a sum of a gradient and a forward value.
            yield ADDED_TO_GRADIENT if is_backward and node not in self.backward else UNITY
        elif self._is_by_choice(user):
            yield BY_CHOICE
        elif kind(user) in LINEAR_KINDS:
            yield UNITY
        elif kind(user) is Kind.ATTENTION:
            if is_backward:
                is_output = node in self.inexact_outputs and node is attention_output(user)
                yield self._use_output(user) if is_output else self._use_operand(user)
        elif is_backward and kind(user) not in (Kind.SYMBOL, Kind.CREATION, Kind.VIEW):
            name = operator_name(user)
            yield f"no rule bounds errors in the backward operator {name}, which reads this tensor"

    def _is_by_choice(self, user: fx.Node) -> bool:
        return bool(user.meta.get(HIGH_PRECISION_BY_CHOICE)) and user in self.backward

    def _use_operand(self, user: fx.Node) -> Use:
        if user.target in FLEX_ATTENTION:
            return "no rule bounds errors in FlexAttention, whose score_mod may be any function"
        sizes = _read_attention_sizes(user)
        bound = bound_amplification(*sizes)
        if bound * E4M3.half_step > self.error_tolerance:
            return f"attention may amplify errors {bound:.0f}×"
        with compat.real_tensors():
            expected = estimate_amplification(*sizes)
        if expected * E4M3.half_step > self.error_tolerance:
            return FEW_TOKENS
        return Amplification(max(bound, expected), expected)

    def _use_output(self, user: fx.Node) -> Use:
        """Return the amplification of an error of attention's output.

        The expected amplification also serves as the bound, because no bound has been derived.
        """
        with compat.real_tensors():
            expected = estimate_amplification(*_read_attention_sizes(user), "o")
        if expected * E2M5.half_step > self.error_tolerance:
            return FEW_TOKENS
        return Amplification(expected, expected)


def _read_moments(g: fx.Graph, config: Config) -> dict[fx.Node, Moments]:
    known = {name: Moments.rounded(mean, std) for name, mean, std in config.calibration}
    if not known:
        return {}
    return {n: known[name] for n, name in graph.value_names(g).items() if name in known}


def _read_attention_sizes(user: fx.Node) -> tuple[int, int]:
    """Return (tokens, head dimension) of attention's first floating operand."""
    values = (graph.value(n) for n in user.all_input_nodes)
    matrix = next(v for v in values if v is not None and v.ndim >= 2 and v.is_floating_point())
    *_, length, head_dim = (compat.size_hint(s) for s in matrix.shape)
    return length, head_dim
