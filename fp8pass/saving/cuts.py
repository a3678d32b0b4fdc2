"""The two minimum cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from fp8pass import graph
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.joint import JointFacts
from fp8pass.saving.costs import bytes_to_store, recompute_price
from fp8pass.saving.decision import Decision, Needs, free_decision
from fp8pass.saving.storage import Storage

Cost = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Cut:
    """A way to have some values in the backward: nodes kept, nodes recomputed, in all `cost`."""

    kept: set[fx.Node]
    recomputed: set[fx.Node]
    cost: float


def cheapest_plan(needs: Needs, storage: Storage) -> dict[fx.Node, Decision]:
    """The plan of the two cuts: nothing expensive is computed twice."""
    decisions = {}
    for component in components(needs.values, needs.all, recompute_price):
        exact, rest = plan_component(component, needs, storage)
        for node in exact.recomputed | rest.recomputed:
            decisions[node] = Decision(None, 0, "cheap to compute again")
        for node in exact.kept | rest.kept:
            decisions[node] = _decide(node, storage, needs, exactly=node in exact.kept)
    return decisions


def plan_component(region: list[fx.Node], needs: Needs, storage: Storage) -> tuple[Cut, Cut]:
    """The cut for the exact needs of a component, and the one for the rest."""
    exact = {n for n in region if n in needs.exact}
    everything = {n for n in region if n in needs.all}
    candidates = []
    for early in (False, True) if exact else (False,):
        first = _exact_cut(region, exact, storage.facts, early=early)
        candidates.append((first, _remaining_cut(region, everything, first, storage)))
    return min(candidates, key=lambda cuts: cuts[0].cost + cuts[1].cost)


def _exact_cut(
    region: list[fx.Node], needed: set[fx.Node], facts: JointFacts, *, early: bool
) -> Cut:
    def bytes_(node: fx.Node) -> float:
        return 0 if facts.is_free(node) else bytes_to_store(node)

    def price(node: fx.Node) -> float:
        true_price = recompute_price(node)
        return 0 if early and math.isfinite(true_price) else true_price

    cut = min_cut(region, needed, bytes_, price, early=early)
    cost = sum(map(bytes_, cut.kept)) + sum(map(recompute_price, cut.recomputed))
    return Cut(cut.kept, cut.recomputed, cost)


def _remaining_cut(
    region: list[fx.Node], needed: set[fx.Node], first: Cut, storage: Storage
) -> Cut:
    facts = storage.facts
    available = _exactly_available(region, first, facts)

    def bytes_(node: fx.Node) -> float:
        if node in first.kept or facts.is_free(node):
            return 0
        exact = bytes_to_store(node)
        if node in available or math.isinf(exact):
            return exact
        return min(exact, storage.choice(node).units)

    def price(node: fx.Node) -> float:
        if node in first.recomputed:
            return 0
        inexact = node not in available
        if inexact and not storage.may_be_recomputed(node):
            return math.inf
        return recompute_price(node)

    return min_cut(region, needed, bytes_, price)


def _exactly_available(region: list[fx.Node], first: Cut, facts: JointFacts) -> set[fx.Node]:
    """What the backward can have exactly after the first cut: also all that follows from it.

    None of it may be stored in low bits, since an operator that tolerates no error may use it.
    """
    members = set(region)
    found = {n for n in region if n in first.kept or n in first.recomputed or facts.is_free(n)}
    for node in region:
        if math.isfinite(recompute_price(node)):
            exact = all(n in found for n in node.all_input_nodes if n in members)
        else:
            exact = not _is_float(node)
        if exact:
            found.add(node)
    return found


def _is_float(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.is_floating_point()


def _decide(node: fx.Node, storage: Storage, needs: Needs, *, exactly: bool) -> Decision:
    if storage.facts.is_free(node):
        return free_decision(node, storage.facts)
    if exactly:
        return Decision(EXACT, 0, _why_exact(node, needs))
    choice = storage.choice(node)
    if choice.format.lossless or choice.units < bytes_to_store(node):
        return Decision(choice.format, choice.group_size, choice.reason, choice.expected_error)
    return Decision(EXACT, 0, choice.reason)


def _why_exact(node: fx.Node, needs: Needs) -> str:
    """Why a value is kept exactly: it is needed so, or the nearest one computed from it is."""
    pending, seen = [node], {node}
    for value in pending:
        if value in needs.exact:
            through = "" if value is node else "for what follows from it: "
            return f"{through}{needs.exact[value]}"
        users = [n for n in value.users if n not in seen]
        seen.update(users)
        pending.extend(users)
    return "exact values follow from it"


def components(values: list[fx.Node], needed: set[fx.Node], price: Cost) -> list[list[fx.Node]]:
    """Independent sets of needed values and what they can be recomputed from, in order."""
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
    region: list[fx.Node],
    needed: set[fx.Node],
    bytes_to_store: Cost,
    price: Cost,
    *,
    early: bool = False,
) -> Cut:
    """The cheapest way to have `needed` in the backward.

    Among equally cheap ones that closest to the backward, or with `early` to the inputs.
    """
    if not needed:
        return Cut(set(), set(), 0)
    region = _relevant(region, needed, price)
    network = _network(region, needed, bytes_to_store, price)
    flow = nx.algorithms.flow.boykov_kolmogorov
    if early:
        cost, (sink_side, _) = nx.minimum_cut(network.reverse(), _SINK, _SOURCE, flow_func=flow)
    else:
        cost, (_, sink_side) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=flow)
    recomputed = {n for n in region if (n, "in") in sink_side}
    kept = {n for n in region if (n, "out") in sink_side} - recomputed
    return Cut(kept, recomputed, cost)


def _network(
    region: list[fx.Node], needed: set[fx.Node], bytes_to_store: Cost, price: Cost
) -> nx.DiGraph:
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    members = set(region)
    for node in region:
        recompute = price(node)
        _arc(network, _SOURCE, (node, "in"), recompute)
        _arc(network, (node, "in"), (node, "out"), bytes_to_store(node))
        if node in needed:
            _arc(network, (node, "out"), _SINK, math.inf)
        if math.isfinite(recompute):
            for operand in node.all_input_nodes:
                if operand in members:
                    _arc(network, (operand, "out"), (node, "in"), math.inf)
    return network


def _arc(network: nx.DiGraph, tail: object, head: object, capacity: float) -> None:
    if math.isinf(capacity):
        network.add_edge(tail, head)  # networkx: no capacity means infinite
    elif capacity > 0:
        network.add_edge(tail, head, capacity=int(capacity))
    else:
        network.add_nodes_from((tail, head))
