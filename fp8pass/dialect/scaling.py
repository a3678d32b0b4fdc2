"""Scales: how they follow from the largest magnitude of the elements that share one."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.dialect.formats import Format

# bf16 has the range of fp32 and a rounding error of 0.2%, far below the error of any format.
GROUP_SCALE_DTYPE = torch.bfloat16
# A smaller scale is denormal, and its reciprocal infinite.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Masks of an fp32 number: the bits that bf16 has, the exponent and the mantissa.
BF16_BITS = -1 << 16
EXPONENT_MASK, MANTISSA_MASK = 0x7F80_0000, 0x7F_FFFF


def amax_quotient(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale of groups: `amax / fmt.max` in fp32, kept normal for its reciprocal.

    It uses a format's range up to the largest value.
    """
    if fmt.lossless:
        return torch.ones_like(amax)
    return (amax * (1 / fmt.max)).clamp_min(SMALLEST_SCALE)


def operand_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Return the scale of GEMM operands: `amax_quotient`, rounded up to a power of two.

    Requantizing with another such scale, by row and then by tensor, rounds nothing again. The
    largest scale of several rows is the scale of all of them.
    """
    return round_up_to_power_of_two(amax_quotient(amax, fmt))


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """Round fp32 `x`, positive and normal, up to a power of two; Inf and NaN stay."""
    bits = x.view(torch.int32) + MANTISSA_MASK & EXPONENT_MASK
    return torch.where(x < torch.inf, bits.view(torch.float32), x)


def truncate_to_bf16(x: Tensor) -> Tensor:
    """Clear the lowest 16 bits of fp32 `x`, so that bf16 represents it exactly.

    Group scales are truncated rather than rounded: fused code that keeps the scale in an fp32
    register must divide by the stored number.
    """
    return (x.view(torch.int32) & BF16_BITS).view(torch.float32)


def round_up_to_bf16(x: Tensor) -> Tensor:
    """Round fp32 `x`, positive, up to bf16: values divided by it do not exceed a format."""
    return (x.view(torch.int32) + 0xFFFF & BF16_BITS).view(torch.float32)
