"""The functions of `scaling.py` in Triton, for handwritten kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.scaling import EXPONENT_MASK, MANTISSA_MASK, SMALLEST_SCALE

STEP, SMALLEST = tl.constexpr(1 / E4M3.max), tl.constexpr(SMALLEST_SCALE)
EXPONENT, MANTISSA = tl.constexpr(EXPONENT_MASK), tl.constexpr(MANTISSA_MASK)


@triton.jit
def largest(a, b):
    """Return the maximum. Unlike Triton's default, propagate NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotient_of(amax):
    """Compute `scaling.amax_quotient` in E4M3."""
    return largest(amax * STEP, SMALLEST)


@triton.jit
def scale_of(amax):
    """Compute `scaling.operand_scale` in E4M3."""
    x = quotient_of(amax)
    power_of_two = (x.to(tl.int32, bitcast=True) + MANTISSA & EXPONENT).to(tl.float32, bitcast=True)
    return tl.where(x < float("inf"), power_of_two, x)
