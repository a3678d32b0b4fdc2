"""The fp8pass:: dialect: the few operators that rewritten graphs speak besides aten.

Every operator is functional and has one exact meaning, stated in its docstring and implemented
here in plain PyTorch, in fp32, for any device. These reference kernels run when a rewritten graph
is interpreted (`compiler="eager"`), and generated code is tested against them. For speed,
`codegen/lowering.py` says the same in terms that Inductor fuses.

Scale convention: `x ≈ data * scale`, `scale = amax / format.max`, no less than fp32's smallest
normal number, stored as the quantization says (`quantization.py`). NaN and Inf reach the output: an
infinite amax gives an infinite scale, and whatever is multiplied by it is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect import accumulation
from fp8pass.dialect.coding import decode, encode, is_fp8, pack, padded, unpack
from fp8pass.dialect.formats import EXACT, FORMATS, simulated_format
from fp8pass.dialect.masking import masked
from fp8pass.dialect.quantization import Quantization, parse, parse_block
from fp8pass.dialect.segments import ends_of_padded, padded_length, slices_of

_library = torch.library.Library("fp8pass", "DEF")


@dataclass(frozen=True)
class Operator:
    """One operator of the dialect.

    Attributes:
        reference: its kernel, in plain PyTorch, for any device.
        fake: the shape and dtype of its result. It must not branch on sizes, which would
            specialize a graph of varying shape.
        multiplies: whether it is a GEMM.
        reduces: whether it reads a tensor, row or group for one number.
    """

    reference: Callable[..., Tensor]
    fake: Callable[..., Tensor]
    multiplies: bool = False
    reduces: bool = False


# All there are; tests compare every other table of operators with this one.
OPERATORS: dict[Any, Operator] = {}


def _dialect(
    schema: str, fake: Callable[..., Tensor], *, multiplies: bool = False, reduces: bool = False
) -> Callable[[Callable], Callable]:
    """Define `fp8pass::<schema>`; the function decorated is its reference."""

    def register(reference: Callable) -> Callable:
        _library.define(schema)
        name = schema.split("(")[0]
        _library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp8pass::{name}", fake, lib=_library)
        operator = getattr(torch.ops.fp8pass, name).default
        OPERATORS[operator] = Operator(reference, fake, multiplies, reduces)
        return reference

    return register


def _fake_mask_format(x: Tensor, format: str, inner: bool, outer: bool) -> Tensor:
    return torch.empty_like(x)


def _fake_amax(x: Tensor, block: str) -> Tensor:
    return x.new_empty(_of_block(block).scale_shape(x.shape), dtype=torch.float32)


def _fake_scale(amax: Tensor, quantization: str) -> Tensor:
    return torch.empty_like(amax, dtype=parse(quantization).scale_dtype)


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


def _fake_dequantize(
    planes: list[Tensor], scale: Tensor, quantization: str, dtype: torch.dtype
) -> Tensor:
    fmt, first = parse(quantization).format, planes[0]
    if not fmt.packed:
        return torch.empty_like(first, dtype=dtype)
    length = first.shape[-1] * 8 // fmt.planes[0]
    return first.new_empty((*first.shape[:-1], length), dtype=dtype)


def _fake_transpose(data: Tensor) -> Tensor:
    if not is_fp8(data.dtype):
        return torch.empty_like(data.t())
    rows, columns = data.shape
    return data.new_empty((columns, padded(rows)))


def _fake_joined(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((parts[0].shape[0], sum(part.shape[1] for part in parts)))


def _fake_as_bytes(data: Tensor) -> Tensor:
    return torch.empty_like(data, dtype=torch.uint8)


def _fake_as_codes(data: Tensor, format: str) -> Tensor:
    return torch.empty_like(data, dtype=FORMATS[format].dtype)


def _fake_scaled_mm(
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
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fake_padded_ends(offsets: Tensor) -> Tensor:
    return torch.empty_like(offsets)


def _fake_segment_amax(amaxes: Tensor, offsets: Tensor) -> Tensor:
    return amaxes.new_empty((offsets.shape[0], 1))


def _fake_transpose_segments(
    x: Tensor, scales: Tensor, offsets: Tensor, format: str, rows: Tensor | None = None
) -> Tensor:
    count = (x if rows is None else rows).shape[0]
    length = padded_length(count, offsets.shape[0])
    return x.new_empty((x.shape[1], length), dtype=FORMATS[format].dtype)


def _fake_scaled_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0] // offsets.shape[0]), dtype=out_dtype)


def _fake_scaled_grouped_outer(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


def _of_block(text: str) -> Quantization:
    return Quantization(EXACT, parse_block(text))


@_dialect("amax(Tensor x, str block) -> Tensor", _fake_amax, reduces=True)
def amax(x: Tensor, block: str) -> Tensor:
    """The largest magnitude in each block of `x`, fp32 (COAT 5.2, Group Scaling).

    `block` is `tensor`, which gives [], `row`, [M, 1] of a matrix [M, K], or `1×G`, [..., K / G].
    That of a tensor is computed in two stages, over rows and then over their maxima, so that the
    first can be fused into whatever produces `x`. NaN where a block holds a NaN.
    """
    return _of_block(block).amax(x)


@_dialect("scale(Tensor amax, str quantization) -> Tensor", _fake_scale)
def scale(amax: Tensor, quantization: str) -> Tensor:
    """The scales that map the `amax` of blocks to the largest value of the format (LLMQ 3)."""
    return parse(quantization).scale(amax)


@_dialect(
    "quantize(Tensor x, Tensor scale, str quantization, int plane=0) -> Tensor", _fake_quantize
)
def quantize(x: Tensor, scale: Tensor, quantization: str, plane: int = 0) -> Tensor:
    """One plane of `x` quantized with the scales of its blocks; a copy in a lossless format.

    Data of 8 bits have the shape of `x`: contiguous, or in groups within rows the layout of `x`. A
    packed plane of `w` bits is uint8 [..., K·w/8], contiguous. The elements of a group lie in 8/w
    parts, one after the other, and byte `i` of the group holds the i-th element of each, the first
    part in its lowest bits: neighbouring threads read and write neighbouring elements.
    """
    how = parse(quantization)
    fmt = how.format
    if fmt.lossless:
        return x.clone()
    codes = encode(how.split(x.float()) * how.spread(scale).reciprocal(), fmt)
    if fmt.packed:
        return pack(codes, fmt, plane)
    codes = codes.reshape(x.shape)
    if not how.is_in_groups:
        return codes.contiguous()
    return torch.empty_like(x, dtype=fmt.dtype).copy_(codes)


@_dialect(
    "dequantize(Tensor[] planes, Tensor scale, str quantization, ScalarType dtype) -> Tensor",
    _fake_dequantize,
)
def dequantize(
    planes: list[Tensor], scale: Tensor, quantization: str, dtype: torch.dtype
) -> Tensor:
    """The values of all planes of a tensor, in `dtype`; in the layout of data of 8 bits.

    Contiguous if the planes are packed.
    """
    how, first = parse(quantization), planes[0]
    fmt = how.format
    if fmt.lossless:
        return first.clone()
    codes = unpack(planes, fmt, how.block[1]) if fmt.packed else how.split(first)
    values = decode(codes, fmt) * how.spread(scale)
    if fmt.packed:
        return values.flatten(-2).to(dtype)
    return torch.empty_like(first, dtype=dtype).copy_(values.reshape(first.shape))


@_dialect("transpose(Tensor data) -> Tensor", _fake_transpose)
def transpose(data: Tensor) -> Tensor:
    """An FP8 matrix `data` [M, K] in the layout that contracts it over its rows (COAT G.3).

    Returns [K, M'], contiguous, where M' is M rounded up with zeros to a multiple of 16. Operands
    in a lossless format, which GEMMs take in any layout, keep theirs: their [K, M] is column-major.
    """
    if not is_fp8(data.dtype):
        return data.t().clone()
    padding = padded(data.shape[0]) - data.shape[0]
    codes = torch.nn.functional.pad(data.view(torch.uint8).t(), (0, padding))
    return codes.contiguous().view(data.dtype)


@_dialect("joined(Tensor[] parts) -> Tensor", _fake_joined)
def joined(parts: list[Tensor]) -> Tensor:
    """FP8 matrices [M, K₁], [M, K₂], ... side by side: [M, K₁ + K₂ + ...], contiguous."""
    return torch.cat([part.view(torch.uint8) for part in parts], 1).view(parts[0].dtype)


@_dialect("as_bytes(Tensor data) -> Tensor", _fake_as_bytes)
def as_bytes(data: Tensor) -> Tensor:
    """FP8 codes as the bytes that they are, which operators outside the dialect take."""
    return data.view(torch.uint8).clone()


@_dialect("as_codes(Tensor data, str format) -> Tensor", _fake_as_codes)
def as_codes(data: Tensor, format: str) -> Tensor:
    """Bytes as the FP8 codes of `format` that they are: `as_bytes` undone."""
    dtype = FORMATS[format].dtype
    assert dtype is not None
    return data.view(dtype).clone()


@_dialect(
    "scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, "
    "ScalarType out_dtype, bool fast_accumulation, str a_quantization, str b_quantization) "
    "-> Tensor",
    _fake_scaled_mm,
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
    """Return `dequantize(a) @ dequantize(b).T + bias`, rounded once to `out_dtype`.

    `a` [M, K] and `b` [N, K] are row-major, contracted over their last dimension; returns [M, N]
    in `out_dtype`. Operands in a lossless format are multiplied as they are (`aten.mm`). With
    `fast_accumulation` tensor cores may keep 14 bits of the running sum (`accumulation.py`).
    """
    if not is_fp8(a.dtype):
        return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())
    operands = (a, a_scale, parse(a_quantization)), (b, b_scale, parse(b_quantization))
    if any(how.is_in_groups for _, _, how in operands):
        left, right = (dequantize([x], s, str(how), torch.float32) for x, s, how in operands)
        product = left @ right.t()
    else:  # the scales of rows are factors of the sum
        product = accumulation.product(a, b, fast=fast_accumulation) * (a_scale * b_scale.t())
    return (product if bias is None else product + bias.float()).to(out_dtype)


@_dialect("padded_ends(Tensor offsets) -> Tensor", _fake_padded_ends)
def padded_ends(offsets: Tensor) -> Tensor:
    """Where the segments of experts end, int32 [E], in codes that `transpose_segments` gives."""
    return ends_of_padded(offsets)


@_dialect("segment_amax(Tensor amaxes, Tensor offsets) -> Tensor", _fake_segment_amax, reduces=True)
def segment_amax(amaxes: Tensor, offsets: Tensor) -> Tensor:
    """The largest of the rows' amaxes [T, 1] in each segment, as fp32 [E, 1]; 0 of no rows.

    NaN where one of the segment's is.
    """
    none = amaxes.new_zeros(1, 1)
    segments = (torch.cat([none, amaxes[rows]]) for rows in slices_of(offsets))
    return torch.stack([segment.amax(0) for segment in segments])


@_dialect(
    "transpose_segments(Tensor x, Tensor scales, Tensor offsets, str format, Tensor? rows=None) "
    "-> Tensor",
    _fake_transpose_segments,
)
def transpose_segments(
    x: Tensor, scales: Tensor, offsets: Tensor, format: str, rows: Tensor | None = None
) -> Tensor:
    """`x` [T, K] coded with one scale for each segment [E, 1], to be contracted over its rows.

    With `rows` [T] it is these rows of `x`, which may have any number. Returns [K, T'], contiguous,
    with zeros behind each segment (`padded_ends`) and behind them all.
    """
    fmt = FORMATS[format]
    assert fmt.dtype is not None
    x = x if rows is None else x[rows]
    length = padded_length(len(x), len(offsets))
    codes = x.new_zeros((x.shape[1], length), dtype=torch.uint8).view(fmt.dtype)
    places = slices_of(ends_of_padded(offsets))
    for own, place, scale in zip(slices_of(offsets), places, scales, strict=True):
        coded = encode(x[own].float() * scale.reciprocal(), fmt)
        codes[:, place.start : place.start + len(coded)] = coded.t()
    return codes


@_dialect(
    "scaled_grouped_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, "
    "ScalarType out_dtype, bool fast_accumulation=False) -> Tensor",
    _fake_scaled_grouped_mm,
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
    """Each segment of rows times the matrix of its expert: `(a·a_scale)[e] @ (b·b_scale)[e].T`.

    `a` [T, K] and `b` [E·N, K], the experts' matrices one below the other, are row-major and have a
    scale for each row, [T, 1] and [E·N, 1]. Accumulated as in `scaled_mm` and rounded once, to
    [T, N] in `out_dtype`. Rows that are nobody's are zero here, and hold anything on a GPU.
    """
    experts = len(offsets)
    product = a.new_zeros((len(a), len(b) // experts), dtype=out_dtype)
    matrices = zip(slices_of(offsets), b.chunk(experts), b_scale.chunk(experts), strict=True)
    for rows, matrix, scale in matrices:
        own = accumulation.product(a[rows], matrix, fast=fast_accumulation)
        product[rows] = (own * (a_scale[rows] * scale.t())).to(out_dtype)
    return product


@_dialect(
    "scaled_grouped_outer(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor ends, "
    "ScalarType out_dtype, bool fast_accumulation=False) -> Tensor",
    _fake_scaled_grouped_outer,
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
    """A product for each segment, contracted over its rows: `(a·a_scale)[e] @ (b·b_scale)[e].T`.

    `a` [M, T'] and `b` [N, T'] are from `transpose_segments`, with a scale for each segment,
    [E, 1]; `ends` are its `padded_ends`. Accumulated as in `scaled_mm` and rounded once, to
    [E, M, N] in `out_dtype`.
    """
    products = [
        accumulation.product(a[:, s], b[:, s], fast=fast_accumulation) for s in slices_of(ends)
    ]
    return (torch.stack(products) * (a_scale * b_scale).unsqueeze(-1)).to(out_dtype)


@_dialect("mask_format(Tensor x, str format, bool inner, bool outer) -> Tensor", _fake_mask_format)
def mask_format(x: Tensor, format: str, inner: bool, outer: bool) -> Tensor:
    """`x` as numbers of a simulated format, in its own dtype and layout (FP8 and back 3.2)."""
    return masked(x, simulated_format(format), inner, outer)
