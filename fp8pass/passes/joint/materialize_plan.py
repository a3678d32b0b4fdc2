"""Carry out the plan: quantize kept values, give the backward its own copy of recomputed ones.

Afterwards forward and backward share exactly the nodes in `ctx.saved`:

    before   h = silu(g) * u           dg = mul(dh, u) ...   (the backward reads g and u)
    after    s = scale(amax(g)); q = quantize(g, s)   forward, q and s cross
             g' = dequantize([q], s)                  backward, used instead of g

The forward keeps using the values themselves: saving in low bits changes gradients only.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.decision import Decision
from fp8pass.dialect.formats import EXACT
from fp8pass.dialect.quantization import Quantization, block_text, group
from fp8pass.graph.classify import Kind, is_mask, kind
from fp8pass.graph.collectives import remove_unused
from fp8pass.graph.names import operator_name
from fp8pass.graph.nodes import aten, emit, prims
from fp8pass.graph.tags import CARRIES, ROLE, TO_HOST
from fp8pass.passes.context import Context
from fp8pass.plan import CrossingTensor, SavedTensor

fp8 = torch.ops.fp8pass
cast = prims.convert_element_type.default


# The decision about values that nobody planned for (`plan_saved_values` left out).
KEEP = Decision(EXACT, 0, "not planned")


def materialize_plan(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite the joint graph so that only `ctx.saved` crosses into the backward."""
    backward = graph.tangent_dependent(gm.graph)
    carrier = Carrier(gm.graph, ctx)
    for node in list(gm.graph.nodes):
        if node in backward and node.op not in ("placeholder", "output"):
            carrier.at = node
            for operand in node.all_input_nodes:
                if operand not in backward:
                    node.replace_input_with(operand, carrier.in_backward(operand))
    _carry_gradients(gm, ctx, backward, carrier)
    remove_unused(gm.graph)
    ctx.saved = [n for n in carrier.crossing if n.users]


def _carry_gradients(
    gm: fx.GraphModule, ctx: Context, backward: set[fx.Node], carrier: Carrier
) -> None:
    """Gradients that depend on no incoming gradient, a constant say, are backward outputs too."""
    output = graph.output_node(gm.graph)
    carrier.at = output
    results = graph.outputs(gm.graph)
    gradients = [
        carrier.in_backward(g) if isinstance(g, fx.Node) and g not in backward else g
        for g in results[ctx.facts.num_fwd_outputs :]
    ]
    if gradients != results[ctx.facts.num_fwd_outputs :]:
        output.args = ([*results[: ctx.facts.num_fwd_outputs], *gradients],)


class Carrier:
    """Makes forward values available in the backward, each once.

    `crossing` collects, in order, the nodes that cross the boundary; `at` is the backward node
    before which recomputation is placed, so that it runs no earlier than it has to.
    """

    def __init__(self, g: fx.Graph, ctx: Context) -> None:
        self.graph = g
        self.ctx = ctx
        self.crossing: dict[fx.Node, None] = {}
        self.at = graph.output_node(g)
        self._carried: dict[fx.Node, fx.Node] = {}
        self._names, self._places = graph.value_names(g), _places(g)

    def in_backward(self, node: fx.Node) -> fx.Node:
        """The node that stands for forward value `node` in the backward."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [n for n in self._requires(current) if n not in self._carried]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self._carried:
                self._carried[current] = self._carry(current)
        return self._carried[node]

    def _decision(self, node: fx.Node) -> Decision:
        return self.ctx.decisions.get(node, KEEP)

    def _requires(self, node: fx.Node) -> list[fx.Node]:
        recomputed = node.op == "call_function" and self._decision(node).recomputed
        return node.all_input_nodes if recomputed else []

    def _carry(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return node
        decision = self._decision(node)
        if decision.recomputed:
            with self.graph.inserting_before(self.at):
                copy = self.graph.node_copy(node, lambda n: self._carried[n])
            if node.target is aten.view.default and _is_expanded(node.args[0]):  # type: ignore[arg-type]
                copy.target = aten.reshape.default  # what was expanded has been copied
            copy.meta = {**node.meta, "partitioner_tag": "is_backward", CARRIES: node.name}
            return copy
        if decision.low_bit:
            return self._through_low_bits(node, decision)
        # Attention's kernels ask for masks in rows of whole words, which PyTorch widens them to.
        is_part = kind(node) is Kind.VIEW and not is_mask(node)
        if is_part or node in self.ctx.facts.overwritten:
            return self._as_copy(node, decision)
        node.meta[TO_HOST] = decision.on_host
        self._cross(node, decision, node)
        return node

    def _through_low_bits(self, node: fx.Node, decision: Decision) -> fx.Node:
        if decision.centred:
            return self._less_mean(node, decision)
        return self._coded(node, node, decision, graph.tensor(node).dtype)

    def _less_mean(self, node: fx.Node, decision: Decision) -> fx.Node:
        """Keep the difference of a value from its mean over tokens, and the mean, in its dtype."""
        dtype = graph.tensor(node).dtype
        with self.graph.inserting_before(graph.behind(node)):
            mean = emit(self.graph, aten.mean.dim, node, [-2], True, like=node)
            wide = emit(self.graph, cast, node, torch.float32, like=node)
            difference = emit(self.graph, aten.sub.Tensor, wide, mean, like=node)
        back = self._coded(node, difference, decision, torch.float32, mean)
        with self.graph.inserting_before(self.at):
            total = emit(self.graph, aten.add.Tensor, back, mean, like=back)
            narrow = emit(self.graph, cast, total, dtype, like=back)
        for made in (total, narrow):
            made.meta["partitioner_tag"] = "is_backward"
        return narrow

    def _coded(
        self, node: fx.Node, x: fx.Node, decision: Decision, dtype: torch.dtype, *beside: fx.Node
    ) -> fx.Node:
        """Keep `node` as codes and scales of `x` and `beside`; the value decoded, in `dtype`."""
        assert decision.format is not None
        how = Quantization(decision.format, group(decision.group_size))
        text, add = str(how), partial(emit, self.graph, like=x)
        with self.graph.inserting_before(graph.behind(x)):
            scales = add(fp8.scale.default, add(fp8.amax.default, x, block_text(how.block)), text)
            planes = [
                add(fp8.quantize.default, x, scales, text, i)
                for i in range(len(decision.format.planes))
            ]
        for plane in planes:
            plane.meta[TO_HOST] = decision.on_host
        self._cross(node, decision, *planes, scales, *beside)
        with self.graph.inserting_before(self.at):
            back = add(fp8.dequantize.default, planes, scales, text, dtype)
            back.meta |= {"partitioner_tag": "is_backward", CARRIES: node.name}
            return self._in_layout_of(node, back) if decision.format.packed else back

    def _in_layout_of(self, node: fx.Node, back: fx.Node) -> fx.Node:
        """Unpacked values are contiguous; views in the backward count on the strides of `node`."""
        order = graph.stride_order(graph.tensor(node))
        if order == sorted(order):
            return back
        inward = emit(self.graph, aten.permute.default, back, order, like=back)
        dense = emit(
            self.graph,
            aten.clone.default,
            inward,
            memory_format=torch.contiguous_format,
            like=back,
        )
        inverse = [order.index(dim) for dim in range(len(order))]
        return emit(self.graph, aten.permute.default, dense, inverse, like=back)

    def _as_copy(self, node: fx.Node, decision: Decision) -> fx.Node:
        """A view kept without its base, whose memory it would hold; an input before it changes."""
        with self.graph.inserting_before(graph.behind(node)):
            copy = emit(self.graph, aten.clone.default, node, like=node)
        copy.meta[TO_HOST] = decision.on_host
        self._cross(node, decision, copy)
        return copy

    def _cross(self, node: fx.Node, decision: Decision, *tensors: fx.Node) -> None:
        """Let `tensors`, which `node` is kept as, cross the boundary."""
        self.crossing.update(dict.fromkeys(tensors))
        is_parameter = node in self.ctx.facts.parameters - self.ctx.facts.overwritten
        if graph.is_no_tensor(node) or is_parameter:
            return
        value, place = self._names[node], self._places[node]
        saved = describe(node, decision, tensors, self.ctx, value=value, place=place)
        self.ctx.plan.saved.append(saved)


def _is_expanded(node: fx.Node) -> bool:
    """Whether elements share memory, as rows of an expanded tensor do."""
    return any(isinstance(stride, int) and stride == 0 for stride in graph.tensor(node).stride())


def _places(g: fx.Graph) -> dict[fx.Node, int]:
    """How many linear layers come before each node."""
    forward = [n.meta.get(ROLE) == "forward" for n in g.nodes]
    return dict(zip(g.nodes, itertools.accumulate(forward), strict=True))


def describe(
    node: fx.Node,
    decision: Decision,
    tensors: tuple[fx.Node, ...],
    ctx: Context,
    *,
    value: str,
    place: int,
) -> SavedTensor:
    """The plan's entry for a kept value."""
    val = graph.tensor(node)
    crossing = tuple(
        CrossingTensor(
            t.name,
            graph.dtype_text(graph.tensor(t).dtype),
            graph.shape_text(graph.tensor(t)),
            graph.nbytes(t),
        )
        for t in tensors
    )
    return SavedTensor(
        name=node.name,
        module=graph.module_path(node),
        op=operator_name(node),
        shape=graph.shape_text(val),
        dtype=graph.dtype_text(val.dtype),
        saved_as=_saved_as(decision),
        bytes_exact=graph.nbytes(node),
        bytes=0 if node in ctx.facts.held else sum(t.bytes for t in crossing),
        reason=decision.reason,
        value=value,
        place=place,
        expected_error=decision.expected_error,
        tensors=crossing,
    )


def _saved_as(decision: Decision) -> str:
    assert decision.format is not None
    if not decision.low_bit:
        return decision.format.name
    centred = " centred" if decision.centred else ""
    return f"{decision.format.name} 1×{decision.group_size}{centred}"
