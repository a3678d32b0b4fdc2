"""The `fp8pass::` dialect: the operators that fp8pass adds to graphs of aten operators.

Every operator is functional. Its reference in plain PyTorch computes in fp32 and defines the exact
result. The reference may return a view in any layout; the operator returns a new tensor in the
layout of its shape rule (`Operator.fake`).

Quantized data satisfy `x ≈ data * scale`. The scale is `amax / format.max`, but at least the
smallest normal number of fp32. If the amax is NaN or Inf, so is the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8pass import compat
from fp8pass.dialect import accumulation, expert_groups
from fp8pass.dialect.encoding import (
    decode,
    encode,
    is_fp8,
    pack,
    padded_size,
    split_groups,
    unpack,
)
from fp8pass.dialect.formats import EXACT, FORMATS, simulated_format
from fp8pass.dialect.masking import mask
from fp8pass.dialect.quantization import Quantization, parse, parse_block

_library = torch.library.Library("fp8pass", "DEF")


@dataclass(frozen=True)
class Operator:
    reference: Callable[..., Tensor]
    # Returns an uninitialized result. It must not branch on sizes, which would add guards.
    fake: Callable[..., Tensor]
    multiplies: bool = False  # whether the operator is a GEMM
    reduces: bool = False  # whether it reduces each tensor, row or group to one number

    def run(self, *args: Any) -> Tensor:
        result, empty = self.reference(*args), self.fake(*args)
        storage = compat.weak_storage(result)
        operands = compat.tensor_leaves(args)
        is_alias = any(storage == compat.weak_storage(x) for x in operands)
        if is_alias or result.stride() != empty.stride():
            return empty.copy_(result)
        return result


# Tests check that other tables of operators agree with this table.
OPERATORS: dict[Any, Operator] = {}


def _operator(
    fake: Callable[..., Tensor], *, multiplies: bool = False, reduces: bool = False
) -> Callable[[Callable], Callable]:
    """Return a decorator that defines the operator `fp8pass::<function name>`."""

    def register(reference: Callable) -> Callable:
        operator, name = Operator(reference, fake, multiplies, reduces), reference.__name__
        _library.define(name + torch.library.infer_schema(reference, mutates_args=()))
        _library.impl(name, operator.run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8pass::{name}", fake, lib=_library)
        OPERATORS[getattr(torch.ops.fp8pass, name).default] = operator
        return reference

    return register


@_operator(
    lambda x, block: x.new_empty(_quantization_of(block).scale_shape(x.shape), dtype=torch.float32),
    reduces=True,
)
def amax(x: Tensor, block: str) -> Tensor:
    """Return the largest magnitude in each block of `x`, fp32 (section 5.2 of the COAT paper).

    The shape is [] for the block `tensor`, [M, 1] for `row`, and [..., K / G] for `1×G`. NaN
    propagates.
    """
    return _quantization_of(block).amax(x)


def _quantization_of(block: str) -> Quantization:
    return Quantization(EXACT, parse_block(block))


@_operator(lambda amax, text: torch.empty_like(amax, dtype=parse(text).scale_dtype))
def scale(amax: Tensor, quantization: str) -> Tensor:
    """Return scales that map each `amax` to the format's largest value (LLMQ paper, section 3)."""
    return parse(quantization).scale(amax)


def _fake_quantize(x: Tensor, scale: Tensor, quantization: str, plane: int = 0) -> Tensor:
    how = parse(quantization)
    fmt = how.format
    if fmt.lossless:
        return torch.empty_like(x)
    if fmt.packed:
        packed = x.shape[-1] * fmt.planes[plane] // 8
        return x.new_empty((*x.shape[:-1], packed), dtype=fmt.dtype)
    layout = torch.preserve_format if how.is_in_groups else torch.contiguous_format
    return torch.empty_like(x, dtype=fmt.dtype, memory_format=layout)


@_operator(_fake_quantize)
def quantize(x: Tensor, scale: Tensor, quantization: str, plane: int = 0) -> Tensor:
    """Quantize `x` [..., K] with the scale of each block, and return one plane of the data.

    8-bit data have the shape of `x`. They have the layout of `x` if scales vary along the last
    dimension; otherwise they are contiguous. A packed plane with w bits of each element is
    contiguous, uint8 [..., K·w/8]. Byte i of a group contains the i-th element of each of 8/w
    consecutive parts of the group. With 4 bits and groups of 128, byte 0 contains elements 0 and
    64. So neighboring threads process neighboring elements.
    """
    how = parse(quantization)
    fmt = how.format
    if fmt.lossless:
        return x.clone() if how.is_in_groups else x
    factor = how.spread(scale).reciprocal()
    if not how.is_within_rows:
        data = how.merge(encode(how.split(x.float()) * factor, fmt), x.shape)
        return data.to(fmt.dtype) if fmt.emulated else data
    groups = split_groups(x.float(), how.block[1], 8 // fmt.planes[plane])
    parts = [encode(part * factor, fmt) for part in groups]
    data = pack(parts, fmt, plane) if fmt.emulated else parts[0]
    return data.flatten(-2)


def _fake_dequantize(
    planes: list[Tensor], scale: Tensor, quantization: str, dtype: torch.dtype
) -> Tensor:
    fmt, first = parse(quantization).format, planes[0]
    if not fmt.packed:
        return torch.empty_like(first, dtype=dtype)
    length = first.shape[-1] * 8 // fmt.planes[0]
    return first.new_empty((*first.shape[:-1], length), dtype=dtype)


@_operator(_fake_dequantize)
def dequantize(
    planes: list[Tensor], scale: Tensor, quantization: str, dtype: torch.dtype
) -> Tensor:
    """Dequantize a tensor from all its planes.

    The result has the layout of the data. For packed planes it is contiguous.
    """
    how, first = parse(quantization), planes[0]
    fmt = how.format
    if fmt.lossless:
        return first
    data = unpack(planes, fmt, how.block[1]) if fmt.packed else how.split(first)
    values = (decode(data, fmt) * how.spread(scale)).to(dtype)
    return values.flatten(-2) if how.is_within_rows else how.merge(values, first.shape)


def _fake_transpose(data: Tensor) -> Tensor:
    if not is_fp8(data.dtype):
        return torch.empty_like(data.t())
    rows, columns = data.shape
    return data.new_empty((columns, padded_size(rows)))


@_operator(_fake_transpose)
def transpose(data: Tensor) -> Tensor:
    """Transpose an FP8 matrix [M, K] to [K, M'], contiguous, so that a GEMM can contract over M.

    M' is M padded with zeros to a multiple of 16. For dtypes other than FP8, return a view, because
    GEMMs in these dtypes support any layout.
    """
    if not is_fp8(data.dtype):
        return data.t()
    rows = data.shape[0]
    if not compat.statically_known_true(padded_size(rows) == rows):
        raw = data.view(torch.uint8)  # FP8 has no fill kernel
        padding = (0, 0, 0, padded_size(rows) - rows)
        data = torch.nn.functional.pad(raw, padding).view(data.dtype)
    return data.t().clone(memory_format=torch.contiguous_format)


@_operator(lambda parts: parts[0].new_empty((parts[0].shape[0], sum(x.shape[1] for x in parts))))
def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate FP8 matrices [M, K₁], [M, K₂], ... to a contiguous matrix [M, K₁ + K₂ + ...]."""
    raw = [part.view(torch.uint8) for part in parts]  # FP8 has no copy kernel
    return torch.cat(raw, 1).view(parts[0].dtype)


@_operator(lambda data: torch.empty_like(data, dtype=torch.uint8))
def as_bytes(data: Tensor) -> Tensor:
    """View FP8 data as bytes, because operators outside the dialect do not support FP8."""
    return data.view(torch.uint8)


@_operator(lambda data, format: torch.empty_like(data, dtype=FORMATS[format].dtype))
def as_codes(data: Tensor, format: str) -> Tensor:
    """View bytes as FP8 data: the inverse of `as_bytes`."""
    dtype = FORMATS[format].dtype
    assert dtype is not None
    return data.view(dtype)


@_operator(
    lambda a, _a, b, _b, bias, dtype, *_: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
    multiplies=True,
)
def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    a_quantization: str,
    b_quantization: str,
) -> Tensor:
    """Return `dequantize(a) @ dequantize(b).T + bias`, rounded once to `out_dtype`, [M, N].

    `a` [M, K] and `b` [N, K] are row-major. Operands in a lossless format are multiplied in their
    own dtype. With `fast_accumulation`, tensor cores may truncate the running sum to 14 bits.
    """
    if not is_fp8(a.dtype):
        return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())
    operands = (a, a_scale, parse(a_quantization)), (b, b_scale, parse(b_quantization))
    if any(how.is_in_groups for _, _, how in operands):
        left, right = (dequantize([x], s, str(how), torch.float32) for x, s, how in operands)
        product = left @ right.t()
    else:  # scales do not vary along the contraction, so they can be applied to the product
        product = accumulation.product(a, b, fast=fast_accumulation) * (a_scale * b_scale.t())
    return (product if bias is None else product + bias.float()).to(out_dtype)


@_operator(lambda offsets: torch.empty_like(offsets))
def padded_ends(offsets: Tensor) -> Tensor:
    """Return where each expert group ends in the result of `transpose_segments`, int32 [E]."""
    return expert_groups.padded_group_ends(offsets)


@_operator(lambda amaxes, offsets: amaxes.new_empty((offsets.shape[0], 1)), reduces=True)
def segment_amax(amaxes: Tensor, offsets: Tensor) -> Tensor:
    """Return the amax of each expert group, fp32 [E, 1], of row amaxes [T, 1]. NaN propagates.

    The amax of an empty group is 0. One reduction computes all results without waiting for the
    offsets.
    """
    row = torch.arange(amaxes.shape[0], dtype=torch.int32, device=amaxes.device)
    starts, ends = expert_groups.group_starts(offsets).unsqueeze(-1), offsets.unsqueeze(-1)
    inside = (row >= starts) & (row < ends)
    amaxes_of_groups = torch.where(inside, amaxes.t(), 0.0)
    if not compat.statically_known_true(amaxes.shape[0] > 0):  # a rank may have no tokens
        amaxes_of_groups = F.pad(amaxes_of_groups, (0, 1))
    return amaxes_of_groups.amax(-1, keepdim=True)


def _fake_transpose_segments(
    x: Tensor, scales: Tensor, offsets: Tensor, format: str, rows: Tensor | None = None, *_: Any
) -> Tensor:
    count = (x if rows is None else rows).shape[0]
    length = expert_groups.padded_length(count, offsets.shape[0])
    return x.new_empty((x.shape[1], length), dtype=FORMATS[format].dtype)


@_operator(_fake_transpose_segments)
def transpose_segments(
    x: Tensor,
    scales: Tensor,
    offsets: Tensor,
    format: str,
    rows: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> Tensor:
    """Quantize the tokens of each expert with the expert's scale, then transpose and pad them.

    `x` is [T, K], or has any number of rows, from which the indices `rows` [T] select the tokens.
    `scales` is [E, 1]. If `x` is FP8 data, `row_scales` contains a scale for each row of `x`.
    Returns a contiguous matrix [K, T'], where T' is `padded_length`. Each group is padded with
    columns of zeros up to `padded_ends`. All later columns are zero.
    """
    count = (x if rows is None else rows).shape[0]
    x = x.float() if row_scales is None else x.float() * row_scales
    source, is_token, expert = expert_groups.padded_rows(count, offsets)
    if not compat.statically_known_true(count > 0):  # padding must not read rows that do not exist
        x = F.pad(x, (0, 0, 0, 1))
        rows = rows if rows is None else F.pad(rows, (0, 1))
    values = x[source if rows is None else rows[source]] * scales[expert].reciprocal()
    padded = torch.where(is_token.unsqueeze(-1), values, 0.0)
    return encode(padded, FORMATS[format]).t()


@_operator(
    lambda a, _a, b, _b, offsets, dtype, *_: a.new_empty(
        (a.shape[0], b.shape[0] // offsets.shape[0]), dtype=dtype
    ),
    multiplies=True,
)
def scaled_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: `(a·a_scale)[e] @ (b·b_scale)[e].T`.

    `a` is [T, K], and `b` [E·N, K] contains the stacked matrices of all experts. Both are row-major
    with row scales. The result is [T, N], rounded once. Rows without an expert are zero in eager
    mode, and undefined in a compiled graph on a GPU.
    """
    experts = offsets.shape[0]
    product = a.new_zeros((a.shape[0], b.shape[0] // experts), dtype=out_dtype)
    matrices = b.chunk(experts), b_scale.chunk(experts)
    for rows, matrix, scale in zip(expert_groups.group_slices(offsets), *matrices, strict=True):
        group = accumulation.product(a[rows], matrix, fast=fast_accumulation)
        product[rows] = (group * (a_scale[rows] * scale.t())).to(out_dtype)
    return product


@_operator(
    lambda a, _a, b, _b, ends, dtype, *_: a.new_empty(
        (ends.shape[0], a.shape[0], b.shape[0]), dtype=dtype
    ),
    multiplies=True,
)
def scaled_grouped_outer(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """Contract over the tokens of each expert e: `(a·a_scale)[e] @ (b·b_scale)[e].T`.

    `a` [M, T'] and `b` [N, T'] are results of `transpose_segments`, with scales [E, 1]. `ends` is
    the result of `padded_ends`. The result is [E, M, N], rounded once.
    """
    products = [
        accumulation.product(a[:, group], b[:, group], fast=fast_accumulation)
        for group in expert_groups.group_slices(ends)
    ]
    return (torch.stack(products) * (a_scale * b_scale).unsqueeze(-1)).to(out_dtype)


@_operator(lambda x, *_: torch.empty_like(x))
def mask_format(x: Tensor, format: str, inner: bool, outer: bool) -> Tensor:
    """Simulate a format (`masking.py`). The result has the dtype and layout of `x`."""
    return mask(x, simulated_format(format), inner, outer)
