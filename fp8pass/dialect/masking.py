"""Simulate a number format by masking (section 3.2 of the paper "FP8 and back").

Masking clears the mantissa bits that the format lacks, which rounds magnitudes down. It lowers
larger magnitudes to the largest number of the format. It raises smaller magnitudes to the smallest
normal number, because a simulated format has no denormals. Values are not scaled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8pass.dialect.encoding import shift_left
from fp8pass.dialect.formats import Format

# Limits of fp32. The 16-bit `MASKED_DTYPES` are within these limits.
FP32_MANTISSA = 23
LEAST_EXPONENT, LARGEST_EXPONENT = -126, 127
MASKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mask(x: Tensor, fmt: Format, inner: bool, outer: bool) -> Tensor:
    """Mask `x` to the format `fmt`, in the dtype of `x`. NaN, Inf and zeros do not change.

    `inner` raises nonzero magnitudes to the smallest normal number, and `outer` lowers finite
    magnitudes to the largest number.
    """
    value = _round_to_dtype(x)
    cut = (value.view(torch.int32) & -(1 << FP32_MANTISSA - fmt.mantissa)).view(torch.float32)
    if outer and clamps_outside(fmt):
        limit = largest(fmt, x.dtype)
        cut = cut.where(cut.isinf(), cut.clamp(-limit, limit))
    if inner and clamps_inside(fmt):
        least = 2.0**fmt.min_exponent
        signed = torch.where(value < 0, value.new_full((), -least), value.new_full((), least))
        cut = signed.where((cut.abs() < least) & (value != 0), cut)
    return value.where(value.isnan(), cut).to(x.dtype)


def _round_to_dtype(x: Tensor) -> Tensor:
    """Return `x` as fp32, rounded to the dtype of `x`.

    Inductor computes 16-bit values in fp32, and rounds them only if their bits are read. Without
    rounding, an fp32 number just below a power of two would be masked to the next smaller number of
    the format, although its 16-bit value is the power of two.
    """
    if x.dtype is torch.float32:
        return x
    bits = x.view(torch.int16).int()
    if x.dtype is torch.bfloat16:  # its bits are the upper half of an fp32 number
        return shift_left(bits, 16).view(torch.float32)
    # The casts to int32 and back separate the two views, because Inductor removes successive views.
    return bits.to(torch.int16).view(x.dtype).float()


def clamps_outside(fmt: Format) -> bool:
    """Whether fp32 has larger exponents than `fmt`."""
    return fmt.max_exponent < LARGEST_EXPONENT


def clamps_inside(fmt: Format) -> bool:
    """Whether fp32 has smaller exponents than `fmt`."""
    return fmt.min_exponent > LEAST_EXPONENT


def largest(fmt: Format, dtype: torch.dtype) -> float:
    """Return the largest number of `fmt` that fits into the mantissa bits of `dtype`."""
    step = torch.finfo(dtype).eps * 2.0**fmt.max_exponent
    return math.floor(fmt.max / step) * step


def is_identity(fmt: Format, dtype: torch.dtype) -> bool:
    """Whether masking to `fmt` leaves every number of `dtype` unchanged."""
    has_mantissa = 2.0**-fmt.mantissa <= torch.finfo(dtype).eps
    return has_mantissa and not clamps_inside(fmt) and not clamps_outside(fmt)
