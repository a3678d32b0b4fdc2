"""Triton functions of the fused update, beside those of `codegen/prelude.py`."""

from __future__ import annotations

from fp8pass.codegen.prelude import Instructions, assembled
from fp8pass.ops import SMALLEST_SCALE
from fp8pass.optim.rounding import FIRST_FACTOR, FOLDED_FACTORS, SECOND_FACTOR, SUCCESSOR_FACTOR

_INSTRUCTIONS = {
    "log2_of_magnitude": Instructions(
        "{ .reg .f32 y; abs.f32 y, $1; lg2.approx.ftz.f32 $0, y; }",
        f"tl.log2(tl.where(tl.abs(x) < {SMALLEST_SCALE!r}, 0.0, tl.abs(x)))",
    ),
    "root": Instructions("sqrt.approx.ftz.f32 $0, $1;", "tl.sqrt(x)"),
    # In [0, 1], and 0 where it is NaN.
    "saturated": Instructions("mul.sat.f32 $0, $1, 0f3F800000;", "tl.where(x > 0, x, 0.0)"),
    "with_sign": Instructions(
        "lop3.b32 $0, $1, $2, 0x80000000, 0xF8;",
        "(x.to(tl.int32, bitcast=True) | of & -2147483648).to(tl.float32, bitcast=True)",
        parameters="x, of",
        registers="=f,f,r",
    ),
    "widened": Instructions(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
        "x.to(tl.float32)",
        registers="=r,=r,r",
        pack=2,
    ),
}

_REST = """
@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def mix(x):
    x = (x ^ (x >> 16 & 0xFFFF)) * {first}
    x = (x ^ (x >> 15 & 0x1FFFF)) * {second}
    return x ^ (x >> 16 & 0xFFFF)


@triton.jit
def folded(x, FACTOR: tl.constexpr):
    product = x.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32) ^ product.to(tl.uint32)


# Neighbours share a hash, also of the compiled instructions: one thread has both.
@triton.jit
def random_bits(key, element):
    x = (key ^ (element >> 1)).to(tl.uint32, bitcast=True)
    x = folded(folded(x, {folds[0]}), {folds[1]})
    successor = x * {successor}
    x = tl.where((element & 1) == 0, x, successor >> 16 | successor << 16)
    return x.to(tl.int32, bitcast=True)


@triton.jit
def stochastic(x, bits):
    moved = bits_of(x) + (bits & 0xFFFF)
    moved = tl.where(tl.abs(x) < float("inf"), moved, bits_of(x))
    return (moved >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


# FACTOR makes the format's subnormal numbers those of fp32, so that codes are the upper bits of
# numbers, and the others are what rounding decides about.
@triton.jit
def dithered(x, bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    noise = bits.to(tl.uint32, bitcast=True) >> (32 - SHIFT)
    return (bits_of(saturated(x * FACTOR)) + noise.to(tl.int32)) >> SHIFT


# Newton's iteration from what the exponent alone says, off by an eighth: three leave 1e-7 of normal
# numbers up to 2^126. The unit for reciprocals is the one that the update waits for.
@triton.jit
def one_over(x):
    y = (0x7EF311C7 - bits_of(x)).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        y = y * (2.0 - x * y)
    return tl.where(x > {largest_divisor!r}, 0.0, y)


# Positive numbers are ordered as their bits are, with NaN above infinity.
@triton.jit
def largest_of(x):
    return tl.max(bits_of(x), 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up(x):
    return (bits_of(x) + 0xFFFF & -65536).to(tl.float32, bitcast=True)


@triton.jit
def of_groups(x, amax, ZERO: tl.constexpr, not_finite):
    return tl.where(amax == ZERO, 1.0, tl.where(amax < float("inf"), x, not_finite))


@triton.jit
def address(table, ALIGNED: tl.constexpr, ELEMENT: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer

"""


def functions() -> str:
    """The source of all."""
    return assembled(_INSTRUCTIONS) + _REST.format(
        first=FIRST_FACTOR,
        second=SECOND_FACTOR,
        folds=FOLDED_FACTORS,
        successor=SUCCESSOR_FACTOR,
        largest_divisor=2.0**126,
    )
