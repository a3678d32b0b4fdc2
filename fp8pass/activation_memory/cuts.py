"""The plan of two minimum cuts, which `passes/joint/plan_saved_values.py` explains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import networkx as nx
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.costs import keep_price, recompute_price
from fp8pass.activation_memory.decision import Decision, Needs, choice_made, free_decision
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.residual_stream import chained_sums
from fp8pass.dialect.formats import EXACT

Cost = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Cut:
    """The nodes to keep and to recompute, so that the backward has the needed ones; the cost."""

    kept: set[fx.Node]
    recomputed: set[fx.Node]
    cost: float


def cheapest_plan(needs: Needs, choices: FormatChoices) -> dict[fx.Node, Decision]:
    """The plan of the two cuts; it recomputes nothing expensive, and no chain of residual sums."""
    decisions = {}
    for component in components(needs.values, needs.all, recompute_price):
        exact, rest = plan_component(component, needs, choices)
        for node in exact.recomputed | rest.recomputed:
            decisions[node] = Decision(None, 0, "cheap to compute again")
        for node in exact.kept | rest.kept:
            decisions[node] = _decide(node, choices, needs, exactly=node in exact.kept)
    return decisions


def plan_component(
    component: list[fx.Node], needs: Needs, choices: FormatChoices
) -> tuple[Cut, Cut]:
    """The cut for the exact needs of a component, and the one for the rest."""
    stored: set[fx.Node] = set()
    while True:
        exact, rest = _ComponentCuts(component, needs, choices, stored).cheapest()
        recomputed = exact.recomputed | rest.recomputed
        chained = chained_sums(
            component, recomputed, choices.rules.junctions, choices.facts.is_free
        )
        if not chained:
            return exact, rest
        stored |= chained


@dataclass(frozen=True)
class _ComponentCuts:
    """The two cuts of one component; values of `stored` are not recomputed."""

    component: list[fx.Node]
    needs: Needs
    choices: FormatChoices
    stored: set[fx.Node]

    def cheapest(self) -> tuple[Cut, Cut]:
        """The pair of cuts that costs least."""
        exact = {n for n in self.component if n in self.needs.exact}
        everything = {n for n in self.component if n in self.needs.all}
        firsts: list[Cut] = []
        for needed in self._exact_needs(exact, everything):
            for early in (False, True) if needed else (False,):
                first = self._exact_cut(needed, early=early)
                if first not in firsts:
                    firsts.append(first)
        candidates = [(first, self._remaining_cut(everything, first)) for first in firsts]
        best = min(candidates, key=lambda cuts: cuts[0].cost + cuts[1].cost)
        assert math.isfinite(best[0].cost + best[1].cost), "values that nothing gives the backward"
        return best

    def _exact_needs(self, exact: set[fx.Node], everything: set[fx.Node]) -> list[set[fx.Node]]:
        """What the first cut may be for: `exact`, and with it what no low bits can give.

        To keep exactly what a mask is computed from, for all its uses, may cost less than the mask
        and low bits: hardswish has two, in 16 bits. And what a checkpointed region computes cannot
        be kept instead, so that what it is computed from has to be exact. Where something is needed
        exactly, or cannot share scales, it may follow from an input that is kept exactly in any
        case.
        """
        rigid: set[fx.Node] = set()  # and the masks that are computed from them
        for node in self.component:
            if math.isinf(self._recompute_price(node)):
                continue
            follows = not _is_float(node) and not rigid.isdisjoint(node.all_input_nodes)
            if follows or not self.choices.may_be_recomputed(node):
                rigid.add(node)
        masks = exact | (rigid & everything)
        regions = masks | {n for n in rigid if math.isinf(keep_price(n))}
        candidates = [masks, regions]
        if exact or any(map(self.choices.rules.why_ungrouped, everything)):
            candidates.append(regions | {n for n in everything if not self._takes_low_bits(n)})
        found = [exact]
        for needed in candidates:
            if needed != found[-1]:
                found.append(needed)
        return found

    def _takes_low_bits(self, node: fx.Node) -> bool:
        exact = keep_price(node)
        return math.isinf(exact) or self.choices.cheapest(node).units < exact

    def _recompute_price(self, node: fx.Node) -> float:
        return math.inf if node in self.stored else recompute_price(node)

    def _exact_cut(self, needed: set[fx.Node], *, early: bool) -> Cut:
        facts = self.choices.facts

        def bytes_(node: fx.Node) -> float:
            return 0 if facts.is_free(node) else keep_price(node)

        def price(node: fx.Node) -> float:
            true_price = self._recompute_price(node)
            return 0 if early and math.isfinite(true_price) else true_price

        cut = min_cut(self.component, needed, bytes_, price, early=early)
        cost = sum(map(bytes_, cut.kept)) + sum(map(recompute_price, cut.recomputed))
        return Cut(cut.kept, cut.recomputed, cost)

    def _remaining_cut(self, needed: set[fx.Node], first: Cut) -> Cut:
        choices = self.choices
        available = self._exactly_available(first)

        def bytes_(node: fx.Node) -> float:
            if node in first.kept or choices.facts.is_free(node):
                return 0
            exact = keep_price(node)
            if node in available or math.isinf(exact):
                return exact
            return min(exact, choices.cheapest(node).units)

        def price(node: fx.Node) -> float:
            if node in first.recomputed:
                return 0
            inexact = node not in available
            if inexact and not choices.may_be_recomputed(node):
                return math.inf
            return self._recompute_price(node)

        return min_cut(self.component, needed, bytes_, price)

    def _exactly_available(self, first: Cut) -> set[fx.Node]:
        """The nodes that the backward can have exactly after the first cut, by recomputation too.

        None of them may be stored in low bits, since an operator that tolerates no error may use
        them.
        """
        members, facts = set(self.component), self.choices.facts
        given = first.kept | first.recomputed
        found = {n for n in self.component if n in given or facts.is_free(n)}
        for node in self.component:
            if math.isfinite(self._recompute_price(node)):
                exact = all(n in found for n in node.all_input_nodes if n in members)
            else:
                exact = not _is_float(node)
            if exact:
                found.add(node)
        return found


def _is_float(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.is_floating_point()


def _decide(node: fx.Node, choices: FormatChoices, needs: Needs, *, exactly: bool) -> Decision:
    if choices.facts.is_free(node):
        return free_decision(node, choices.facts)
    if exactly:
        return Decision(EXACT, 0, _why_exact(node, needs))
    choice = choices.cheapest(node)
    if choice.format.lossless or choice.units < keep_price(node):
        return choice_made(choice)
    return Decision(EXACT, 0, choice.reason)


def _why_exact(node: fx.Node, needs: Needs) -> str:
    """Why a value is kept exactly: it, or the nearest value computed from it, is needed exactly."""
    pending, seen = [node], {node}
    for value in pending:
        if value in needs.exact:
            through = "" if value is node else "what is computed from it must be exact: "
            return f"{through}{needs.exact[value]}"
        users = [n for n in value.users if n not in seen]
        seen.update(users)
        pending.extend(users)
    return "exact values follow from it"


def components(values: list[fx.Node], needed: set[fx.Node], price: Cost) -> list[list[fx.Node]]:
    """Independent sets of needed values and values they can be recomputed from, in order."""
    order = _relevant(values, needed, price)
    connected = nx.utils.UnionFind(order)
    for node in order:
        if math.isfinite(price(node)):
            connected.union(node, *node.all_input_nodes)
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        grouped.setdefault(connected[node], []).append(node)
    return list(grouped.values())


def _relevant(values: list[fx.Node], needed: set[fx.Node], price: Cost) -> list[fx.Node]:
    found = set(needed)
    for node in reversed(values):
        if node in found and math.isfinite(price(node)):
            found.update(node.all_input_nodes)
    return [n for n in values if n in found]


_SOURCE, _SINK = "source", "sink"


def min_cut(
    component: list[fx.Node],
    needed: set[fx.Node],
    keep_price: Cost,
    price: Cost,
    *,
    early: bool = False,
) -> Cut:
    """The cheapest cut that gives the backward all nodes of `needed`.

    Of several cheapest cuts the one closest to the backward, or with `early` to the inputs. Of
    infinite cost if there is none.
    """
    if not needed:
        return Cut(set(), set(), 0)
    component = _relevant(component, needed, price)
    index = {node: i for i, node in enumerate(component)}
    values = tuple(
        _Value(
            keep_price(node),
            price(node),
            node in needed,
            tuple(index[n] for n in node.all_input_nodes if n in index),
        )
        for node in component
    )
    kept, recomputed, cost = _solved(values, early)
    return Cut({component[i] for i in kept}, {component[i] for i in recomputed}, cost)


class _Value(NamedTuple):
    """A node of a component: its prices, whether it is needed, and its operands, by index."""

    keep_price: float
    recompute_price: float
    needed: bool
    operands: tuple[int, ...]


@lru_cache(maxsize=1024)  # the layers of a model ask for the same
def _solved(values: tuple[_Value, ...], early: bool) -> tuple[set[int], set[int], float]:
    """Which values are kept and which recomputed, by index, and the cost."""
    network = _network(values)
    flow = nx.algorithms.flow.boykov_kolmogorov
    ends = (network.reverse(), _SINK, _SOURCE) if early else (network, _SOURCE, _SINK)
    try:
        cost, sides = nx.minimum_cut(*ends, flow_func=flow)
    except nx.NetworkXUnbounded:
        return set(), set(), math.inf
    sink_side = sides[0] if early else sides[1]
    recomputed = {i for i in range(len(values)) if (i, "in") in sink_side}
    kept = {i for i in range(len(values)) if (i, "out") in sink_side} - recomputed
    return kept, recomputed, cost


def _network(values: tuple[_Value, ...]) -> nx.DiGraph:
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    for i, value in enumerate(values):
        _arc(network, _SOURCE, (i, "in"), value.recompute_price)
        _arc(network, (i, "in"), (i, "out"), value.keep_price)
        if value.needed:
            _arc(network, (i, "out"), _SINK, math.inf)
        if math.isfinite(value.recompute_price):
            for operand in value.operands:
                _arc(network, (operand, "out"), (i, "in"), math.inf)
    return network


def _arc(network: nx.DiGraph, tail: object, head: object, capacity: float) -> None:
    if math.isinf(capacity):
        network.add_edge(tail, head)  # networkx: no capacity means infinite
    elif capacity > 0:
        network.add_edge(tail, head, capacity=int(capacity))
    else:
        network.add_nodes_from((tail, head))
