"""Carry out the plan: quantize saved values, and recompute other values in the backward.

    before   h = silu(g) * u           dg = mul(dh, u) ...   (the backward reads g and u)
    after    s = scale(amax(g)); q = quantize(g, s)   forward, q and s are saved
             g' = dequantize([q], s)                  backward, used instead of g

The forward itself uses `g`, so low-bit formats change only gradients. Afterwards the backward reads
only the forward nodes in `ctx.saved`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.decision import Decision
from fp8pass.dialect.formats import EXACT
from fp8pass.dialect.quantization import Quantization, block_text, group
from fp8pass.graph.classify import Kind, is_attention_mask, kind
from fp8pass.graph.collectives import remove_unused
from fp8pass.graph.names import operator_name
from fp8pass.graph.nodes import aten, dtype_text, emit, prims, shape_text, tensor
from fp8pass.graph.order import reach
from fp8pass.graph.tags import COPIED_VALUE, IS_OFFLOADED
from fp8pass.graph.traffic import base
from fp8pass.passes.context import Context
from fp8pass.passes.quantizer import count_layers_before
from fp8pass.plan import CrossingTensor, SavedTensor

fp8 = torch.ops.fp8pass
cast = prims.convert_element_type.default

IN_BACKWARD = {"partitioner_tag": "is_backward"}

# The decision about each value if `plan_saved_values` is disabled.
NOT_PLANNED = Decision(EXACT, 0, "not planned")


def materialize_plan(gm: fx.GraphModule, ctx: Context) -> None:
    backward = graph.tangent_dependent(gm.graph)
    carrier = Carrier(gm.graph, ctx)
    for node in list(gm.graph.nodes):
        if node in backward and node.op not in ("placeholder", "output"):
            carrier.at = node
            for operand in node.all_input_nodes:
                if operand not in backward:
                    node.replace_input_with(operand, carrier.in_backward(operand))
    _carry_gradients(gm.graph, ctx.facts.num_fwd_outputs, backward, carrier)
    remove_unused(gm.graph)
    ctx.saved = [n for n in carrier.crossing if n.users]


def _carry_gradients(
    g: fx.Graph, num_fwd_outputs: int, backward: set[fx.Node], carrier: Carrier
) -> None:
    """Carry gradients that do not depend on a tangent, such as constants, into the backward."""
    output = graph.output_node(g)
    carrier.at = output
    results = graph.outputs(g)
    gradients = [
        carrier.in_backward(x) if isinstance(x, fx.Node) and x not in backward else x
        for x in results[num_fwd_outputs:]
    ]
    if gradients != results[num_fwd_outputs:]:
        output.args = ([*results[:num_fwd_outputs], *gradients],)


class Carrier:
    """Makes forward values available in the backward, each value once."""

    def __init__(self, g: fx.Graph, ctx: Context) -> None:
        self.graph = g
        self.ctx = ctx
        self.crossing: dict[fx.Node, None] = {}
        self.at = graph.output_node(g)
        self._carried: dict[fx.Node, fx.Node] = {}
        self._names, self._places = graph.value_names(g), count_layers_before(g)
        self._has_convolutions = any(kind(node) is Kind.CONVOLUTION for node in g.nodes)

    def in_backward(self, node: fx.Node) -> fx.Node:
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [n for n in self._operands_to_carry(current) if n not in self._carried]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if current not in self._carried:
                self._carried[current] = self._carry(current)
        return self._carried[node]

    def _decision(self, node: fx.Node) -> Decision:
        return self.ctx.decisions.get(node, NOT_PLANNED)

    def _operands_to_carry(self, node: fx.Node) -> list[fx.Node]:
        is_recomputed = node.op == "call_function" and self._decision(node).recomputed
        return node.all_input_nodes if is_recomputed else []

    def _carry(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return node
        decision = self._decision(node)
        if decision.recomputed:
            return self._recompute(node)
        if decision.centred:
            return self._quantize_difference(node, decision)
        by_rows = self.ctx.stock is None and self._is_stored_channels_last(node)
        x = self._as_rows(node) if by_rows else node
        if decision.low_bit:
            back = self._quantize(node, x, decision, tensor(node).dtype)
        else:
            back = self._save_exactly(node, x, decision)
        return self._in_shape_of(node, back) if by_rows else back

    def _save_exactly(self, node: fx.Node, x: fx.Node, decision: Decision) -> fx.Node:
        """Save `x` as the exact value of `node`. `x` has the same elements, maybe reshaped."""
        # A saved view would keep the memory of its base alive, so a copy is saved. Attention masks
        # stay views, because attention needs the aligned rows of the mask's base. Inputs that the
        # graph overwrites are copied before the write.
        is_view = kind(node) is Kind.VIEW and self.ctx.stock is None
        is_part = is_view and not is_attention_mask(node)
        saved = self._copy(x) if is_part or base(node) in self.ctx.facts.overwritten else x
        self._save(node, decision, saved)
        return saved

    def _is_stored_channels_last(self, node: fx.Node) -> bool:
        """Whether Inductor would store `node` in a layout that is slow to read and write.

        If a graph has convolutions, Inductor stores results of four dimensions channels-last. That
        suits images, [N, C, H, W], but not the rows of norms and linear layers, [N, H, W, C].
        Values with symbolic sizes keep Inductor's layout.
        """
        val = graph.value(node)
        if not self._has_convolutions or val is None or val.ndim != 4:
            return False
        return all(isinstance(size, int) for size in val.shape) and not _is_image(node)

    def _as_rows(self, x: fx.Node) -> fx.Node:
        """Return `x` as a matrix, in the forward."""
        with self.graph.inserting_before(graph.insertion_point_after(x)):
            *leading, columns = tensor(x).shape
            return emit(self.graph, aten.reshape.default, x, [math.prod(leading), columns], like=x)

    def _in_shape_of(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """Return `rows` in the shape of `node`, in the backward."""
        with self.graph.inserting_before(self.at):
            back = emit(self.graph, aten.view.default, rows, list(tensor(node).shape), like=node)
            back.meta |= IN_BACKWARD
            return self._restore_layout(node, back)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy, order = aten.squeeze_copy.dims, graph.stride_order(tensor(node))
        with self.graph.inserting_before(graph.insertion_point_after(node)):
            if _is_expanded(node):
                return emit(self.graph, aten.clone.default, node, like=node)
            # Inductor would remove `clone` where it changes no strides, as for `x[0]`.
            if order == sorted(order):
                return emit(self.graph, copy, node, [], like=node)
            return self._in_order(order, node, copy, [])

    def _recompute(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_before(self.at):
            copy = self.graph.node_copy(node, lambda n: self._carried[n])
        if node.target is aten.view.default and _is_expanded(node.args[0]):  # type: ignore[arg-type]
            copy.target = aten.reshape.default  # `view` would require the old strides
        copy.meta = {**node.meta, **IN_BACKWARD, COPIED_VALUE: node.name}
        return copy

    def _quantize_difference(self, node: fx.Node, decision: Decision) -> fx.Node:
        dtype = tensor(node).dtype
        with self.graph.inserting_before(graph.insertion_point_after(node)):
            mean = emit(self.graph, aten.mean.dim, node, [-2], True, like=node)
            wide = emit(self.graph, cast, node, torch.float32, like=node)
            difference = emit(self.graph, aten.sub.Tensor, wide, mean, like=node)
        back = self._quantize(node, difference, decision, torch.float32, mean)
        with self.graph.inserting_before(self.at):
            total = emit(self.graph, aten.add.Tensor, back, mean, like=back)
            narrow = emit(self.graph, cast, total, dtype, like=back)
        total.meta |= IN_BACKWARD
        narrow.meta |= IN_BACKWARD
        return narrow

    def _quantize(
        self, node: fx.Node, x: fx.Node, decision: Decision, dtype: torch.dtype, *means: fx.Node
    ) -> fx.Node:
        """Save the quantized `x` and `means` for `node`; return `x`, dequantized to `dtype`."""
        assert decision.format is not None
        quantization = Quantization(decision.format, group(decision.group_size))
        text, add = str(quantization), partial(emit, self.graph, like=x)
        with self.graph.inserting_before(graph.insertion_point_after(x)):
            amax = add(fp8.amax.default, x, block_text(quantization.block))
            scales = add(fp8.scale.default, amax, text)
            planes = [
                add(fp8.quantize.default, x, scales, text, i)
                for i in range(len(decision.format.planes))
            ]
        self._save(node, decision, *planes, on_device=(scales, *means))
        with self.graph.inserting_before(self.at):
            back = add(fp8.dequantize.default, planes, scales, text, dtype)
            back.meta |= {**IN_BACKWARD, COPIED_VALUE: node.name}
            return self._restore_layout(x, back) if decision.format.packed else back

    def _restore_layout(self, x: fx.Node, back: fx.Node) -> fx.Node:
        order = graph.stride_order(tensor(x))
        if order == sorted(order):
            return back
        layout = torch.contiguous_format
        return self._in_order(order, back, aten.clone.default, memory_format=layout)

    def _in_order(
        self, order: list[int], x: fx.Node, copy: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Return a dense copy of `x`. In memory, its dimensions are in the given order."""
        add = partial(emit, self.graph, like=x)
        dense = add(copy, add(aten.permute.default, x, order), *args, **kwargs)
        inverse = [order.index(dim) for dim in range(len(order))]
        return add(aten.permute.default, dense, inverse)

    def _save(
        self,
        node: fx.Node,
        decision: Decision,
        *tensors: fx.Node,
        on_device: tuple[fx.Node, ...] = (),
    ) -> None:
        """Save `tensors` and `on_device` for `node`. Only `tensors` may go to host memory."""
        for x in tensors:
            x.meta[IS_OFFLOADED] = decision.on_host
        crossing = (*tensors, *on_device)
        self.crossing.update(dict.fromkeys(crossing))
        is_parameter = node in self.ctx.facts.parameters - self.ctx.facts.overwritten
        if not graph.is_non_tensor(node) and not is_parameter:
            self.ctx.plan.saved.append(self._describe(node, decision, crossing))

    def _describe(
        self, node: fx.Node, decision: Decision, crossing: tuple[fx.Node, ...]
    ) -> SavedTensor:
        val = tensor(node)
        tensors = tuple(
            CrossingTensor(
                n.name, dtype_text(tensor(n).dtype), shape_text(tensor(n)), graph.nbytes(n)
            )
            for n in crossing
        )
        return SavedTensor(
            name=node.name,
            module=graph.module_path(node),
            op=operator_name(node),
            shape=shape_text(val),
            dtype=dtype_text(val.dtype),
            saved_as=_format_text(decision),
            bytes_exact=graph.nbytes(_unquantized(node)),
            bytes=0 if node in self.ctx.facts.leaves else sum(t.bytes for t in tensors),
            reason=decision.reason,
            value=self._names[node],
            place=self._places[node],
            expected_error=decision.expected_error,
            tensors=tensors,
        )


def _unquantized(node: fx.Node) -> fx.Node:
    """Return the tensor that was quantized to `node`, or else `node`."""
    while kind(node) is Kind.QUANTIZE:
        node = node.all_input_nodes[0]
    return node


def _is_image(node: fx.Node) -> bool:
    """Whether only pointwise operators are between `node` and a convolution or a pooling."""

    def neighbors(n: fx.Node) -> list[fx.Node]:
        return [*n.all_input_nodes, *n.users] if n is node or kind(n) is Kind.POINTWISE else []

    return any(kind(n) in (Kind.CONVOLUTION, Kind.OTHER) for n in reach([node], neighbors))


def _is_expanded(node: fx.Node) -> bool:
    """Whether elements share memory, as the rows of an expanded tensor do."""
    return any(isinstance(stride, int) and stride == 0 for stride in tensor(node).stride())


def _format_text(decision: Decision) -> str:
    assert decision.format is not None
    if not decision.low_bit:
        return decision.format.name
    centred = " centred" if decision.centred else ""
    return f"{decision.format.name} 1×{decision.group_size}{centred}"
