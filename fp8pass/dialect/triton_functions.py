"""Triton functions of single numbers, which kernels call: `scaling.py` as kernels compute it."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.scaling import EXPONENT_BITS, MANTISSA_BITS, SMALLEST_SCALE

STEP, SMALLEST = tl.constexpr(1 / E4M3.max), tl.constexpr(SMALLEST_SCALE)
EXPONENT, MANTISSA = tl.constexpr(EXPONENT_BITS), tl.constexpr(MANTISSA_BITS)


@triton.jit
def largest(a, b):
    """The larger one; NaN if one is, which Triton's own maximum drops."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotient_of(amax):
    """`scaling.quotient_of` in E4M3."""
    return largest(amax * STEP, SMALLEST)


@triton.jit
def scale_of(amax):
    """`scaling.scale_of` in E4M3."""
    x = quotient_of(amax)
    power_of_two = (x.to(tl.int32, bitcast=True) + MANTISSA & EXPONENT).to(tl.float32, bitcast=True)
    return tl.where(x < float("inf"), power_of_two, x)
