"""Gather FP8 data instead of high-precision tensors: move `quantize` before `all_gather`.

With a scale for each row:

    before   x  = all_gather(shard)
             s  = scale(amax(x));  q = quantize(x, s)
    after    a  = amax(shard);     p = quantize(shard, scale(a))
             s  = scale(all_gather(a))
             q  = as_codes(all_gather(as_bytes(p)))

With one scale for the tensor:

    before   s  = scale(amax(x));  q = quantize(x, s)
    after    s  = scale(amax(all_gather(amax(shard))));  p = quantize(shard, s)
             q  = as_codes(all_gather(as_bytes(p)))

`q` is bit-identical before and after. For row scales, each row must lie on one rank. Amaxes are
gathered instead of reduced, because gloo's maximum drops NaN.

A gather stays in high precision if an operator in high precision reads its result. No decision
depends on values that differ between ranks, so that all ranks run the same collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.quantization import ROW, TENSOR, Block, block_text, parse_block
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR, Gather, find_gathers, remove_unused
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.patterns import CASTS, RESHAPES, quantization_of
from fp8pass.graph.tags import OPERAND_OF, ORIGINAL_GATHER, WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

MOVES = RESHAPES | {aten.permute.default, aten.clone.default}


@dataclass
class GatheredMatrix:
    node: fx.Node
    # The views, permutations and casts from the gathered tensor to the matrix, in order.
    path: Sequence[fx.Node]
    readers: list[fx.Node] = field(default_factory=list)

    @property
    def quantizing(self) -> list[fx.Node]:
        return [n for n in self.readers if n.target is fp8.quantize.default]

    @property
    def moves(self) -> list[fx.Node]:
        return [n for n in self.path if n.target in MOVES]


def gather_quantized(gm: fx.GraphModule, ctx: Context) -> None:
    changed = False
    for gather in list(find_gathers(gm.graph)):
        matrices, others = find_readers(gather.whole)
        reason = why_not(gather, matrices, others)
        if reason:
            gather.node.meta[WHY_NOT_QUANTIZED] = reason
            continue
        for matrix in matrices:
            Sender(gather, matrix).rewrite()
        changed = True
    if changed:
        remove_unused(gm.graph)


def find_readers(whole: fx.Node) -> tuple[list[GatheredMatrix], list[fx.Node]]:
    """Return the quantized matrices that are views of `whole`, and the other readers of `whole`."""
    matrices: dict[fx.Node, GatheredMatrix] = {}
    others: list[fx.Node] = []
    pending: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(whole, ())]
    while pending:
        node, path = pending.pop()
        for user in node.users:
            if user.target in MOVES | CASTS:
                pending.append((user, (*path, user)))
            elif user.target in (fp8.amax.default, fp8.quantize.default):
                matrices.setdefault(node, GatheredMatrix(node, path)).readers.append(user)
            else:
                others.append(user)
    return sorted(matrices.values(), key=lambda m: m.node), others


def why_not(gather: Gather, matrices: list[GatheredMatrix], others: list[fx.Node]) -> str:
    quantizations = [quantization_of(n) for matrix in matrices for n in matrix.quantizing]
    if not quantizations:
        return "no linear layer in FP8 reads this tensor"
    if any(x.format.lossless for x in quantizations):
        return "formats are exact, so nothing is rounded"
    blocks = [x.block for x in quantizations]
    if any(block not in (ROW, TENSOR) for block in blocks):
        return "its scales cover blocks instead of rows"
    if others:
        reads_sizes = all(kind(n) is Kind.SYMBOL for n in others)
        name = graph.operator_name(others[0])
        return "its sizes are dynamic" if reads_sizes else f"{name} reads it in high precision"
    if len(set(blocks)) < len(blocks):
        return "layers read it in more than one shape or dtype"
    for matrix in matrices:
        if not all(_is_scaled_by(n, matrix.node) for n in matrix.quantizing):
            return "its scale is computed from another tensor"
        has_row_scales = any(_takes_amax(n, ROW) for n in matrix.readers)
        if has_row_scales and not _keeps_rows(gather, matrix):
            return "its rows are split over ranks"
        if _has_dynamic_shapes(gather, matrix):
            return "its sizes are dynamic"
    return ""


def _takes_amax(node: fx.Node, block: Block) -> bool:
    return node.target is fp8.amax.default and parse_block(str(node.args[1])) == block


def _is_scaled_by(quantize: fx.Node, matrix: fx.Node) -> bool:
    """Whether the scale of `quantize` is computed from `matrix`, and so is equal on all ranks."""
    scale: Any = quantize.args[1]
    if not graph.is_call(scale, fp8.scale.default):
        return False
    source = scale.args[0]
    while source.target is fp8.amax.default:
        source = source.args[0]
    return source is matrix


def _keeps_rows(gather: Gather, matrix: GatheredMatrix) -> bool:
    is_last = gather.dim == tensor(gather.whole).ndim - 1
    return not is_last and all(map(_keeps_last_dimension, matrix.moves))


def _keeps_last_dimension(move: fx.Node) -> bool:
    before, after = tensor(move.args[0]), tensor(move)  # type: ignore[arg-type]
    if graph.is_call(move, aten.permute.default):
        return move.args[1][-1] % before.ndim == before.ndim - 1  # type: ignore
    return compat.statically_known_true(before.shape[-1] == after.shape[-1])


def _is_stacked(gather: Gather, matrix: GatheredMatrix) -> bool:
    """Whether a matrix consists of the shards of all ranks, stacked along the rows."""
    leading = tensor(gather.shard).shape[: gather.dim]
    is_first = all(compat.statically_known_true(size == 1) for size in leading)
    permutes = any(graph.is_call(n, aten.permute.default) for n in matrix.moves)
    return is_first and not permutes and _keeps_rows(gather, matrix)


def _has_dynamic_shapes(gather: Gather, matrix: GatheredMatrix) -> bool:
    """Whether views of the FP8 data would need a symbolic size as an argument."""
    if _is_stacked(gather, matrix):
        return not isinstance(tensor(matrix.node).shape[-1], int)
    nodes = (gather.shard, gather.whole, *matrix.moves)
    return not all(isinstance(size, int) for n in nodes for size in tensor(n).shape)


class Sender:
    """Quantizes this rank's shard of a gathered matrix, and gathers the FP8 data of all ranks."""

    def __init__(self, gather: Gather, matrix: GatheredMatrix) -> None:
        self.graph, self.gather, self.matrix = gather.node.graph, gather, matrix
        self.is_stacked = _is_stacked(gather, matrix)
        self.reader = matrix.node
        self._shard: fx.Node | None = None
        self._row_amax: fx.Node | None = None

    def rewrite(self) -> None:
        for reader in sorted(self.matrix.readers):
            self.reader = reader
            with self.graph.inserting_before(reader):
                reader.replace_all_uses_with(self._emit_replacement())

    def _emit_replacement(self) -> fx.Node:
        if _takes_amax(self.reader, ROW):
            self._row_amax = self._amax(self._shard_as_matrix(), ROW)
            return self._gather(self._row_amax)
        if _takes_amax(self.reader, TENSOR):
            amax = self._amax(self._shard_as_matrix(), TENSOR)
            return self._amax(
                self._stack_ranks(self._emit(aten.reshape.default, amax, [1])), TENSOR
            )
        _, scale, text = self.reader.args
        quantization = quantization_of(self.reader)
        if quantization.block == ROW:
            scale = self._emit(fp8.scale.default, self._row_amax, text)
        quantized = self._emit(fp8.quantize.default, self._shard_as_matrix(), scale, text)
        quantized.meta[OPERAND_OF] = self.reader.meta[OPERAND_OF]
        data = self._gather(self._emit(fp8.as_bytes.default, quantized))
        gathered = self._emit(fp8.as_codes.default, data, quantization.format.name)
        gathered.meta[ORIGINAL_GATHER] = self.matrix.node.name
        return gathered

    def _amax(self, x: fx.Node, block: Block) -> fx.Node:
        return self._emit(fp8.amax.default, x, block_text(block))

    def _shard_as_matrix(self) -> fx.Node:
        if self._shard is None:
            shard = self.gather.shard
            for cast in (n for n in self.matrix.path if n.target in CASTS):
                shard = self._emit(cast.target, shard, *cast.args[1:], **cast.kwargs)
            if tensor(shard).ndim != 2:
                shard = self._emit(aten.reshape.default, shard, [-1, tensor(shard).shape[-1]])
            self._shard = shard
        return self._shard

    def _gather(self, shard: fx.Node) -> fx.Node:
        if self.is_stacked:
            return self._stack_ranks(shard)
        width = tensor(shard).shape[-1]
        sizes = [*tensor(self.gather.shard).shape[:-1], width]
        whole = self._concatenate(self._stack_ranks(self._emit(aten.reshape.default, shard, sizes)))
        for move in self.matrix.moves:
            if move.target in RESHAPES:
                whole = self._emit(aten.reshape.default, whole, self._sizes_after(move, width))
            else:
                whole = self._emit(move.target, whole, *move.args[1:], **move.kwargs)
        return whole

    def _sizes_after(self, move: fx.Node, width: int) -> list[int]:
        """Return the sizes after `move`. Row amaxes have one column, unlike the FP8 data."""
        *leading, last = tensor(move).shape
        return [*leading, width if self._row_amax is not None and width == 1 else last]

    def _concatenate(self, shards: fx.Node) -> fx.Node:
        if self.gather.whole is self.gather.wait:
            return shards
        rows = tensor(self.gather.shard).shape[0]
        split = self._emit(aten.split.Tensor, shards, rows)
        parts = [self._emit(operator.getitem, split, i) for i in range(self.gather.group[0])]
        return self._emit(aten.cat.default, parts, self.gather.dim)

    def _stack_ranks(self, shard: fx.Node) -> fx.Node:
        return self._emit(WAIT_TENSOR, self._emit(ALL_GATHER, shard, *self.gather.group))

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a node with the gather's metadata, except for the reader's checkpointing tag."""
        node = emit(self.graph, target, *args, like=self.gather.node, **kwargs)
        compat.copy_region(self.reader, node)
        return node
