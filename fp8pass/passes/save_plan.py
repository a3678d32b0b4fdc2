"""Decide what the backward keeps: exact, in low bits, or recomputed.

Every value the backward uses is needed either *exactly* (by attention, by operators that amplify
errors) or in *any* form. Two minimum cuts choose, with PyTorch's partitioner as the model:

    source --price--> v_in --bytes--> v_out --∞--> u_in   for every user u of v
                                      v_out --∞--> sink   if the backward uses v

Cutting the middle arc stores v, at its bytes; cutting the first one recomputes it, at a price that
is infinite for what is too expensive or impossible to compute again. The first cut covers the
exact needs at exact prices. The second covers all needs, with what the first one keeps for free
and everything else at the bytes of the cheapest format that the error rules allow. One cut for
both would need three states a value (exact, low-bit, absent) whose costs are not submodular.

Among equal first cuts, the one closest to the backward recomputes least, and the one closest to
the inputs leaves most for the second to be computed from. Both are tried, the cheaper one wins.

Values that cannot be recomputed do not depend on how their inputs are kept, so the graph falls
apart at GEMMs and attention into regions, which are solved one by one (with networkx).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from fp8pass import compat, graph
from fp8pass.formats import EXACT, Format
from fp8pass.passes import error_rules
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.context import Context

# Capacities are integers: bytes times this. One unit is what computing a byte again costs, so
# that a kept byte is worth the time of recomputing 256: fused recomputation is nearly free, and
# the statistics of a row (4 bytes) are still cheaper to keep than to reduce again.
RECOMPUTE_UNITS = 256

RECOMPUTABLE = (
    Kind.VIEW,
    Kind.POINTWISE,
    Kind.REDUCTION,
    Kind.MOVEMENT,
    Kind.CREATION,
    Kind.QUANTIZE,
    Kind.SYMBOL,
)

Cost = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Decision:
    """How one forward value reaches the backward.

    `format` is None for a value that is recomputed; `group_size` is 0 for one kept exactly.
    """

    format: Format | None
    group_size: int
    reason: str

    @property
    def recomputed(self) -> bool:
        """Whether the backward computes the value again."""
        return self.format is None

    @property
    def low_bit(self) -> bool:
        """Whether the value goes through quantize and dequantize."""
        return self.group_size > 0


@dataclass(frozen=True)
class Cut:
    """A way to have some values in the backward: nodes kept, nodes recomputed, in all `cost`."""

    kept: set[fx.Node]
    recomputed: set[fx.Node]
    cost: float


@dataclass(frozen=True)
class Needs:
    """What the backward needs of the forward.

    Attributes:
        values: nodes that depend on no gradient, in order.
        all: those that the backward uses.
        exact: those that it uses in an operator that tolerates no error, with that operator.
    """

    values: list[fx.Node]
    all: set[fx.Node] = field(default_factory=set)
    exact: dict[fx.Node, str] = field(default_factory=dict)


def plan_saved_values(gm: fx.GraphModule, ctx: Context) -> None:
    """Fill `ctx.decisions` for every forward value that the backward uses or recomputes from."""
    needs = find_needs(gm, ctx)
    for region in regions(needs.values, needs.all, recompute_price):
        exact, rest = plan_region(region, needs, ctx)
        for node in exact.recomputed | rest.recomputed:
            ctx.decisions[node] = Decision(None, 0, "cheap to compute again")
        for node in exact.kept | rest.kept:
            ctx.decisions[node] = _decide(node, ctx, needs, exactly=node in exact.kept)


def find_needs(gm: fx.GraphModule, ctx: Context) -> Needs:
    """Read off a joint graph what crosses from the forward to the backward."""
    backward = graph.tangent_dependent(gm.graph)
    needs = Needs([n for n in gm.graph.nodes if n not in backward and n.op != "output"])
    for gradient in graph.outputs(gm.graph)[ctx.num_fwd_outputs :]:
        if isinstance(gradient, fx.Node) and gradient not in backward:
            needs.all.add(gradient)
            needs.exact[gradient] = "a gradient"
    for node in gm.graph.nodes:
        if node not in backward or node.op == "output":
            continue
        tolerant = error_rules.tolerates(node)
        for operand in node.all_input_nodes:
            if operand not in backward:
                needs.all.add(operand)
                if not tolerant:
                    needs.exact.setdefault(operand, error_rules.operator_name(node))
    for node in needs.all:
        if kind(node) in RECOMPUTABLE and not error_rules.tolerates(node):
            needs.exact.setdefault(node, "its own operator")
    return needs


def plan_region(region: list[fx.Node], needs: Needs, ctx: Context) -> tuple[Cut, Cut]:
    """The cut for the exact needs of a region, and the one for the rest."""
    exact = {n for n in region if n in needs.exact}
    everything = {n for n in region if n in needs.all}
    candidates = []
    for early in (False, True) if exact else (False,):
        first = _exact_cut(region, exact, ctx, early=early)
        candidates.append((first, _remaining_cut(region, everything, first, ctx)))
    return min(candidates, key=lambda cuts: cuts[0].cost + cuts[1].cost)


def _exact_cut(region: list[fx.Node], needed: set[fx.Node], ctx: Context, *, early: bool) -> Cut:
    def bytes_(node: fx.Node) -> float:
        return 0 if ctx.is_free(node) else _bytes_to_store(node)

    def price(node: fx.Node) -> float:
        true_price = recompute_price(node)
        return 0 if early and math.isfinite(true_price) else true_price

    cut = min_cut(region, needed, bytes_, price, early=early)
    cost = sum(map(bytes_, cut.kept)) + sum(map(recompute_price, cut.recomputed))
    return Cut(cut.kept, cut.recomputed, cost)


def _remaining_cut(region: list[fx.Node], needed: set[fx.Node], first: Cut, ctx: Context) -> Cut:
    available = _exactly_available(region, first, ctx)

    def bytes_(node: fx.Node) -> float:
        if node in first.kept or ctx.is_free(node):
            return 0
        exact = _bytes_to_store(node)
        if node in available or math.isinf(exact):
            return exact
        return min(exact, _low_bit_bytes(node, ctx))

    def price(node: fx.Node) -> float:
        if node in first.recomputed:
            return 0
        if not error_rules.tolerates(node) and node not in available:
            return math.inf
        return recompute_price(node)

    return min_cut(region, needed, bytes_, price)


def _exactly_available(region: list[fx.Node], first: Cut, ctx: Context) -> set[fx.Node]:
    """What the backward can have exactly after the first cut: also all that follows from it.

    None of it may be stored in low bits, since an operator that tolerates no error may use it.
    """
    members = set(region)
    found = {n for n in region if n in first.kept or n in first.recomputed or ctx.is_free(n)}
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


def _decide(node: fx.Node, ctx: Context, needs: Needs, *, exactly: bool) -> Decision:
    if node in ctx.parameters:
        return Decision(EXACT, 0, "parameter")
    if node in ctx.held:
        return Decision(EXACT, 0, "autograd holds this leaf anyway")
    if exactly:
        by = needs.exact.get(node)
        return Decision(EXACT, 0, f"{by} needs it exact" if by else "exact values follow from it")
    format, group, reason = _storage(node, ctx)
    if group and (format.lossless or _low_bit_bytes(node, ctx) < _bytes_to_store(node)):
        return Decision(format, group, reason)
    return Decision(EXACT, 0, reason)


def _storage(node: fx.Node, ctx: Context) -> tuple[Format, int, str]:
    if node.op == "placeholder" and node not in ctx.activations:
        return EXACT, 0, "an input that needs no gradient: a table, a mask, data"
    return error_rules.storage(node, ctx.config)


def recompute_price(node: fx.Node) -> float:
    """What computing `node` again costs, in units; infinite where it must not happen."""
    if node.op == "get_attr":
        return 0  # a constant or a subgraph of the module, present in both halves
    if node.op != "call_function" or compat.must_save(node):
        return math.inf
    if graph.is_getitem(node):  # comes with its operator, or not at all
        return math.inf if math.isinf(recompute_price(_operator(node))) else 0
    kind_ = kind(node)
    if kind_ in (Kind.RANDOM, Kind.COLLECTIVE, Kind.OTHER):
        return math.inf
    if compat.must_recompute(node):
        return 0
    if kind_ not in RECOMPUTABLE:
        return math.inf
    if kind_ in (Kind.VIEW, Kind.SYMBOL, Kind.CREATION) or node.target in graph.CASTS:
        return 0
    if kind_ is Kind.REDUCTION or node.target in error_rules.STATISTICS:
        return sum(graph.nbytes(n) for n in node.all_input_nodes)
    return graph.nbytes(node)


def _operator(node: fx.Node) -> fx.Node:
    """The operator that `node` is one of several results of, or itself."""
    return node.args[0] if graph.is_getitem(node) else node  # type: ignore[return-value]


def _bytes_to_store(node: fx.Node) -> float:
    """Bytes of `node` kept exactly, in units; infinite where it cannot be kept."""
    if compat.is_sym_node(node):
        return 0
    if graph.value(node) is None:
        return math.inf
    if compat.must_recompute(_operator(node)) and math.isfinite(recompute_price(node)):
        return math.inf
    stored = graph.nbytes(node) * RECOMPUTE_UNITS
    # A view has to be copied, so that it does not hold its base: rather keep a base of that size.
    return stored + graph.nbytes(node) if kind(node) is Kind.VIEW else stored


def _low_bit_bytes(node: fx.Node, ctx: Context) -> float:
    """Bytes of `node` kept in its allowed low-bit format and of reading it to do so, in units."""
    format, group, _ = _storage(node, ctx)
    if not group:
        return math.inf
    exact = graph.nbytes(node)
    stored = (
        exact if format.lossless else format.stored_bytes(graph.numel(graph.tensor(node)), group)
    )
    return stored * RECOMPUTE_UNITS + exact


def regions(values: list[fx.Node], needed: set[fx.Node], price: Cost) -> list[list[fx.Node]]:
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
