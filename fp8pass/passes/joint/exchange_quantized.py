"""Exchange FP8 data between ranks that hold different experts: move `quantize` before `all_to_all`.

    before   x  = all_to_all(tokens, splits)
             s  = scale(amax(x));  q = quantize(x, s)
             t  = transpose_segments(x, ...)
    after    a  = amax(tokens);    p = quantize(tokens, scale(a))
             s  = scale(all_to_all(a, splits))
             q  = as_codes(all_to_all(as_bytes(p), splits))
             t  = transpose_segments(dequantize(q, s), ...)

`q` and `s` are bit-identical before and after, because an exchange moves whole rows. Wgrad
(`transpose_segments`) reads the tokens after they were rounded to FP8.

An exchange stays in high precision if another operator reads its result. No decision depends on
values that differ between ranks, so that all ranks run the same collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.quantization import BY_ROW, ROW, block_text
from fp8pass.graph.collectives import (
    ALL_TO_ALL,
    WAIT_TENSOR,
    Exchange,
    find_exchanges,
    remove_unused,
)
from fp8pass.graph.nodes import emit, tensor
from fp8pass.graph.tags import OPERAND_OF, WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def exchange_quantized(gm: fx.GraphModule, ctx: Context) -> None:
    exchanges = list(find_exchanges(gm.graph))
    if not exchanges:
        return
    remove_unused(gm.graph)  # unused reorderings would count as readers
    for exchange in exchanges:
        reason = why_not(exchange)
        if reason:
            exchange.node.meta[WHY_NOT_QUANTIZED] = reason
        else:
            _rewrite(gm.graph, exchange)
    remove_unused(gm.graph)


def why_not(exchange: Exchange) -> str:
    if not any(user.target is fp8.quantize.default for user in exchange.readers):
        return "no experts in FP8 read these tokens"
    for user in exchange.readers:
        if not _reads_by_row(user, exchange.wait):
            return f"{graph.operator_name(user)} reads it in high precision"
    return ""


def _reads_by_row(user: fx.Node, x: fx.Node) -> bool:
    if user.target is fp8.transpose_segments.default:
        return user.args[0] is x
    if user.target is fp8.amax.default:
        return user.args[1] == block_text(ROW)
    if user.target is not fp8.quantize.default or user.args[2] != BY_ROW:
        return False
    scale: Any = user.args[1]
    return graph.is_call(scale, fp8.scale.default) and scale.args[0] in x.users


def _rewrite(g: fx.Graph, exchange: Exchange) -> None:
    readers: dict[Any, list[fx.Node]] = {}
    for user in exchange.readers:
        readers.setdefault(user.target, []).append(user)
    first = readers[fp8.amax.default][0]

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a node in the checkpointing region of the readers."""
        node = emit(g, target, *args, like=exchange.node, **kwargs)
        compat.copy_region(first, node)
        return node

    def send(rows: fx.Node) -> fx.Node:
        """Exchange a matrix with the rows of the tokens."""
        shape = (tensor(exchange.wait).shape[0], tensor(rows).shape[1])
        received = tensor(rows).new_empty(shape)
        node = add(ALL_TO_ALL, rows, *exchange.splits, fake=received)
        exchange.measure(node)
        return add(WAIT_TENSOR, node, fake=received)

    with g.inserting_before(exchange.node):
        amax = add(fp8.amax.default, exchange.rows, block_text(ROW))
        scale = add(fp8.scale.default, amax, BY_ROW)
        sent = add(fp8.quantize.default, exchange.rows, scale, BY_ROW)
        amaxes = send(amax)
        scales = add(fp8.scale.default, amaxes, BY_ROW)
        data = add(fp8.as_codes.default, send(add(fp8.as_bytes.default, sent)), "e4m3")
    for user in readers[fp8.amax.default]:
        user.replace_all_uses_with(amaxes)
    for user in readers[fp8.quantize.default]:
        sent.meta[OPERAND_OF] = user.meta[OPERAND_OF]
        user.replace_all_uses_with(data)
    for user in readers.get(fp8.transpose_segments.default, ()):
        with g.inserting_before(user):
            dtype = tensor(exchange.wait).dtype
            tokens = emit(g, fp8.dequantize.default, [data], scales, BY_ROW, dtype, like=user)
        user.update_arg(0, tokens)
