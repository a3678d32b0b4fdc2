"""Rewrite a subgraph, operator by operator, to compute a chunk of its rows.

A value has T rows if the product of its leading dimensions is T, e.g. `[B, S, V]` with B·S = T. In
the rewritten graph, it has the shape `[c, ...]` for any number of rows c:

    before   x [B, S, V];  m = amax(x, [2], True);  y = sub(x, m);  g = mm(t(y), h)
    after    x [c, V];     m = amax(x, [1], True);  y = sub(x, m);  g = mm(t(y), h)

A result either has rows, or is a sum over rows, like `g`. The loss of a language model drops the
last row of each sequence, `x[:, :-1]`. These rows are computed anyway, and `RowGraph.restore`
removes them from the results.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import checks_are_on
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, prims, tensor
from fp8pass.graph.row_graph import NotRowwise, RowGraph, describe

log = logging.getLogger("fp8pass")

# Unlike the results of other reductions over rows, these sums can be added up over chunks.
SUM_OPERATORS = {aten.sum.default, aten.sum.dim_IntList}
# Reductions that take the reduced dimensions as their second argument.
ROW_REDUCTIONS = {
    *SUM_OPERATORS, aten.mean.dim, aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim,
    aten.argmax.default, aten.any.dim, aten.any.dims, aten.logsumexp.default, aten.var.correction,
    aten.var_mean.correction, aten.std.correction, prims.prepare_softmax_online.default,
}  # fmt: skip
SCATTERS = {aten.scatter_add.default, aten.scatter.src, aten.scatter.value}


class ChunkWriter(RowGraph):
    """Writes the body of a `RowGraph`, operator by operator."""

    def write(self, node: fx.Node, part: set[fx.Node]) -> None:
        """Add a node of the subgraph `part` to the body, which must contain its operands."""
        if node.target is aten.permute.default and graph.skip_transposes(node)[1]:
            return  # `_gemm` and `_shared_input` skip transposes and read the matrix itself
        if graph.is_getitem(node) and node.args[0] not in part:
            raise NotRowwise(f"{describe(node)} has several results")
        write = _WRITERS.get(node.target) or _WRITERS_OF_KINDS.get(kind(node))
        if write is None:
            raise NotRowwise(f"{describe(node)} may mix tokens")
        self._part = part
        try:
            written = write(self, node)
        except NotRowwise:
            raise
        except Exception as error:  # a bug here must fail the tests, but not a user's compilation
            if checks_are_on():
                raise
            log.debug("computing %s in chunks failed:", node.name, exc_info=True)
            problem = f"{describe(node)} cannot be computed in chunks of tokens: {error}"
            raise NotRowwise(problem) from error
        (self._sums if node in self.sums else self._written)[node] = written

    def _pointwise(self, node: fx.Node) -> fx.Node:
        args = [self._broadcast_operand(arg, node) for arg in node.args]
        kwargs = {name: self._broadcast_operand(arg, node) for name, arg in node.kwargs.items()}
        return self._emit(node.target, *args, like=node, **kwargs)

    def _creation(self, node: fx.Node) -> fx.Node:
        if node.target is not aten.full.default:
            raise NotRowwise(f"{describe(node)} creates one tensor for all tokens")
        *_, rest = self._split(node)
        with compat.fake_mode_of(tensor(node)):
            created = self._emit(node.target, list(rest), *node.args[1:], like=node, **node.kwargs)
        self._shared.add(created)
        return created

    def _random(self, node: fx.Node) -> fx.Node:
        # One seed would give every chunk the same numbers.
        raise NotRowwise(f"{describe(node)} draws random numbers for all tokens at once")

    def _reshape(self, node: fx.Node) -> fx.Node:
        layout, _, rest = self._split(node)
        operand: Any = node.args[0]
        if self._written.get(operand) in self._shared:
            return self._broadcast_operand(operand, node)
        x = self._row_operand(operand)
        if self.layout(operand).shifted != layout.shifted:
            raise NotRowwise(f"{describe(node)} mixes tokens")
        return self._view_rows(x, rest, node)

    def _expand(self, node: fx.Node) -> fx.Node:
        *_, rest = self._split(node)
        x = self._broadcast_operand(node.args[0], node)
        if x in self._shared:
            return self._emit(aten.expand.default, x, list(rest), like=node)
        return self._emit(aten.expand.default, x, [-1, *rest], like=node)

    def _slice(self, node: fx.Node) -> fx.Node:
        x, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        layout = self.layout(x)  # type: ignore[arg-type]
        dim = dim % tensor(x).ndim  # type: ignore[operator, arg-type]
        if dim >= layout.dims:
            rest = (dim - layout.dims + 1, *node.args[2:])
            return self._emit(node.target, self._row_operand(x), *rest, like=node)
        if node.args[4:] or layout.shifted:
            raise NotRowwise(f"{describe(node)} selects tokens by a step or a second shift")
        lead = tuple(tensor(x).shape[: layout.dims])  # type: ignore[arg-type]
        self._set_shift(lead, dim, *node.args[2:4])
        *_, rest = self._split(node)
        return self._view_rows(self._row_operand(x), rest, node)

    def _slice_scatter(self, node: fx.Node) -> fx.Node:
        """Select `source` in the rows that remain after the shift, else `base`."""
        base, source = node.args[:2]
        dim = node.args[2] if len(node.args) > 2 else 0
        lead = tuple(tensor(node).shape[: self.layout(node).dims])
        dim = dim % tensor(node).ndim  # type: ignore[operator]
        if dim >= len(lead) or node.args[5:]:
            raise NotRowwise(f"{describe(node)} writes to a part of the vocabulary")
        self._set_shift(lead, dim, *node.args[3:5])  # type: ignore[arg-type]
        *_, rest = self._split(node)
        rows = self._view_rows(self._row_operand(source), rest, node)
        into = self._broadcast_operand(base, node)
        mask = self._shift_mask(node, ndim=tensor(rows).ndim)
        return self._emit(aten.where.self, mask, rows, into, like=node)

    def _pad(self, node: fx.Node) -> fx.Node:
        x, pad, *value = node.args
        layout = self.layout(x)  # type: ignore[arg-type]
        if len(pad) > 2 * (tensor(x).ndim - layout.dims):  # type: ignore[arg-type]
            raise NotRowwise(f"{describe(node)} adds tokens")
        return self._emit(node.target, self._row_operand(x), pad, *value, like=node)

    def _gather(self, node: fx.Node) -> fx.Node:
        x, dim, index = node.args[:3]
        assert isinstance(x, fx.Node)
        at = dim % tensor(x).ndim - self.layout(x).dims + 1  # type: ignore[operator]
        if at < 1:
            raise NotRowwise(f"an operator combines tokens of the result of {describe(x)}")
        self._require_same_rows(x, index)
        return self._emit(
            node.target, self._row_operand(x), at, self._row_operand(index), like=node
        )

    def _scatter(self, node: fx.Node) -> fx.Node:
        """Write one element of each row by a `where` on column numbers, because it can be fused."""
        x, dim, index, source = node.args[:4]
        val, shape = tensor(node), tensor(index).shape  # type: ignore[arg-type]
        last = dim % val.ndim == val.ndim - 1  # type: ignore[operator]
        if not last or shape[-1] != 1 or node.kwargs or self.layout(node).dims != val.ndim - 1:
            raise NotRowwise(f"{describe(node)} writes to several logits of a token")
        with compat.fake_mode_of(val):
            columns = self._emit(
                prims.iota.default,
                val.shape[-1],
                start=0,
                step=1,
                dtype=torch.int64,
                device=val.device,
                requires_grad=False,
                like=node,
            )
        self._shared.add(columns)
        here = self._emit(aten.eq.Tensor, self._row_operand(index), columns, like=node)
        into = self._broadcast_operand(x, node)
        self._require_same_rows(node, index)
        if isinstance(source, fx.Node):
            self._require_same_rows(node, source)
            source = self._row_operand(source)
            if node.target is aten.scatter_add.default:
                source = self._emit(aten.add.Tensor, into, source, like=node)
        else:
            source = self._emit(aten.full_like.default, into, source, like=node)
        return self._emit(aten.where.self, here, source, into, like=node)

    def _reduction(self, node: fx.Node) -> fx.Node:
        x = node.all_input_nodes[0]
        layout, ndim = self.layout(x), tensor(x).ndim
        argument: Any = node.args[1] if len(node.args) > 1 else None
        listed = argument if isinstance(argument, (list, tuple)) else [argument]
        dims = sorted({d % ndim for d in listed if d is not None} or range(ndim))
        lead, own = dims[: layout.dims], [d - layout.dims + 1 for d in dims]
        if min(own) > 0:
            dim = own if listed is argument else own[0]
            rest = node.args[2:]
            return self._emit(
                node.target, self._row_operand(x), dim, *rest, like=node, **node.kwargs
            )
        if lead != list(range(layout.dims)) or node.target not in SUM_OPERATORS or layout.shifted:
            raise NotRowwise(f"{describe(node)} needs all tokens at once")
        self.sums.add(node)
        dims = [0, *(d for d in own if d > 0)]
        total = self._emit(
            aten.sum.dim_IntList, self._row_operand(x), dims, like=node, **node.kwargs
        )
        return self._emit(aten.view.default, total, list(tensor(node).shape), like=node)

    def _getitem(self, node: fx.Node) -> fx.Node:
        several, i = node.args
        return self._emit(node.target, self._written[several], i, like=node)  # type: ignore[index]

    def _gemm(self, node: fx.Node) -> fx.Node:
        *bias, a, b = node.args
        assert isinstance(a, fx.Node)
        assert isinstance(b, fx.Node)
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            raise NotRowwise(f"{describe(node)} may mix tokens")
        base, flipped = graph.skip_transposes(a)
        if a in self._written or not (flipped or b in self._part):
            if b in self._part:
                raise NotRowwise(f"{describe(node)} multiplies tokens with tokens")
            shared = self._shared_input(b, tuple(tensor(b).shape))
            added = [self._broadcast_operand(x, node) for x in bias]
            return self._emit(node.target, *added, self._row_operand(a), shared, like=node)
        if not flipped or bias:
            raise NotRowwise(f"{describe(node)} multiplies tokens with tokens")
        if self.layout(base).shifted or self.layout(b).shifted:
            raise NotRowwise(f"{describe(node)} sums over shifted tokens")
        self.sums.add(node)
        left = self._emit(aten.permute.default, self._row_operand(base), [1, 0], like=node)
        return self._emit(node.target, left, self._row_operand(b), like=node)


_WRITERS: dict[Any, Callable[[ChunkWriter, fx.Node], fx.Node]] = {
    **dict.fromkeys(graph.RESHAPES, ChunkWriter._reshape),
    **dict.fromkeys(SCATTERS, ChunkWriter._scatter),
    **dict.fromkeys(compat.SEEDED_RANDOM, ChunkWriter._random),
    operator.getitem: ChunkWriter._getitem,
    aten.expand.default: ChunkWriter._expand,
    aten.slice.Tensor: ChunkWriter._slice,
    aten.slice_scatter.default: ChunkWriter._slice_scatter,
    aten.constant_pad_nd.default: ChunkWriter._pad,
    aten.gather.default: ChunkWriter._gather,
    **dict.fromkeys(ROW_REDUCTIONS, ChunkWriter._reduction),
    aten.mm.default: ChunkWriter._gemm,
    aten.addmm.default: ChunkWriter._gemm,
}
_WRITERS_OF_KINDS: dict[Kind, Callable[[ChunkWriter, fx.Node], fx.Node]] = {
    Kind.POINTWISE: ChunkWriter._pointwise,
    Kind.CREATION: ChunkWriter._creation,
}
