"""Compute the scale of a block of elements from the largest magnitude in the block."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.dialect.formats import Format

# bf16 has the range of fp32. Its error of 0.2% is far less than the error of the elements.
GROUP_SCALE_DTYPE = torch.bfloat16
# The smallest scale. Its reciprocal must be finite in fp32.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# BF16_BITS selects the upper half of an fp32 number.
BF16_BITS = -1 << 16
EXPONENT_MASK, MANTISSA_MASK = 0x7F80_0000, 0x7F_FFFF


def amax_quotient(amax: Tensor, fmt: Format) -> Tensor:
    """Return `amax / fmt.max` in fp32, which maps `amax` to the format's largest value."""
    if fmt.lossless:
        return torch.ones_like(amax)
    return (amax * (1 / fmt.max)).clamp_min(SMALLEST_SCALE)


def operand_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale of GEMM operands: `amax_quotient`, rounded up to a power of two.

    Requantizing rows to one scale for the tensor then changes only exponents, unless numbers become
    denormal.
    """
    return round_up_to_power_of_two(amax_quotient(amax, fmt))


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Round positive, normal fp32 `x` up. Inf and NaN do not change."""
    bits = x.view(torch.int32) + MANTISSA_MASK & EXPONENT_MASK
    return torch.where(x < torch.inf, bits.view(torch.float32), x)


def truncate_to_bf16(x: Tensor) -> Tensor:
    """Clear the lowest 16 bits of fp32 `x`.

    Fused code may divide by a scale in an fp32 register, which must equal the stored bf16 scale.
    """
    return (x.view(torch.int32) & BF16_BITS).view(torch.float32)


def round_up_to_bf16(x: Tensor) -> Tensor:
    """Round fp32 `x` up to bf16. A scale that is rounded down could move quotients out of range."""
    return (x.view(torch.int32) + 0xFFFF & BF16_BITS).view(torch.float32)
