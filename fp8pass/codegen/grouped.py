"""GEMMs of experts in aten: what `lowering.py` says of the dialect's operators for them.

On a GPU `_scaled_grouped_mm` multiplies codes. It gives BF16, which is cast to other dtypes.
Elsewhere `_grouped_mm` multiplies their values, which BF16 holds exactly, and its result is scaled.
Both round twice where the reference rounds once, unless a GPU's result is BF16.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8pass.codegen.coding import encode
from fp8pass.codegen.emitter import Emitter
from fp8pass.codegen.segments import segments
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.nodes import aten, prims, tensor

cast = prims.convert_element_type.default


def padded_ends(emit: Emitter, offsets: fx.Node) -> fx.Node:
    """`dialect.segments.ends_of_padded` in aten."""
    sizes = emit(aten.sub.Tensor, offsets, _starts(emit, offsets))
    most = emit(aten.add.Tensor, sizes, CONTRACTION_MULTIPLE - 1)
    rounded = emit(aten.bitwise_and.Scalar, most, -CONTRACTION_MULTIPLE)
    lengths = emit(aten.clamp_min.default, rounded, CONTRACTION_MULTIPLE)
    return emit(aten.cumsum.default, lengths, 0, dtype=torch.int32)


def segment_amax(emit: Emitter, amaxes: fx.Node, offsets: fx.Node) -> fx.Node:
    """The rows of a segment are compared with its bounds: rows times experts, in one reduction."""
    (rows, _), (experts,) = emit.sizes(amaxes), emit.sizes(offsets)
    row = emit.steps(amaxes, rows, 1)
    starts, ends = (emit(aten.unsqueeze.default, x, -1) for x in (_starts(emit, offsets), offsets))
    inside = emit(
        aten.logical_and.default, emit(aten.ge.Tensor, row, starts), emit(aten.lt.Tensor, row, ends)
    )
    of_rows = emit(aten.expand.default, emit(aten.permute.default, amaxes, [1, 0]), [experts, rows])
    own = emit(aten.where.self, inside, of_rows, emit.constant(amaxes, 0.0))
    return emit(aten.amax.default, own, [-1], True)


def transpose_segments(
    emit: Emitter,
    x: fx.Node,
    scales: fx.Node,
    offsets: fx.Node,
    format: str,
    rows: fx.Node | None = None,
) -> fx.Node:
    """A Triton kernel; elsewhere every place of the result looks up the row that it holds."""
    if tensor(x).device.type == "cuda":
        return emit(segments, x, scales, offsets, format, rows)
    ends, starts = padded_ends(emit, offsets), _starts(emit, offsets)
    place = emit.steps(offsets, _padded_length(emit, rows or x, offsets), 1)
    expert = _expert_of(emit, place, ends)
    own = [emit(aten.index.Tensor, v, [expert]) for v in (starts, _starts(emit, ends), offsets)]
    row = emit(aten.add.Tensor, emit(aten.sub.Tensor, place, own[1]), own[0])
    held = emit(aten.unsqueeze.default, emit(aten.lt.Tensor, row, own[2]), -1)
    last = emit(aten.sub.Tensor, own[2], 1)
    known = emit(aten.clamp_min.default, emit(aten.minimum.default, row, last), 0)
    if rows is not None:
        known = emit(aten.index.Tensor, rows, [known])
    values = emit(cast, emit(aten.index.Tensor, x, [known]), torch.float32)
    inverse = emit(aten.reciprocal.default, emit(aten.index.Tensor, scales, [expert]))
    scaled = emit(aten.mul.Tensor, values, inverse)
    padded = emit(aten.where.self, held, scaled, emit.constant(scaled, 0.0))
    codes = encode(emit, padded, FORMATS[format])
    return emit(aten.permute.default, codes, [1, 0])


def scaled_grouped_mm(
    emit: Emitter,
    a: fx.Node,
    a_scale: fx.Node,
    b: fx.Node,
    b_scale: fx.Node,
    offsets: fx.Node,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> fx.Node:
    """`[T, K] @ [E, K, N]`."""
    experts = tensor(offsets).shape[0]
    rows, columns = emit.sizes(b)
    shape = [experts, rows // experts, columns]
    matrices = emit(aten.permute.default, emit(aten.reshape.default, b, shape), [0, 2, 1])
    scales = emit(aten.reshape.default, b_scale, shape[:2])
    if tensor(a).device.type == "cuda":
        vector = emit(aten.reshape.default, a_scale, [-1])
        operands = a, matrices, vector, scales, offsets
        return _multiplied(emit, out_dtype, fast_accumulation, *operands)
    product = emit(aten._grouped_mm.default, *_values(emit, a, matrices), offsets)
    (tokens, _) = emit.sizes(a)
    expert = _expert_of(emit, emit.steps(a_scale, tokens, 1), offsets)
    of_rows = emit(aten.mul.Tensor, a_scale, emit(aten.index.Tensor, scales, [expert]))
    return emit(cast, emit(aten.mul.Tensor, product, of_rows), out_dtype)


def scaled_grouped_outer(
    emit: Emitter,
    a: fx.Node,
    a_scale: fx.Node,
    b: fx.Node,
    b_scale: fx.Node,
    ends: fx.Node,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> fx.Node:
    """`[M, T'] @ [T', N]`, which gives `[E, M, N]`; PyTorch takes scales by row of each expert."""
    b_transposed = emit(aten.permute.default, b, [1, 0])
    if tensor(a).device.type == "cuda":
        vectors = [_by_row(emit, scale, x) for scale, x in ((a_scale, a), (b_scale, b))]
        operands = a, b_transposed, *vectors, ends
        return _multiplied(emit, out_dtype, fast_accumulation, *operands)
    products = emit(aten._grouped_mm.default, *_values(emit, a, b_transposed), ends)
    scales = emit(aten.unsqueeze.default, emit(aten.mul.Tensor, a_scale, b_scale), -1)
    return emit(cast, emit(aten.mul.Tensor, products, scales), out_dtype)


def _multiplied(
    emit: Emitter, out_dtype: torch.dtype, fast_accumulation: bool, *operands: fx.Node
) -> fx.Node:
    """Multiply FP8 matrices with scales by row, on a GPU."""
    options = None, None, torch.bfloat16, fast_accumulation
    product = emit(aten._scaled_grouped_mm.default, *operands, *options)
    return product if out_dtype is torch.bfloat16 else emit(cast, product, out_dtype)


def _padded_length(emit: Emitter, x: fx.Node, offsets: fx.Node) -> Any:
    """`dialect.segments.padded_length` of as many tokens as `x` has rows."""
    rows, more = emit.padded(emit.sizes(x)[0]), tensor(offsets).shape[0] * CONTRACTION_MULTIPLE
    return rows + more if isinstance(rows, int) else emit(operator.add, rows, more)


def _values(emit: Emitter, *codes: fx.Node) -> list[fx.Node]:
    return [emit(cast, x, torch.bfloat16) for x in codes]


def _by_row(emit: Emitter, scale: fx.Node, codes: fx.Node) -> fx.Node:
    """A segment's scale [E, 1] for each row of its operand, [E · rows]."""
    experts, rows = tensor(scale).shape[0], tensor(codes).shape[0]
    expanded = emit(aten.expand.default, scale, [experts, rows])
    copy = emit(aten.clone.default, expanded, memory_format=torch.contiguous_format)
    return emit(aten.reshape.default, copy, [experts * rows])


def _starts(emit: Emitter, ends: fx.Node) -> fx.Node:
    experts = tensor(ends).shape[0]
    shifted = emit(aten.constant_pad_nd.default, ends, [1, 0], 0)
    return emit(aten.slice.Tensor, shifted, 0, 0, experts)


def _expert_of(emit: Emitter, rows: fx.Node, ends: fx.Node) -> fx.Node:
    """Whose segment each row is in, int64; the last expert has what is nobody's."""
    behind = emit(aten.ge.Tensor, emit(aten.unsqueeze.default, rows, -1), ends)
    number: Any = emit(aten.sum.dim_IntList, behind, [-1])
    return emit(aten.clamp_max.default, number, tensor(ends).shape[0] - 1)
