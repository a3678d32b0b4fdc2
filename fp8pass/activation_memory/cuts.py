"""Find the cheapest plan by two minimum cuts.

`passes/joint/plan_saved_values.py` explains why there are two cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import networkx as nx
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.decision import Decision, Decisions, decide_free
from fp8pass.activation_memory.format_choices import CHEAP_TO_RECOMPUTE, FormatChoices
from fp8pass.activation_memory.needs import Needs, find_relevant
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.patterns import is_same_shape_addition

Price = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Cut:
    """The nodes to save, the nodes to recompute, and the cost of both together.

    The cost is infinite if no cut gives the backward all nodes that it needs.
    """

    saved: set[fx.Node]
    recomputed: set[fx.Node]
    cost: float


def cheapest_plan(needs: Needs, choices: FormatChoices) -> Decisions:
    """Return the plan of the two cuts.

    The plan recomputes neither expensive nodes, such as GEMMs, nor chains of residual sums.
    """
    decisions: Decisions = {}
    for component in components(needs.values, needs.all, choices.recompute_price):
        exact, rest = _cut_component(component, needs, choices)
        for node in exact.recomputed | rest.recomputed:
            decisions[node] = CHEAP_TO_RECOMPUTE
        for node in exact.saved | rest.saved:
            decisions[node] = _decide(node, choices, needs, exactly=node in exact.saved)
    return decisions


def _cut_component(
    component: list[fx.Node], needs: Needs, choices: FormatChoices
) -> tuple[Cut, Cut]:
    """Return the cut for nodes that are needed exactly, and the cut for all other needed nodes.

    Under autocast, saving a 16-bit branch takes fewer bytes than saving its FP32 sum with the
    residual stream. But a sum that is recomputed from a recomputed sum needs all previous sums, and
    the backward would hold all of them. So the cuts are repeated with every second sum saved, until
    no sum is recomputed from another recomputed sum.
    """
    saved: set[fx.Node] = set()
    while True:
        exact, rest = _ComponentCuts(component, needs, choices, saved).cheapest()
        chained = _chained_sums(component, exact.recomputed | rest.recomputed, choices)
        if not chained:
            return exact, rest
        saved |= chained


def _chained_sums(
    values: list[fx.Node], recomputed: set[fx.Node], choices: FormatChoices
) -> set[fx.Node]:
    """Return every second sum of chains in which each sum is recomputed from the previous sum.

    `values` are in the order of the graph. Norms and casts may lie between two sums, as in
    post-norm layers. A sum is left out if the added branch is computed only from the previous sum
    and from values that are alive anyway, because recomputing such a sum does not keep other values
    alive.
    """
    found: set[fx.Node] = set()
    after_a_sum: set[fx.Node] = set()
    free: set[fx.Node] = set()  # alive anyway, or recomputed only from values that are alive anyway
    for value in values:
        operands = value.all_input_nodes
        free.update(n for n in (value, *operands) if choices.facts.is_free(n))
        if value not in recomputed:
            continue
        if operands and free.issuperset(operands):
            free.add(value)
        following = after_a_sum.intersection(operands)
        # A sum of a residual stream has several users: a norm and the next sum read it.
        is_sum = value in choices.rules.junctions and is_same_shape_addition(value)
        is_sum = is_sum and len(value.users) > 1
        has_branch = not (following | free).issuperset(operands)
        if following and has_branch and is_sum and math.isfinite(choices.save_price(value)):
            found.add(value)
        elif following or is_sum:
            after_a_sum.add(value)
    return found


@dataclass(frozen=True)
class _ComponentCuts:
    """Computes the two cuts of one component. Nodes in `saved` must not be recomputed."""

    component: list[fx.Node]
    needs: Needs
    choices: FormatChoices
    saved: set[fx.Node]

    def cheapest(self) -> tuple[Cut, Cut]:
        """Return the pair of cuts with the lowest total cost."""
        exact = {n for n in self.component if n in self.needs.exact}
        everything = {n for n in self.component if n in self.needs.all}
        firsts: list[Cut] = []
        for needed in self._exact_needs(exact, everything):
            for early in (False, True):
                first = self._exact_cut(needed, early=early)
                if first not in firsts:
                    firsts.append(first)
        candidates = [(first, self._remaining_cut(everything, first)) for first in firsts]
        best = min(candidates, key=lambda cuts: cuts[0].cost + cuts[1].cost)
        assert math.isfinite(best[0].cost + best[1].cost), "the backward cannot get all its values"
        return best

    def _exact_needs(self, exact: set[fx.Node], everything: set[fx.Node]) -> list[set[fx.Node]]:
        """Return candidate sets of values that the backward gets exactly. The cheapest plan wins.

        The first set is `exact`. Each other set contains the previous set and also:

        1. Masks. The backward can compute a mask from an exact value. If that value is saved
           exactly, there is no need to save the mask or a low-bit copy of the value. This may cost
           less: for example, the two masks of hardswish take as many bytes as a 16-bit value.
        2. Values of a checkpointed region. They cannot be saved, so the values from which the
           region is recomputed must be exact.
        3. Values for which a low-bit format costs at least as much as saving them exactly. They may
           be recomputed from an input that is saved exactly anyway. This set is tried only if a
           value is needed exactly, or if the elements of a needed value cannot share scales.
        """
        # Values that must not be computed from rounded values, and masks computed from such values.
        rigid: set[fx.Node] = set()
        for node in self.component:
            if math.isinf(self._recompute_price(node)):
                continue
            is_mask = not graph.is_float(node) and not rigid.isdisjoint(node.all_input_nodes)
            if is_mask or not self.choices.may_be_recomputed(node):
                rigid.add(node)
        masks = exact | (rigid & everything)
        regions = masks | {n for n in rigid if math.isinf(self.choices.save_price(n))}
        candidates = [exact, masks, regions]
        if exact or any(map(self.choices.rules.why_ungrouped, everything)):
            candidates.append(regions | {n for n in everything if not self._takes_low_bits(n)})
        return [needed for needed, _ in groupby(candidates)]

    def _takes_low_bits(self, node: fx.Node) -> bool:
        exact = self.choices.save_price(node)
        return math.isinf(exact) or self.choices.cheapest(node).price < exact

    def _recompute_price(self, node: fx.Node) -> float:
        return math.inf if node in self.saved else self.choices.recompute_price(node)

    def _exact_cut(self, needed: set[fx.Node], *, early: bool) -> Cut:
        choices = self.choices

        def save(node: fx.Node) -> float:
            return 0 if choices.facts.is_free(node) else choices.save_price(node)

        def recompute(node: fx.Node) -> float:
            price = self._recompute_price(node)
            return 0 if early and math.isfinite(price) else price

        cut = min_cut(self.component, needed, save, recompute, early=early)
        cost = sum(map(save, cut.saved)) + sum(map(choices.recompute_price, cut.recomputed))
        return Cut(cut.saved, cut.recomputed, cost)

    def _remaining_cut(self, needed: set[fx.Node], first: Cut) -> Cut:
        choices = self.choices
        available = self._exactly_available(first)

        def save(node: fx.Node) -> float:
            if node in first.saved or choices.facts.is_free(node):
                return 0
            exact = choices.save_price(node)
            if node in available or math.isinf(exact):
                return exact
            return min(exact, choices.cheapest(node).price)

        def recompute(node: fx.Node) -> float:
            if node in first.recomputed:
                return 0
            if node not in available and not choices.may_be_recomputed(node):
                return math.inf
            return self._recompute_price(node)

        return min_cut(self.component, needed, save, recompute)

    def _exactly_available(self, first: Cut) -> set[fx.Node]:
        """Return the nodes that the backward can get exactly after the first cut.

        They must not be saved in a low-bit format, because an operator that does not tolerate
        errors may read them.
        """
        members, facts = set(self.component), self.choices.facts
        given = first.saved | first.recomputed
        found = {n for n in self.component if n in given or facts.is_free(n)}
        for node in self.component:
            if math.isfinite(self._recompute_price(node)):
                exact = all(n in found for n in node.all_input_nodes if n in members)
            else:
                exact = not graph.is_float(node)
            if exact:
                found.add(node)
        return found


def _decide(node: fx.Node, choices: FormatChoices, needs: Needs, *, exactly: bool) -> Decision:
    if choices.facts.is_free(node):
        return decide_free(node, choices.facts)
    if exactly:
        return Decision(EXACT, 0, _why_exact(node, needs))
    choice = choices.cheapest(node)
    assert choice.format is not None
    if choice.format.lossless or choice.price < choices.save_price(node):
        return choice
    return Decision(EXACT, 0, choices.why_not_low_bit(node, choice))


def _why_exact(node: fx.Node, needs: Needs) -> str:
    """Return why a value is saved exactly.

    If the backward does not need `node` exactly, return the reason of the nearest value that is
    computed from `node` and that the backward needs exactly.
    """
    pending, seen = [node], {node}
    for value in pending:
        if value in needs.exact:
            reason = needs.exact[value]
            return reason if value is node else SavedReason.NEEDED_FOR.format(reason=reason)
        users = [n for n in value.users if n not in seen]
        seen.update(users)
        pending.extend(users)
    return SavedReason.EXACT_VALUES_FOLLOW


def components(values: list[fx.Node], needed: set[fx.Node], price: Price) -> list[list[fx.Node]]:
    """Split needed values, and values from which they may be recomputed, into independent sets."""
    order = find_relevant(values, needed, lambda node: math.isfinite(price(node)))
    connected = nx.utils.UnionFind(order)
    for node in order:
        if math.isfinite(price(node)):
            connected.union(node, *node.all_input_nodes)
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        grouped.setdefault(connected[node], []).append(node)
    return list(grouped.values())


_SOURCE, _SINK = "source", "sink"


def min_cut(
    component: list[fx.Node],
    needed: set[fx.Node],
    save_price: Price,
    recompute_price: Price,
    *,
    early: bool = False,
) -> Cut:
    """Return the cheapest cut that gives the backward all nodes of `needed`.

    Among equally cheap cuts, the result is the cut closest to the backward. With `early`, the
    result is the cut closest to the inputs.
    """
    if not needed:
        return Cut(set(), set(), 0)
    component = find_relevant(component, needed, lambda n: math.isfinite(recompute_price(n)))
    index = {node: i for i, node in enumerate(component)}
    values = tuple(
        CutValue(
            save_price(node),
            recompute_price(node),
            node in needed,
            tuple(index[n] for n in node.all_input_nodes if n in index),
        )
        for node in component
    )
    saved, recomputed, cost = solve_cut(values, early)
    return Cut({component[i] for i in saved}, {component[i] for i in recomputed}, cost)


class CutValue(NamedTuple):
    """A value of a cut. `operands` contains the indices of its operands among the values."""

    save_price: float
    recompute_price: float
    needed: bool
    operands: tuple[int, ...]


@lru_cache(maxsize=1024)  # equal layers have equal components
def solve_cut(values: tuple[CutValue, ...], early: bool) -> tuple[set[int], set[int], float]:
    """Return the indices of saved values, the indices of recomputed values, and the cost.

    The cost is infinite if no cut gives all needed values. For `early`, see `min_cut`.
    """
    network = _network(values)
    flow = nx.algorithms.flow.boykov_kolmogorov
    ends = (network.reverse(), _SINK, _SOURCE) if early else (network, _SOURCE, _SINK)
    try:
        cost, sides = nx.minimum_cut(*ends, flow_func=flow)
    except nx.NetworkXUnbounded:
        return set(), set(), math.inf
    sink_side = sides[0] if early else sides[1]
    recomputed = {i for i in range(len(values)) if (i, "in") in sink_side}
    saved = {i for i in range(len(values)) if (i, "out") in sink_side} - recomputed
    return saved, recomputed, cost


def _network(values: tuple[CutValue, ...]) -> nx.DiGraph:
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for i, value in enumerate(values):
        network.add_edge(_SOURCE, (i, "in"), capacity=_capacity(value.recompute_price))
        network.add_edge((i, "in"), (i, "out"), capacity=_capacity(value.save_price))
        if value.needed:
            network.add_edge((i, "out"), _SINK, capacity=math.inf)
        if math.isfinite(value.recompute_price):
            for operand in value.operands:
                network.add_edge((operand, "out"), (i, "in"), capacity=math.inf)
    return network


def _capacity(price: float) -> float:
    return int(price) if math.isfinite(price) else price
