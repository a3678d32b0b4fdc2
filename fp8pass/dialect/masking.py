"""Numbers masked to a format, by plain PyTorch: the reference of what is generated.

FP8 and back, section 3.2: mantissa bits that the format lacks are cut off, so that magnitudes are
rounded down, and magnitudes beyond those of its exponents become the largest or the smallest that
they have. Nothing is scaled, and what is between zero and the smallest normal number is none of the
format's: it becomes that number. Values of any dtype are masked as the float32 numbers that they
are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8pass.dialect.formats import Format

# float32: mantissa bits, and the exponents of its normal numbers. All dtypes that are masked have
# no more of either.
MANTISSA = 23
LEAST_EXPONENT, LARGEST_EXPONENT = -126, 127
MASKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def masked(x: Tensor, fmt: Format, inner: bool, outer: bool) -> Tensor:
    """`x` masked to a format, in its own dtype; NaN, Inf and zeros stay as they are.

    Args:
        x: bfloat16, float16 or float32.
        fmt: the format.
        inner: clamp the exponents of magnitudes below the smallest normal number.
        outer: clamp those of finite magnitudes above the largest.
    """
    value = x.float()
    kept = (value.view(torch.int32) & kept_bits(fmt)).view(torch.float32)
    if outer and clamps_outside(fmt):
        limit = largest(fmt, x.dtype)
        kept = kept.where(kept.isinf(), kept.clamp(-limit, limit))
    if inner and clamps_inside(fmt):
        least = torch.copysign(kept.new_tensor(2.0**fmt.min_exponent), value)
        kept = least.where((value != 0) & (kept.abs() < least.abs()), kept)
    return torch.empty_like(x).copy_(value.where(value.isnan(), kept))


def kept_bits(fmt: Format) -> int:
    """The bits of a float32 number that are in the format: all but the last of its mantissa."""
    return -(1 << MANTISSA - fmt.mantissa)


def clamps_outside(fmt: Format) -> bool:
    """Whether there are finite numbers beyond the largest exponent of a format."""
    return fmt.max_exponent < LARGEST_EXPONENT


def clamps_inside(fmt: Format) -> bool:
    """Whether there are normal numbers below the smallest exponent of a format."""
    return fmt.min_exponent > LEAST_EXPONENT


def largest(fmt: Format, dtype: torch.dtype) -> float:
    """The largest number of a format that a dtype has the mantissa bits for."""
    step = torch.finfo(dtype).eps * 2.0**fmt.max_exponent
    return math.floor(fmt.max / step) * step


def is_identity(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether a format holds all numbers of a dtype as they are."""
    has_mantissa = 2.0**-fmt.mantissa <= torch.finfo(dtype).eps
    return has_mantissa and not clamps_inside(fmt) and not clamps_outside(fmt)
