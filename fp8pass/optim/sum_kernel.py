"""Triton kernels that add gradients to quantized sums, and such sums to gradients (`sums.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS, SMALLEST_SCALE
from fp8pass.dialect.triton_functions import largest
from fp8pass.optim.formats import EXPONENT_BITS, Quantized, StateFormat
from fp8pass.optim.rounding import (
    FIRST_FACTOR,
    FOLDED_FACTORS,
    SECOND_FACTOR,
    SumStamp,
    wrap_to_int32,
)

GROUP_SIZE = 128
# Groups of a program: each thread has eight numbers.
GROUPS, WARPS = 8, 4

_MIXING, _MIXING_AGAIN = tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
_FOLDING, _FOLDING_AGAIN = map(tl.constexpr, FOLDED_FACTORS)
_EXPONENT, _BITS = tl.constexpr(EXPONENT_BITS), tl.constexpr(BF16_BITS)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _mix(x):
    """Hash int32, as `rounding.mix` does."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _MIXING
    x = (x ^ (x >> 15 & 0x1FFFF)) * _MIXING_AGAIN
    return x ^ (x >> 16 & 0xFFFF)


@triton.jit
def _fold(x, FACTOR: tl.constexpr):
    """Return the exclusive or of the halves of a 64-bit product."""
    factor = tl.full((1, 1), FACTOR, tl.uint32)
    return tl.umulhi(x, factor) ^ (x * factor)


@triton.jit
def _random_bits(key, element):
    """Return the same bits as `rounding.random_bits`."""
    x = key.to(tl.uint32, bitcast=True) + (element >> 1).to(tl.uint32)
    x = _fold(_fold(x, _FOLDING), _FOLDING_AGAIN)
    return tl.where(element & 1 == 0, x, (x >> 16) | (x << 16))


@triton.jit
def _round(x, bits, MANTISSA: tl.constexpr, MIN: tl.constexpr):
    """Round stochastically to the numbers of a float format, as `formats.quantize` does."""
    magnitude = tl.abs(x)
    binade = (magnitude.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    step = tl.maximum(binade * 2.0**-MANTISSA, MIN)
    noise = (bits >> (9 + MANTISSA)).to(tl.float32) * 2.0 ** (MANTISSA - 23)
    rounded = tl.floor(tl.div_rn(magnitude, step) + noise) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit(do_not_specialize=["seed", "number", "count", "first"])
def _add_to(
    gradient, codes, scales, seed, number, step, count, first, length,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, BEGUN: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * GROUPS
    group = begin + tl.arange(0, GROUPS)
    element = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there, of_sum = element < length, group * SIZE < length
    x = tl.load(gradient + element, there, other=0.0).to(tl.float32)
    if BEGUN:
        scale = tl.load(scales + group, of_sum, other=0.0).to(tl.float32)
        x += tl.load(codes + element, of_sum[:, None], other=0.0).to(tl.float32) * scale[:, None]
    amax = tl.reduce(tl.abs(x), 1, largest)
    amax = tl.where(amax < _SMALLEST, 0.0, amax)
    x = tl.where(amax[:, None] == 0, 0.0, x)
    scale = tl.maximum(amax * (1 / MAX), _SMALLEST)
    scale = (scale.to(tl.int32, bitcast=True) + 0xFFFF & _BITS).to(tl.float32, bitcast=True)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    scale = tl.where(amax == 0, 1.0, scale)
    coded = x * tl.div_rn(1.0, scale)[:, None]
    key = _mix(_mix(_mix(seed) + number) + tl.load(step).to(tl.int32))
    bits = _random_bits(_mix(key + count), first + element)
    coded = _round(coded, bits, MANTISSA, MIN)
    coded = tl.minimum(tl.maximum(coded, -MAX), MAX)
    tl.store(codes + element, coded.to(codes.dtype.element_ty), of_sum[:, None])
    tl.store(scales + group, scale.to(tl.bfloat16), of_sum)


@triton.jit
def _add_from(gradient, codes, scales, length, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * GROUPS
    group = begin + tl.arange(0, GROUPS)
    element = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there = element < length
    scale = tl.load(scales + group, group * SIZE < length, other=0.0).to(tl.float32)
    sum_ = tl.load(codes + element, there, other=0.0).to(tl.float32) * scale[:, None]
    x = tl.load(gradient + element, there, other=0.0).to(tl.float32) + sum_
    tl.store(gradient + element, x.to(gradient.dtype.element_ty), there)


def add_to(
    sum_: Quantized, gradient: Tensor, format: StateFormat, stamp: SumStamp, first: int
) -> None:
    """Run `sums.add_to` for formats whose codes are floats."""
    data, scales, _ = sum_
    with _device(gradient):
        _add_to[_grid(gradient)](
            gradient, data.view(format.dtype), scales,
            wrap_to_int32(stamp.seed), stamp.number, stamp.step, stamp.count, first, len(gradient),
            SIZE=GROUP_SIZE, GROUPS=GROUPS, BEGUN=stamp.count > 1,
            MAX=format.max, MIN=format.min, MANTISSA=format.mantissa, num_warps=WARPS,
        )  # fmt: skip


def add_from(sum_: Quantized, gradient: Tensor, format: StateFormat) -> None:
    """Run `sums.add_from` for formats whose codes are floats."""
    data, scales, _ = sum_
    with _device(gradient):
        _add_from[_grid(gradient)](
            gradient, data.view(format.dtype), scales, len(gradient),
            SIZE=GROUP_SIZE, GROUPS=GROUPS, num_warps=WARPS,
        )  # fmt: skip


def _grid(gradient: Tensor) -> tuple[int]:
    return (triton.cdiv(len(gradient), GROUP_SIZE * GROUPS),)


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
