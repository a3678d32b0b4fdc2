"""Exchange FP8 data between ranks that hold different experts: move `quantize` before `all_to_all`.

    before   x  = all_to_all(tokens, splits)
             s  = scale(amax(x));  q = quantize(x, s)
             t  = transpose_segments(x, ...)
    after    a  = amax(tokens);    p = quantize(tokens, scale(a))
             s  = scale(all_to_all(a, splits))
             q  = as_codes(all_to_all(as_bytes(p), splits))
             t  = transpose_segments(q, ..., row_scales=s)

`q` and `s` are bit-identical before and after, because an exchange moves whole rows. Wgrad
(`transpose_segments`) reads the tokens after they were rounded to FP8. Rows of zeros that the model
appends to the received tokens are appended to `q` and `s`.

An exchange stays in high precision if an operator in high precision reads its result. No decision
depends on values that differ between ranks, so that all ranks run the same collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.quantization import BY_ROW, ROW, block_text
from fp8pass.graph.classify import argument_of
from fp8pass.graph.collectives import (
    ALL_TO_ALL,
    WAIT_TENSOR,
    Exchange,
    elements_read,
    find_exchanges,
    remove_unused,
    skip_zero_rows,
)
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.tags import OPERAND_OF, WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def exchange_quantized(gm: fx.GraphModule, ctx: Context) -> None:
    exchanges = list(find_exchanges(gm.graph))
    if not exchanges:
        return
    remove_unused(gm.graph)  # unused reorderings would count as readers
    for exchange in reversed(exchanges):  # a later one may be the only reader of an earlier one
        reason = why_not(exchange)
        if reason:
            exchange.node.meta[WHY_NOT_QUANTIZED] = reason
        else:
            Sender(exchange).rewrite()
            remove_unused(gm.graph)


def why_not(exchange: Exchange) -> str:
    readers = elements_read(exchange.matrix)
    for user in readers:
        if not _reads_by_row(user, exchange.matrix):
            return f"{graph.operator_name(user)} reads it in high precision"
    is_quantized = any(user.target is fp8.quantize.default for user in readers)
    return "" if is_quantized else "no experts in FP8 read these tokens"


def _reads_by_row(user: fx.Node, x: fx.Node) -> bool:
    if user.target is fp8.transpose_segments.default:
        return user.args[0] is x
    if user.target is fp8.amax.default:
        return user.args[1] == block_text(ROW)
    if user.target is not fp8.quantize.default or user.args[2] != BY_ROW:
        return False
    scale: Any = user.args[1]
    return graph.is_call(scale, fp8.scale.default) and scale.args[0] in x.users


class Sender:
    """Quantizes the tokens of this rank, and sends their FP8 data."""

    def __init__(self, exchange: Exchange) -> None:
        self.graph, self.exchange = exchange.node.graph, exchange
        self.matrix, self.readers = exchange.matrix, elements_read(exchange.matrix)
        self.zero_rows = skip_zero_rows(self.matrix)[1]

    def rewrite(self) -> None:
        rows = self.exchange.rows
        with self.graph.inserting_before(self.exchange.node):
            amax = self._emit(fp8.amax.default, rows, block_text(ROW))
            scale = self._emit(fp8.scale.default, amax, BY_ROW)
            sent = self._emit(fp8.quantize.default, rows, scale, BY_ROW)
            received = self._send(amax)
            amaxes = self._append_zeros(received)
            scales = self._emit(fp8.scale.default, amaxes, BY_ROW)
            data = self._append_zeros(self._send(self._emit(fp8.as_bytes.default, sent)))
            data = self._emit(fp8.as_codes.default, data, "e4m3")
        self.exchange.replace_sizes(received, amaxes)
        for reader in self.readers:
            if reader.target is fp8.amax.default:
                reader.replace_all_uses_with(amaxes)
            elif reader.target is fp8.quantize.default:
                sent.meta[OPERAND_OF] = reader.meta[OPERAND_OF]
                reader.replace_all_uses_with(data)
            else:
                selected = argument_of(reader, "rows")
                reader.args = (data, *reader.args[1:4], selected, scales)

    def _send(self, rows: fx.Node) -> fx.Node:
        shape = (tensor(self.exchange.wait).shape[0], tensor(rows).shape[1])
        received = tensor(rows).new_empty(shape)
        node = self._emit(ALL_TO_ALL, rows, *self.exchange.splits, fake=received)
        return self._emit(WAIT_TENSOR, node, fake=received)

    def _append_zeros(self, rows: fx.Node) -> fx.Node:
        if not self.zero_rows:
            return rows
        val = tensor(rows)
        shape = (self.zero_rows, val.shape[1])
        with compat.fake_mode_of(val):
            zeros = self._emit(aten.full.default, shape, 0, dtype=val.dtype, device=val.device)
        return self._emit(aten.cat.default, [rows, zeros])

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a node in the checkpointing region of the readers."""
        node = emit(self.graph, target, *args, like=self.exchange.node, **kwargs)
        compat.copy_region(self.readers[0], node)
        return node
