"""Codes of a format, by plain PyTorch: the reference of all that is generated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.dialect.formats import FORMATS, Format

# FP8 tensor cores take contractions in multiples of this many elements.
CONTRACTION_MULTIPLE = 16


def padded(rows: Any) -> Any:
    """`rows` rounded up to a contraction length that FP8 tensor cores take."""
    return compat.ceil_div(rows, CONTRACTION_MULTIPLE) * CONTRACTION_MULTIPLE


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one that FP8 tensor cores multiply."""
    return any(f.multiplies and f.dtype is dtype for f in FORMATS.values())


def encode(x: Tensor, fmt: Format) -> Tensor:
    """fp32 `x`, already divided by its scale, rounded to the nearest code of `fmt`, ties to even.

    One code an element. Magnitudes beyond `fmt.max`, which only rounding can cause, become
    `fmt.max`; NaN stays NaN, or becomes 0 in a format that has none.
    """
    assert fmt.dtype is not None
    clamped = x.clamp(-fmt.max, fmt.max)
    return _code_points(clamped, fmt) if fmt.emulated else clamped.to(fmt.dtype)


def _code_points(x: Tensor, fmt: Format) -> Tensor:
    """Codes as numbers: the steps between 0 and |x|, of which every binade has 2^mantissa."""
    exponent = ((x.abs().view(torch.int32) >> 23) - 127).clamp_min(fmt.min_exponent)
    steps = torch.ldexp(x.abs(), fmt.mantissa - exponent).nan_to_num().round().int()
    code = steps + ((exponent - fmt.min_exponent) << fmt.mantissa)
    code |= x.signbit().int() << fmt.bits - 1
    return torch.where(x.isnan(), fmt.nan, code).to(torch.uint8)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The fp32 values of codes, one an element."""
    if not fmt.emulated:
        return codes.float()
    magnitude = codes.int() & (1 << fmt.bits - 1) - 1
    # Denormals, which have no leading one, are in the steps of the first binade.
    binade = (magnitude >> fmt.mantissa).clamp_min(1) - 1
    steps = magnitude - (binade << fmt.mantissa)
    values = torch.ldexp(steps.float(), binade + fmt.min_exponent - fmt.mantissa)
    if fmt.nan:
        values = torch.where(magnitude == fmt.nan, torch.nan, values)
    return torch.where(codes >> fmt.bits - 1 == 1, -values, values)


def pack(codes: Tensor, fmt: Format, plane: int) -> Tensor:
    """Plane `plane`, uint8 [..., K·w/8], of codes [..., K / G, G]."""
    width = fmt.planes[plane]
    fields = codes >> sum(fmt.planes[:plane]) & (1 << width) - 1
    parts = fields.unflatten(-1, (8 // width, -1)) << _shifts(width, codes.device)
    return parts.sum(-2, dtype=torch.uint8).flatten(-2)


def unpack(planes: list[Tensor], fmt: Format, group_size: int) -> Tensor:
    """Codes, uint8 [..., K / G, G], out of their planes."""
    fields, offset = [], 0
    for data, width in zip(planes, fmt.planes, strict=True):
        parts = data.unflatten(-1, (-1, 1, group_size * width // 8)) >> _shifts(width, data.device)
        fields.append((parts & (1 << width) - 1).flatten(-2) << offset)
        offset += width
    return torch.stack(fields).sum(0, dtype=torch.uint8)


def _shifts(width: int, device: torch.device) -> Tensor:
    """Where the parts of a group are in a byte, [8 / width, 1]."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device).unsqueeze(-1)
