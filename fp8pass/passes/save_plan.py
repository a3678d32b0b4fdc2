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

Both are solved by networkx, per connected region: values that cannot be recomputed do not depend
on how their inputs are kept, so the graph falls apart at GEMMs and attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx
from torch import fx

from fp8pass import compat, graph
from fp8pass.formats import EXACT, GROUP_SCALE_DTYPE, Format
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


def plan_saved_values(gm: fx.GraphModule, ctx: Context) -> None:
    """Fill `ctx.decisions` for every forward value that the backward uses or recomputes from."""
    needs = find_needs(gm, ctx)
    free = ctx.parameters | ctx.held

    def exact_bytes(node: fx.Node) -> float:
        return 0 if node in free else _bytes_to_store(node)

    kept_exact, recomputed_exact = min_cut(needs.values, needs.exact, exact_bytes, recompute_price)
    available = _exactly_available(needs.values, kept_exact | recomputed_exact | free)

    def any_bytes(node: fx.Node) -> float:
        if node in free or node in kept_exact:
            return 0
        if node in available or (node.op == "placeholder" and node not in ctx.activations):
            return _bytes_to_store(node)
        exact = _bytes_to_store(node)
        return exact if math.isinf(exact) else min(exact, _low_bit_bytes(node, ctx))

    def any_price(node: fx.Node) -> float:
        if node in recomputed_exact:
            return 0
        if not error_rules.tolerates(node) and node not in available:
            return math.inf
        return recompute_price(node)

    kept, recomputed = min_cut(needs.values, needs.all, any_bytes, any_price)
    for node in recomputed_exact | recomputed:
        ctx.decisions[node] = Decision(None, 0, "cheap to compute again")
    for node in kept_exact | kept:
        ctx.decisions[node] = _decide(node, ctx, needed_exactly=node in kept_exact)


def _exactly_available(values: list[fx.Node], start: set[fx.Node]) -> set[fx.Node]:
    """What the backward can have exactly, given `start`: also all that follows from it.

    None of it may be stored in low bits, since an operator that tolerates no error may use it.
    """
    found = set(start)
    for node in values:
        computable = not math.isinf(recompute_price(node))
        if (computable and all(n in found for n in node.all_input_nodes)) or (
            not computable and not _is_float(node)
        ):
            found.add(node)
    return found


def _is_float(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.is_floating_point()


def _decide(node: fx.Node, ctx: Context, *, needed_exactly: bool) -> Decision:
    if node in ctx.parameters:
        return Decision(EXACT, 0, "parameter")
    if node in ctx.held:
        return Decision(EXACT, 0, "autograd holds this leaf anyway")
    if needed_exactly:
        return Decision(EXACT, 0, "attention, softmax or a skipped layer needs it exactly")
    if node.op == "placeholder" and node not in ctx.activations:
        return Decision(EXACT, 0, "an input that needs no gradient: a table, a mask, data")
    format, group, reason = error_rules.storage(node, ctx.config)
    if group and (format.lossless or _low_bit_bytes(node, ctx) < _bytes_to_store(node)):
        return Decision(format, group, reason)
    return Decision(EXACT, 0, reason)


@dataclass(frozen=True)
class Needs:
    """What the backward needs of the forward.

    Attributes:
        values: nodes that depend on no gradient, in order.
        all: those that the backward uses.
        exact: those that it uses in an operator that tolerates no error.
    """

    values: list[fx.Node]
    all: set[fx.Node]
    exact: set[fx.Node]


def find_needs(gm: fx.GraphModule, ctx: Context) -> Needs:
    """Read off a joint graph what crosses from the forward to the backward."""
    backward = graph.tangent_dependent(gm.graph)
    values = [n for n in gm.graph.nodes if n not in backward and n.op != "output"]
    gradients = graph.outputs(gm.graph)[ctx.num_fwd_outputs :]
    needed = {g for g in gradients if isinstance(g, fx.Node) and g not in backward}
    exactly = set(needed)
    for node in backward:
        if node.op == "output":
            continue
        used = [n for n in node.all_input_nodes if n not in backward]
        needed.update(used)
        if not error_rules.tolerates(node):
            exactly.update(used)
    exactly |= {n for n in needed if kind(n) in RECOMPUTABLE and not error_rules.tolerates(n)}
    return Needs(values, needed, exactly)


def recompute_price(node: fx.Node) -> float:
    """What computing `node` again costs, in units; infinite where it must not happen."""
    if node.op == "get_attr":
        return 0  # a constant or a subgraph of the module, present in both halves
    if node.op != "call_function" or compat.must_save(node):
        return math.inf
    if graph.is_getitem(node) and math.isinf(recompute_price(node.args[0])):  # type: ignore[arg-type]
        return math.inf
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


def _bytes_to_store(node: fx.Node) -> float:
    """Bytes of `node` kept exactly, in units; infinite where it cannot be kept."""
    if compat.is_sym_node(node):
        return 0
    if graph.value(node) is None:
        return math.inf
    if compat.must_recompute(node) and not math.isinf(recompute_price(node)):
        return math.inf
    stored = graph.nbytes(node) * RECOMPUTE_UNITS
    # A view has to be copied, so that it does not hold its base: rather keep a base of that size.
    return stored + graph.nbytes(node) if kind(node) is Kind.VIEW else stored


def _low_bit_bytes(node: fx.Node, ctx: Context) -> float:
    """Bytes of `node` kept in its allowed low-bit format and of reading it to do so, in units."""
    format, group, _ = error_rules.storage(node, ctx.config)
    if not group:
        return math.inf
    val = graph.tensor(node)
    element = val.element_size() if format.dtype is None else format.dtype.itemsize
    stored = graph.numel(val) * element
    if not format.lossless:
        stored += graph.numel(val) // group * GROUP_SCALE_DTYPE.itemsize
    return stored * RECOMPUTE_UNITS + graph.nbytes(node)


def min_cut(
    values: Iterable[fx.Node],
    needed: set[fx.Node],
    bytes_to_store: Callable[[fx.Node], float],
    price: Callable[[fx.Node], float],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The cheapest way to have `needed` in the backward: nodes to keep, nodes to recompute."""
    order = list(values)
    relevant = _relevant(order, needed, price)
    kept: set[fx.Node] = set()
    recomputed: set[fx.Node] = set()
    for region in _regions(order, relevant, price):
        network = _network(region, needed, bytes_to_store, price)
        _, (_, sink_side) = nx.minimum_cut(
            network, _SOURCE, _SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov
        )
        for node in region:
            if (node, "in") in sink_side:
                recomputed.add(node)
            elif (node, "out") in sink_side:
                kept.add(node)
    return kept, recomputed


_SOURCE, _SINK = "source", "sink"


def _relevant(
    order: list[fx.Node], needed: set[fx.Node], price: Callable[[fx.Node], float]
) -> set[fx.Node]:
    """Needed values and whatever they could be recomputed from."""
    found = set(needed)
    for node in reversed(order):
        if node in found and not math.isinf(price(node)):
            found.update(node.all_input_nodes)
    return found


def _regions(
    order: list[fx.Node], relevant: set[fx.Node], price: Callable[[fx.Node], float]
) -> list[list[fx.Node]]:
    """Connected components of the relevant nodes, cut above what is never recomputed."""
    regions = nx.utils.UnionFind([n for n in order if n in relevant])
    for node in order:
        if node in relevant and not math.isinf(price(node)):
            regions.union(node, *node.all_input_nodes)
    grouped: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node in relevant:
            grouped.setdefault(regions[node], []).append(node)
    return list(grouped.values())


def _network(
    region: list[fx.Node],
    needed: set[fx.Node],
    bytes_to_store: Callable[[fx.Node], float],
    price: Callable[[fx.Node], float],
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
        if not math.isinf(recompute):
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
