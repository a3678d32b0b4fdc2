"""A part of a graph, rewritten so that it computes some of its rows.

A matrix [T, N] has T rows. Other values have them, too, if their leading dimensions multiply to T:
`[B, S, V]` and `[T, 1]`, where T = B·S. What a part computes row by row can run on any number of
rows at a time:

    before   x [B, S, V];  m = amax(x, [2], True);  y = sub(x, m);  g = mm(t(y), h)
    after    x [c, V];     m = amax(x, [1], True);  y = sub(x, m);  g = mm(t(y), h)

where all that has rows is flattened to `[c, ...]`, with any c. A result either has rows, or is a
sum over them, as `g` is. A language model's shift by one leaves some of the rows, `x[:, :-1]`. What
is computed of these is computed of all, with zeros for inputs that are missing, and cut afterwards.
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
from fp8pass.graph.row_values import NotRowwise, RowGraph, named

log = logging.getLogger("fp8pass")

# Sums over rows add up over parts of them; other reductions of rows do not.
REDUCING_SUMS = {aten.sum.default, aten.sum.dim_IntList}
# Reductions whose second argument is what they reduce over.
ROW_REDUCTIONS = REDUCING_SUMS | {
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.any.dim,
    aten.any.dims,
    aten.logsumexp.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.std.correction,
    prims.prepare_softmax_online.default,
}
SCATTERS = {aten.scatter_add.default, aten.scatter.src, aten.scatter.value}


class ChunkWriter(RowGraph):
    """Writes the nodes of a part, operator by operator."""

    def write(self, node: fx.Node, part: set[fx.Node]) -> None:
        """Add a node of the part, whose operands have been added.

        Raises:
            NotRowwise: it mixes rows, or is an operator that nobody wrote for some rows.
        """
        if node.target is aten.permute.default and graph.skip_transposes(node)[1]:
            return  # read by GEMMs, which look through it
        if graph.is_getitem(node) and node.args[0] not in part:
            raise NotRowwise(f"{named(node)} has several results")
        write = _WRITERS.get(node.target) or _WRITERS_OF_KINDS.get(kind(node))
        if write is None:
            raise NotRowwise(f"{named(node)} may mix tokens")
        self._part = part
        try:
            written = write(self, node)
        except NotRowwise:
            raise
        except Exception as error:  # a bug here must not stop a compilation, but fails a test
            if checks_are_on():
                raise
            log.debug("computing %s for some of the tokens failed:", node.name, exc_info=True)
            problem = f"{named(node)} cannot be computed for some of the tokens: {error}"
            raise NotRowwise(problem) from error
        (self._sums if node in self.sums else self._written)[node] = written

    def _pointwise(self, node: fx.Node) -> fx.Node:
        args = [self._aligned(arg, node) for arg in node.args]
        kwargs = {name: self._aligned(arg, node) for name, arg in node.kwargs.items()}
        return self._emit(node.target, *args, like=node, **kwargs)

    def _creation(self, node: fx.Node) -> fx.Node:
        if node.target is not aten.full.default:
            raise NotRowwise(f"{named(node)} makes a value for all tokens")
        *_, rest = self._split(node)
        with compat.fake_mode_of(tensor(node)):
            created = self._emit(node.target, list(rest), *node.args[1:], like=node, **node.kwargs)
        self._shared.add(created)
        return created

    def _random(self, node: fx.Node) -> fx.Node:
        """One seed would give all parts of the rows the same numbers."""
        raise NotRowwise(f"{named(node)} draws the numbers of all tokens at once")

    def _reshape(self, node: fx.Node) -> fx.Node:
        form, _, rest = self._split(node)
        operand = node.args[0]
        if self._is_shared(operand):
            return self._aligned(operand, node)
        x = self._rows(operand)
        if self.form(operand).shifted != form.shifted:  # type: ignore[arg-type]
            raise NotRowwise(f"{named(node)} mixes tokens")
        return self._in_shape(x, rest, node)

    def _expand(self, node: fx.Node) -> fx.Node:
        *_, rest = self._split(node)
        x = self._aligned(node.args[0], node)
        if x in self._shared:
            return self._emit(aten.expand.default, x, list(rest), like=node)
        return self._emit(aten.expand.default, x, [-1, *rest], like=node)

    def _slice(self, node: fx.Node) -> fx.Node:
        x, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        form = self.form(x)  # type: ignore[arg-type]
        dim = dim % tensor(x).ndim  # type: ignore[operator, arg-type]
        if dim >= form.dims:
            rest = (dim - form.dims + 1, *node.args[2:])
            return self._emit(node.target, self._rows(x), *rest, like=node)
        if node.args[4:] or form.shifted:
            raise NotRowwise(f"{named(node)} takes some tokens in a way that no loss does")
        lead = tuple(tensor(x).shape[: form.dims])  # type: ignore[arg-type]
        self._set_shift(lead, dim, *node.args[2:4])
        *_, rest = self._split(node)
        return self._in_shape(self._rows(x), rest, node)

    def _slice_scatter(self, node: fx.Node) -> fx.Node:
        """Rows that a shift left out get what is written into."""
        base, source = node.args[:2]
        dim = node.args[2] if len(node.args) > 2 else 0
        lead = tuple(tensor(node).shape[: self.form(node).dims])
        dim = dim % tensor(node).ndim  # type: ignore[operator]
        if dim >= len(lead) or node.args[5:]:
            raise NotRowwise(f"{named(node)} writes to a part of the vocabulary")
        self._set_shift(lead, dim, *node.args[3:5])  # type: ignore[arg-type]
        *_, rest = self._split(node)
        of_rows = self._in_shape(self._rows(source), rest, node)
        into = self._aligned(base, node)
        left = self._left_rows(node, ndim=tensor(of_rows).ndim)
        return self._emit(aten.where.self, left, of_rows, into, like=node)

    def _pad(self, node: fx.Node) -> fx.Node:
        x, pad, *value = node.args
        form = self.form(x)  # type: ignore[arg-type]
        if len(pad) > 2 * (tensor(x).ndim - form.dims):  # type: ignore[arg-type]
            raise NotRowwise(f"{named(node)} adds tokens")
        return self._emit(node.target, self._rows(x), pad, *value, like=node)

    def _gather(self, node: fx.Node) -> fx.Node:
        x, dim, index = node.args[:3]
        at = self._dim_of_row(x, dim)
        self._require_same_rows(x, index)
        return self._emit(node.target, self._rows(x), at, self._rows(index), like=node)

    def _scatter(self, node: fx.Node) -> fx.Node:
        """One element of each row is written to: a comparison of places, which fuses."""
        x, dim, index, source = node.args[:4]
        val, shape = tensor(node), tensor(index).shape  # type: ignore[arg-type]
        last = dim % val.ndim == val.ndim - 1  # type: ignore[operator]
        if not last or shape[-1] != 1 or node.kwargs or self.form(node).dims != val.ndim - 1:
            raise NotRowwise(f"{named(node)} writes to several logits of a token")
        with compat.fake_mode_of(val):
            places = self._emit(
                prims.iota.default,
                val.shape[-1],
                start=0,
                step=1,
                dtype=torch.int64,
                device=val.device,
                requires_grad=False,
                like=node,
            )
        self._shared.add(places)
        here = self._emit(aten.eq.Tensor, self._rows(index), places, like=node)
        into = self._aligned(x, node)
        self._require_same_rows(node, index)
        if isinstance(source, fx.Node):
            self._require_same_rows(node, source)
            source = self._rows(source)
            if node.target is aten.scatter_add.default:
                source = self._emit(aten.add.Tensor, into, source, like=node)
        else:
            source = self._emit(aten.full_like.default, into, source, like=node)
        return self._emit(aten.where.self, here, source, into, like=node)

    def _reduction(self, node: fx.Node) -> fx.Node:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        form, ndim = self.form(x), tensor(x).ndim
        given: Any = node.args[1] if len(node.args) > 1 else None
        listed = given if isinstance(given, (list, tuple)) else [given]
        dims = sorted({d % ndim for d in listed if d is not None} or range(ndim))
        lead, own = dims[: form.dims], [d - form.dims + 1 for d in dims]
        if min(own) > 0:
            dim = own if isinstance(given, (list, tuple)) else own[0]
            rest = node.args[2:]
            return self._emit(node.target, self._rows(x), dim, *rest, like=node, **node.kwargs)
        if lead != list(range(form.dims)) or node.target not in REDUCING_SUMS or form.shifted:
            raise NotRowwise(f"{named(node)} needs all tokens")
        self.sums.add(node)
        dims = [0, *(d for d in own if d > 0)]
        total = self._emit(aten.sum.dim_IntList, self._rows(x), dims, like=node, **node.kwargs)
        return self._emit(aten.view.default, total, list(tensor(node).shape), like=node)

    def _getitem(self, node: fx.Node) -> fx.Node:
        several, i = node.args
        return self._emit(node.target, self._written[several], i, like=node)  # type: ignore[index]

    def _gemm(self, node: fx.Node) -> fx.Node:
        *bias, a, b = node.args
        assert isinstance(a, fx.Node)
        assert isinstance(b, fx.Node)
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            raise NotRowwise(f"{named(node)} may mix tokens")
        base, flipped = graph.skip_transposes(a)
        if a in self._written or not (flipped or b in self._part):
            shared = self._shared_input(b, tuple(tensor(b).shape)) if b not in self._part else None
            if shared is None:
                raise NotRowwise(f"{named(node)} multiplies tokens with tokens")
            added = [self._aligned(x, node) for x in bias]
            return self._emit(node.target, *added, self._rows(a), shared, like=node)
        if not flipped or bias:
            raise NotRowwise(f"{named(node)} multiplies tokens with tokens")
        if self.form(base).shifted or self.form(b).shifted:
            raise NotRowwise(f"{named(node)} adds up tokens that are shifted")
        self.sums.add(node)
        left = self._emit(aten.permute.default, self._rows(base), [1, 0], like=node)
        return self._emit(node.target, left, self._rows(b), like=node)


_WRITERS: dict[Any, Callable[[ChunkWriter, fx.Node], fx.Node]] = {
    **dict.fromkeys(graph.RESHAPES, ChunkWriter._reshape),
    **dict.fromkeys(SCATTERS, ChunkWriter._scatter),
    **dict.fromkeys(compat.seeded_random_ops(), ChunkWriter._random),
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
