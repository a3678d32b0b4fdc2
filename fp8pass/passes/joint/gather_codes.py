"""Gather FP8 codes instead of what they are made of: `quantize` moves ahead of `all_gather`.

    before   x  = all_gather(shard)
             s  = scale(amax(x));  q = quantize(x, s)
    after    a  = amax(shard);     p = quantize(shard, scale(a))
             s  = scale(all_gather(a))
             q  = as_codes(all_gather(as_bytes(p)))

The codes are the same, bit by bit: a row lies on one rank, and its scale follows from its amax,
which is gathered beside the codes. One scale for all of a tensor follows from the amaxes of all
ranks. These are gathered as well, a number each, rather than reduced: gloo's maximum loses a NaN.

    before   s  = scale(amax(x));  q = quantize(x, s)
    after    s  = scale(amax(all_gather(amax(shard))));  p = quantize(shard, s)
             q  = as_codes(all_gather(as_bytes(p)))

Views and permutations between the gather and the matrix follow on bytes, casts come before the
codes. Activations are gathered so in sequence parallel models, weights in SimpleFSDP, gradients in
the backward of sequence parallel ones.

A gather stays as it is if somebody needs the tensor itself, such as the gradient of a bias: codes
besides would take more bytes, not fewer. `explain` says why. Nothing depends on what differs
between ranks, so that all of them send the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.quantization import ROW, TENSOR, Block, block_text, parse, parse_block
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR, Gather, find_gathers, remove_unused
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.patterns import CASTS, RESHAPES
from fp8pass.graph.tags import OPERAND_OF, ORIGINAL_GATHER, WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# What only moves elements: bytes as well as numbers.
MOVES = RESHAPES | {aten.permute.default, aten.clone.default}


@dataclass
class GatheredMatrix:
    """A gathered tensor as it is quantized.

    Attributes:
        node: the matrix.
        path: the views, permutations and casts from the gathered tensor to it, in order.
        readers: the operators that measure and quantize it.
    """

    node: fx.Node
    path: Sequence[fx.Node]
    readers: list[fx.Node] = field(default_factory=list)

    @property
    def codes(self) -> list[fx.Node]:
        """The codes that are made of it."""
        return [n for n in self.readers if n.target is fp8.quantize.default]

    @property
    def casts(self) -> list[fx.Node]:
        """The casts on the way to it."""
        return [n for n in self.path if n.target in CASTS]

    @property
    def moves(self) -> list[fx.Node]:
        """What moves its elements on the way."""
        return [n for n in self.path if n.target in MOVES]

    @property
    def has_row_scales(self) -> bool:
        """Whether each row is measured."""
        return any(_measures_block(n, ROW) for n in self.readers)


def gather_codes(gm: fx.GraphModule, ctx: Context) -> None:
    """Replace gathers of what is only quantized by gathers of codes."""
    changed = False
    for gather in list(find_gathers(gm.graph)):
        matrices, others = find_readers(gather.whole)
        reason = why_not(gather, matrices, others)
        if reason:
            gather.node.meta[WHY_NOT_QUANTIZED] = reason
            continue
        for matrix in matrices:
            Sender(gm.graph, gather, matrix).rewrite()
        changed = True
    if changed:
        remove_unused(gm.graph)


def find_readers(whole: fx.Node) -> tuple[list[GatheredMatrix], list[fx.Node]]:
    """The matrices that are quantized of a gathered tensor, and all else that reads it."""
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
    """Why a tensor is gathered as it is; '' if its codes can be instead."""
    codes = [n for matrix in matrices for n in matrix.codes]
    if not codes:
        return "no linear layer in FP8 reads it"
    if any(parse(str(n.args[2])).format.lossless for n in codes):
        return "exact formats: rewritten, not rounded"
    if any(_block(n) not in (ROW, TENSOR) for n in codes):
        return "its scales are of blocks"
    if others:
        reads_sizes = all(kind(n) is Kind.SYMBOL for n in others)
        name = graph.operator_name(others[0])
        return "its sizes vary" if reads_sizes else f"the operator {name} reads it, too"
    kinds = [_block(n) for n in codes]
    if len(set(kinds)) < len(kinds):
        return "layers read it in more than one shape or dtype"
    for matrix in matrices:
        if not all(_measures(n, matrix) for n in codes if n in matrix.codes):
            return "its codes are scaled by what is measured elsewhere"
        if matrix.has_row_scales and not _keeps_rows(gather, matrix):
            return "rows lie on more than one rank"
        if _sizes_vary(gather, matrix):
            return "its sizes vary"
    return ""


def _block(codes: fx.Node) -> Block:
    return parse(str(codes.args[2])).block


def _measures_block(node: fx.Node, block: Block) -> bool:
    return node.target is fp8.amax.default and parse_block(str(node.args[1])) == block


def _measures(codes: fx.Node, matrix: GatheredMatrix) -> bool:
    """Whether the scale of codes follows from their matrix, and so is the same on all ranks."""
    scale: Any = codes.args[1]
    if not graph.is_call(scale, fp8.scale.default):
        return False
    measured = scale.args[0]
    while measured.target is fp8.amax.default:
        measured = measured.args[0]
    return measured is matrix.node


def _keeps_rows(gather: Gather, matrix: GatheredMatrix) -> bool:
    """Whether each row of a matrix is a row of one rank's part."""
    is_last = gather.dim == tensor(gather.whole).ndim - 1
    return not is_last and all(map(_keeps_last_dimension, matrix.moves))


def _keeps_last_dimension(move: fx.Node) -> bool:
    before, after = tensor(move.args[0]), tensor(move)  # type: ignore[arg-type]
    if graph.is_call(move, aten.permute.default):
        return move.args[1][-1] % before.ndim == before.ndim - 1  # type: ignore
    return compat.statically_known_true(before.shape[-1] == after.shape[-1])


def is_plain(gather: Gather, matrix: GatheredMatrix) -> bool:
    """Whether a matrix is those of all ranks, one below the other."""
    leading = tensor(gather.shard).shape[: gather.dim]
    is_below = all(compat.statically_known_true(size == 1) for size in leading)
    permutes = any(graph.is_call(n, aten.permute.default) for n in matrix.moves)
    return is_below and not permutes and _keeps_rows(gather, matrix)


def _sizes_vary(gather: Gather, matrix: GatheredMatrix) -> bool:
    """Whether some size varies that the codes' views would have to be given."""
    if is_plain(gather, matrix):
        return not isinstance(tensor(matrix.node).shape[-1], int)
    nodes = (gather.shard, gather.whole, *matrix.moves)
    return not all(isinstance(size, int) for n in nodes for size in tensor(n).shape)


class Sender:
    """Has one gathered matrix measured and quantized where its parts are, and gathers the codes."""

    def __init__(self, g: fx.Graph, gather: Gather, matrix: GatheredMatrix) -> None:
        self.graph, self.gather, self.matrix = g, gather, matrix
        self.is_plain = is_plain(gather, matrix)
        self.reader = matrix.node
        self._part: fx.Node | None = None
        self._row_amax: fx.Node | None = None

    def rewrite(self) -> None:
        """Replace all that reads the matrix."""
        for reader in sorted(self.matrix.readers):
            self.reader = reader
            with self.graph.inserting_before(reader):
                reader.replace_all_uses_with(self._replacement())

    def _replacement(self) -> fx.Node:
        if _measures_block(self.reader, ROW):
            self._row_amax = self._amax(self._own_part(), ROW)
            return self._gathered(self._row_amax)
        if _measures_block(self.reader, TENSOR):
            own = self._emit(aten.reshape.default, self._amax(self._own_part(), TENSOR), [1])
            return self._amax(self._sent(own), TENSOR)
        _, scale, text = self.reader.args
        if _block(self.reader) == ROW:
            scale = self._emit(fp8.scale.default, self._row_amax, text)
        codes = self._emit(fp8.quantize.default, self._own_part(), scale, text)
        codes.meta[OPERAND_OF] = self.reader.meta[OPERAND_OF]
        data = self._gathered(self._emit(fp8.as_bytes.default, codes))
        format = parse(str(text)).format.name
        gathered = self._emit(fp8.as_codes.default, data, format)
        gathered.meta[ORIGINAL_GATHER] = self.matrix.node.name
        return gathered

    def _amax(self, x: fx.Node, block: Block) -> fx.Node:
        return self._emit(fp8.amax.default, x, block_text(block))

    def _own_part(self) -> fx.Node:
        """This rank's part as a matrix, in the dtype that is quantized."""
        if self._part is None:
            part = self.gather.shard
            for cast in self.matrix.casts:
                part = self._emit(cast.target, part, *cast.args[1:], **cast.kwargs)
            if tensor(part).ndim != 2:
                part = self._emit(aten.reshape.default, part, [-1, tensor(part).shape[-1]])
            self._part = part
        return self._part

    def _gathered(self, part: fx.Node) -> fx.Node:
        """What `part` is on all ranks, a matrix like the one that is replaced."""
        if self.is_plain:
            return self._sent(part)
        width = tensor(part).shape[-1]
        sizes = [*tensor(self.gather.shard).shape[:-1], width]
        whole = self._side_by_side(self._sent(self._emit(aten.reshape.default, part, sizes)))
        for move in self.matrix.moves:
            if move.target in RESHAPES:
                whole = self._emit(aten.reshape.default, whole, self._sizes(move, width))
            else:
                whole = self._emit(move.target, whole, *move.args[1:], **move.kwargs)
        return whole

    def _sizes(self, move: fx.Node, width: int) -> list[int]:
        """The sizes of a view, or of its rows' amaxes."""
        *leading, last = tensor(move).shape
        return [*leading, width if self._row_amax is not None and width == 1 else last]

    def _side_by_side(self, parts: fx.Node) -> fx.Node:
        if self.gather.whole is self.gather.wait:
            return parts
        rows = tensor(self.gather.shard).shape[0]
        split = self._emit(aten.split.Tensor, parts, rows)
        each = [self._emit(operator.getitem, split, i) for i in range(self.gather.group[0])]
        return self._emit(aten.cat.default, each, self.gather.dim)

    def _sent(self, part: fx.Node) -> fx.Node:
        """The parts of all ranks, one below the other."""
        return self._emit(WAIT_TENSOR, self._emit(ALL_GATHER, part, *self.gather.group))

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that stands where the gather did, in the checkpoint region of the reader."""
        node = emit(self.graph, target, *args, like=self.gather.node, **kwargs)
        compat.copy_region(self.reader, node)
        return node
