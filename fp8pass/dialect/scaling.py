"""Scales: how they follow from the largest magnitude of the elements that share one."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.dialect.formats import Format

# Group scales have the range of fp32 and 0.2% of rounding error, far below that of any format.
GROUP_SCALE_DTYPE = torch.bfloat16
# Below this a scale is denormal, and its reciprocal infinite.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# The bits of an fp32 number that bf16 has, and those of its exponent and its mantissa.
BF16_BITS = -1 << 16
EXPONENT_BITS, MANTISSA_BITS = 0x7F80_0000, 0x7F_FFFF


def quotient_of(amax: Tensor, fmt: Format) -> Tensor:
    """`amax / fmt.max` in fp32, kept normal so that it has a reciprocal: the scale of groups.

    It uses a format's range up to the largest value.
    """
    if fmt.lossless:
        return torch.ones_like(amax)
    return (amax * (1 / fmt.max)).clamp_min(SMALLEST_SCALE)


def scale_of(amax: Tensor, fmt: Format) -> Tensor:
    """The scale of what GEMMs multiply: `quotient_of`, rounded up to a power of two.

    What is coded again with another scale, by row and then as a whole, is not rounded again. The
    largest scale of several rows is the scale of all of them.
    """
    return power_of_two(quotient_of(amax, fmt))


def power_of_two(x: Tensor) -> Tensor:
    """fp32 `x`, positive and normal, rounded up to a power of two; what is not finite stays."""
    bits = x.view(torch.int32) + MANTISSA_BITS & EXPONENT_BITS
    return torch.where(x < torch.inf, bits.view(torch.float32), x)


def truncated(x: Tensor) -> Tensor:
    """fp32 `x` without its lowest 16 bits, so that bf16 holds it exactly.

    Group scales are truncated rather than rounded: fused code that keeps the scale in an fp32
    register must divide by the stored number.
    """
    return (x.view(torch.int32) & BF16_BITS).view(torch.float32)


def rounded_up(x: Tensor) -> Tensor:
    """fp32 `x`, positive, rounded up to what bf16 holds: divided by it nothing exceeds a format."""
    return (x.view(torch.int32) + 0xFFFF & BF16_BITS).view(torch.float32)
