"""Triton kernels for `sums.py`: add gradients to quantized sums, and sums to gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS, EXPONENT_MASK, SMALLEST_SCALE
from fp8pass.dialect.triton_scaling import largest
from fp8pass.optim.rounding import (
    FIRST_FACTOR,
    FOLDED_FACTORS,
    SECOND_FACTOR,
    SumStamp,
    wrap_to_int32,
)
from fp8pass.optim.state_formats import SUM_GROUP_SIZE, Quantized, StateFormat

# Each thread has eight elements.
SUM_GROUPS, WARPS = 8, 4

_MIX_1, _MIX_2 = tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
_FOLD_1, _FOLD_2 = map(tl.constexpr, FOLDED_FACTORS)
_EXPONENT, _BITS = tl.constexpr(EXPONENT_MASK), tl.constexpr(BF16_BITS)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16 & 0xFFFF)) * _MIX_1
    x = (x ^ (x >> 15 & 0x1FFFF)) * _MIX_2
    return x ^ (x >> 16 & 0xFFFF)


@triton.jit
def _fold(x, FACTOR: tl.constexpr):
    """Return the exclusive or of the halves of the 64-bit product."""
    factor = tl.full((1, 1), FACTOR, tl.uint32)
    return tl.umulhi(x, factor) ^ (x * factor)


@triton.jit
def _random_bits(key, element):
    x = key.to(tl.uint32, bitcast=True) + (element >> 1).to(tl.uint32)
    x = _fold(_fold(x, _FOLD_1), _FOLD_2)
    return tl.where(element & 1 == 0, x, (x >> 16) | (x << 16))


@triton.jit
def _round(x, bits, MANTISSA: tl.constexpr, MIN: tl.constexpr):
    """Round stochastically, as `state_formats.quantize` does."""
    magnitude = tl.abs(x)
    binade = (magnitude.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    step = tl.maximum(binade * 2.0**-MANTISSA, MIN)
    noise = (bits >> (9 + MANTISSA)).to(tl.float32) * 2.0 ** (MANTISSA - 23)
    rounded = tl.floor(tl.div_rn(magnitude, step) + noise) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit(do_not_specialize=["seed", "number", "count", "first"])
def _add_to(
    gradient, data, scales, seed, number, step, count, first, length,
    SIZE: tl.constexpr, SUM_GROUPS: tl.constexpr, HAS_SUM: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * SUM_GROUPS
    group = begin + tl.arange(0, SUM_GROUPS)
    element = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there, of_sum = element < length, group * SIZE < length
    x = tl.load(gradient + element, there, other=0.0).to(tl.float32)
    if HAS_SUM:
        scale = tl.load(scales + group, of_sum, other=0.0).to(tl.float32)
        x += tl.load(data + element, of_sum[:, None], other=0.0).to(tl.float32) * scale[:, None]
    amax = tl.reduce(tl.abs(x), 1, largest)
    amax = tl.where(amax < _SMALLEST, 0.0, amax)
    x = tl.where(amax[:, None] == 0, 0.0, x)
    scale = tl.maximum(amax * (1 / MAX), _SMALLEST)
    scale = (scale.to(tl.int32, bitcast=True) + 0xFFFF & _BITS).to(tl.float32, bitcast=True)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    scale = tl.where(amax == 0, 1.0, scale)
    scaled = x * tl.div_rn(1.0, scale)[:, None]
    key = _mix(_mix(_mix(seed) + number) + tl.load(step).to(tl.int32))
    bits = _random_bits(_mix(key + count), first + element)
    scaled = _round(scaled, bits, MANTISSA, MIN)
    scaled = tl.minimum(tl.maximum(scaled, -MAX), MAX)
    tl.store(data + element, scaled.to(data.dtype.element_ty), of_sum[:, None])
    tl.store(scales + group, scale.to(tl.bfloat16), of_sum)


@triton.jit
def _add_from(gradient, data, scales, length, SIZE: tl.constexpr, SUM_GROUPS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SUM_GROUPS
    group = begin + tl.arange(0, SUM_GROUPS)
    element = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there = element < length
    scale = tl.load(scales + group, group * SIZE < length, other=0.0).to(tl.float32)
    sum_ = tl.load(data + element, there, other=0.0).to(tl.float32) * scale[:, None]
    x = tl.load(gradient + element, there, other=0.0).to(tl.float32) + sum_
    tl.store(gradient + element, x.to(gradient.dtype.element_ty), there)


def add_to(
    sum_: Quantized, gradient: Tensor, format: StateFormat, stamp: SumStamp, first: int
) -> None:
    """Run `sums.add_to` for float formats."""
    numbers = (wrap_to_int32(stamp.seed), stamp.number, stamp.step, stamp.count, first)
    limits = {"MAX": format.max, "MIN": format.min, "MANTISSA": format.mantissa}
    _launch(_add_to, gradient, sum_, format, *numbers, HAS_SUM=stamp.count > 1, **limits)


def add_from(sum_: Quantized, gradient: Tensor, format: StateFormat) -> None:
    """Run `sums.add_from` for float formats."""
    _launch(_add_from, gradient, sum_, format)


def _launch(
    kernel: Any,
    gradient: Tensor,
    sum_: Quantized,
    format: StateFormat,
    *numbers: Any,
    **options: Any,
) -> None:
    grid = (triton.cdiv(len(gradient), SUM_GROUP_SIZE * SUM_GROUPS),)
    tensors = (gradient, sum_.data.view(format.dtype), sum_.scale)
    options |= {"SIZE": SUM_GROUP_SIZE, "SUM_GROUPS": SUM_GROUPS, "num_warps": WARPS}
    with torch.cuda.device_of(gradient):
        kernel[grid](*tensors, *numbers, len(gradient), **options)
