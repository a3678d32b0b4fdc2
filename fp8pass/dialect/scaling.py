"""Compute the scale of a block of elements from the largest magnitude in the block."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.dialect.formats import Format

# bf16 has the range of fp32. Its rounding error is 0.2%, far less than the error of the elements.
GROUP_SCALE_DTYPE = torch.bfloat16
# A smaller scale would be denormal, and its reciprocal could be infinite.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Masks for the bits of an fp32 number. BF16_BITS selects the upper half, which is a bf16 number.
BF16_BITS = -1 << 16
EXPONENT_MASK, MANTISSA_MASK = 0x7F80_0000, 0x7F_FFFF


def amax_quotient(amax: Tensor, fmt: Format) -> Tensor:
    """Return `amax / fmt.max` in fp32, which maps `amax` to the format's largest value.

    The result is at least `SMALLEST_SCALE`, so that its reciprocal is finite.
    """
    if fmt.lossless:
        return torch.ones_like(amax)
    return (amax * (1 / fmt.max)).clamp_min(SMALLEST_SCALE)


def operand_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale of GEMM operands: `amax_quotient`, rounded up to a power of two.

    The backward requantizes data with a scale for each row to one scale for the whole tensor, which
    is the largest row scale. Because both scales are powers of two, this changes only exponents. It
    does not round again, unless numbers become denormal.
    """
    return round_up_to_power_of_two(amax_quotient(amax, fmt))


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Round positive, normal fp32 `x` up to a power of two; Inf and NaN do not change."""
    bits = x.view(torch.int32) + MANTISSA_MASK & EXPONENT_MASK
    return torch.where(x < torch.inf, bits.view(torch.float32), x)


def truncate_to_bf16(x: Tensor) -> Tensor:
    """Clear the lowest 16 bits of fp32 `x`, so that bf16 can represent the result exactly.

    Fused code may divide by a scale that is still in an fp32 register. After the truncation, this
    scale equals the bf16 scale that is stored for the group.
    """
    return (x.view(torch.int32) & BF16_BITS).view(torch.float32)


def round_up_to_bf16(x: Tensor) -> Tensor:
    """Round positive fp32 scales up to bf16. Rounding down could move quotients out of range."""
    return (x.view(torch.int32) + 0xFFFF & BF16_BITS).view(torch.float32)
