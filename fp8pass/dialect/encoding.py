"""Convert fp32 numbers to a format and back, and pack several elements into a byte.

Formats that PyTorch cannot cast to, e.g. E2M1, are converted with integer arithmetic on the bits of
fp32 (23 mantissa bits, exponent bias 127) and fp16 numbers (10 bits, bias 15).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.dialect.formats import FORMATS, Format

# FP8 tensor cores require that the length of a contraction is a multiple of this number.
CONTRACTION_MULTIPLE = 16


def padded_size(size: Any) -> Any:
    return compat.ceil_div(size, CONTRACTION_MULTIPLE) * CONTRACTION_MULTIPLE


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether FP8 tensor cores multiply matrices of this dtype."""
    return any(f.multiplies and f.dtype is dtype for f in FORMATS.values())


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Round fp32 `x` to `fmt`, with ties to even. The caller has divided `x` by its scale.

    The result has the dtype of the format. For an emulated format it is int32 and contains the bits
    of each element. Magnitudes above `fmt.max` become `fmt.max`. NaN stays NaN, or becomes 0 in an
    emulated format without NaN.
    """
    clamped = x.clamp(-fmt.max, fmt.max)
    if not fmt.emulated:
        assert fmt.dtype is not None
        return clamped.to(fmt.dtype)
    magnitude = clamped.abs()
    is_denormal = magnitude < 2.0**fmt.min_exponent
    bits = torch.where(is_denormal, _denormal_bits(magnitude, fmt), _normal_bits(magnitude, fmt))
    sign = shift_right(clamped.view(torch.int32), 32 - fmt.bits) & (1 << fmt.bits - 1)
    # `masked_fill` would not preserve the layout: Inductor decomposes it into a contiguous copy.
    return torch.where(clamped.isnan(), fmt.nan, bits | sign)


def _normal_bits(magnitude: Tensor, fmt: Format) -> Tensor:
    bits, dropped = magnitude.view(torch.int32), 23 - fmt.mantissa
    # Add half a step minus 1. If the last remaining bit is 1, add 1 more, so that ties go to even.
    odd = shift_right(bits, dropped) & 1
    rounded = bits + odd + ((1 << dropped - 1) - 1)
    rebias = (127 - (1 - fmt.min_exponent)) << fmt.mantissa
    return shift_right(rounded, dropped) - rebias


def _denormal_bits(magnitude: Tensor, fmt: Format) -> Tensor:
    """Add a power of two, so that the lowest bit of the fp32 sum is one step of the denormals."""
    exponent = 23 - fmt.mantissa + fmt.min_exponent
    return (magnitude + 2.0**exponent).view(torch.int32) - (127 + exponent << 23)


def decode(data: Tensor, fmt: Format) -> Tensor:
    """Return the fp32 values of elements that `encode` or `unpack` returned.

    The bits of an emulated format become an fp16 number. A multiplication by a power of two then
    corrects the exponent bias. Denormals convert exactly, because fp16 has denormals, too.
    """
    if not fmt.emulated:
        return data.float()
    bits = data.int()
    magnitude = bits & (1 << fmt.bits - 1) - 1
    sign = shift_left(bits, 16 - fmt.bits) & (1 << 15)
    digits = sign | shift_left(magnitude, 10 - fmt.mantissa)
    half = digits.to(torch.int16).view(torch.float16)
    values = half.float() * 2.0 ** (14 + fmt.min_exponent)
    return torch.where(magnitude == fmt.nan, torch.nan, values) if fmt.nan else values


def split_groups(x: Tensor, group_size: int, parts: int) -> list[Tensor]:
    """Cut groups of G elements of `x` [..., K] into consecutive parts [..., K / G, G / parts]."""
    if parts == 1:
        return [x.unflatten(-1, (-1, group_size))]
    groups = x.unflatten(-1, (-1, parts, group_size // parts))
    return [groups.select(-2, i) for i in range(parts)]


def pack(parts: Sequence[Tensor], fmt: Format, plane: int) -> Tensor:
    """Pack the w bits that each element has in `plane`. Return uint8 [..., K / G, G·w/8].

    `parts` are the bits of all elements, int32, in the 8/w parts of `split_groups`.
    """
    offset, width = sum(fmt.planes[:plane]), fmt.planes[plane]
    is_last = offset + width == fmt.bits
    fields = (shift_right(part, offset) for part in parts)
    masked = (field if is_last else field & (1 << width) - 1 for field in fields)
    shifted = (shift_left(field, i * width) for i, field in enumerate(masked))
    return reduce(torch.bitwise_or, shifted).to(torch.uint8)


def unpack(planes: Sequence[Tensor], fmt: Format, group_size: int) -> Tensor:
    """Combine all planes into the bits of each element, int32 [..., K / G, G]."""
    fields, offset = [], 0
    for data, width in zip(planes, fmt.planes, strict=True):
        groups = data.int().unflatten(-1, (-1, group_size * width // 8)).unsqueeze(-2)
        shifts = torch.arange(0, 8, width, dtype=torch.int32, device=data.device).unsqueeze(-1)
        parts = torch.bitwise_right_shift(groups, shifts) & (1 << width) - 1
        fields.append(shift_left(parts.flatten(-2), offset))
        offset += width
    return reduce(torch.bitwise_or, fields)


def shift_right(x: Tensor, count: int) -> Tensor:
    return torch.bitwise_right_shift(x, count) if count else x


def shift_left(x: Tensor, count: int) -> Tensor:
    return torch.bitwise_left_shift(x, count) if count else x
