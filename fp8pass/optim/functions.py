"""Triton functions of the fused update, beside those of `codegen/prelude.py`."""

from __future__ import annotations

from fp8pass.codegen.prelude import Instructions, assembled
from fp8pass.ops import SMALLEST_SCALE
from fp8pass.optim.rounding import FIRST_FACTOR, FOLDED_FACTORS, SECOND_FACTOR

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
    # The halves of a product of 64 bits, one upon the other.
    "folded": Instructions(
        "{ .reg .b64 product; .reg .b32 low, high; mul.wide.u32 product, $1, $2;"
        " mov.b64 {low, high}, product; xor.b32 $0, low, high; }",
        "((x.to(tl.uint32, bitcast=True).to(tl.uint64) * factor >> 32).to(tl.uint32)"
        " ^ x.to(tl.uint32, bitcast=True) * factor).to(tl.int32, bitcast=True)",
        parameters="x, factor",
        registers="=r,r,r",
        dtype="int32",
    ),
    # NaN would wrap around: nothing is added to it.
    "stochastic": Instructions(
        "{ .reg .pred p, q; .reg .b32 a, b, c, d;"
        " setp.num.f32 p, $1, $1; setp.num.f32 q, $2, $2;"
        " mov.b32 a, $1; mov.b32 b, $2; and.b32 c, $3, 0xFFFF; and.b32 d, $4, 0xFFFF;"
        " @p add.u32 a, a, c; @q add.u32 b, b, d; prmt.b32 $0, a, b, 0x7632; }",
        "((bits_of(x) + tl.where(x == x, bits & 0xFFFF, 0)) >> 16)"
        ".to(tl.int16).to(tl.bfloat16, bitcast=True)",
        parameters="x, bits",
        registers="=r,f,f,r,r",
        dtype="bfloat16",
        pack=2,
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


# A hash for two neighbours, as it is and with its halves exchanged; joined, it is taken once.
@triton.jit
def random_bits(key, pair):
    x = key + pair
    x = folded(folded(x, {folds[0]}), {folds[1]})
    exchanged = x << 16 | x >> 16 & 0xFFFF
    return tl.reshape(tl.join(x, exchanged), (x.shape[0], x.shape[1], 2 * x.shape[2]))


# FACTOR makes the format's subnormal numbers those of fp32, so that codes are the upper bits of
# numbers, and the others are what rounding decides about.
@triton.jit
def dithered(x, bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    noise = bits.to(tl.uint32, bitcast=True) >> (32 - SHIFT)
    return (bits_of(saturated(x * FACTOR)) + noise.to(tl.int32)) >> SHIFT


# From what the exponent alone says, off by a sixteenth, two of Newton's steps, with constants that
# make the largest error small: 1.1e-6. The unit for reciprocals is what the update waits for.
@triton.jit
def one_over(x):
    x = smallest(x, {largest_divisor!r})
    y = (0x7EF311D5 - bits_of(x)).to(tl.float32, bitcast=True)
    y = y * (2.0013129 - x * y)
    return y * (2.0000009 - x * y)


# Of the groups of a tile, [rows, 2, half of a group].
@triton.jit
def highest(x):
    return tl.reduce(tl.reduce(x, 1, largest), 1, largest)


@triton.jit
def lowest(x):
    return tl.min(tl.min(x, 1), 1)


@triton.jit
def rounded_up(x):
    return (bits_of(x) + 0xFFFF & -65536).to(tl.float32, bitcast=True)


@triton.jit
def of_groups(x, amax, ZERO: tl.constexpr, not_finite):
    return tl.where(amax == ZERO, 1.0, tl.where(amax < float("inf"), x, not_finite))


# Accesses are of eight elements or of 16 bytes, so that codes lie in registers as numbers do.
@triton.jit
def address(table, ALIGNED: tl.constexpr, ELEMENT: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, min(ELEMENT.primitive_bitwidth, 16)) if ALIGNED else pointer

"""


def functions() -> str:
    """The source of all."""
    return assembled(_INSTRUCTIONS) + _REST.format(
        first=FIRST_FACTOR,
        second=SECOND_FACTOR,
        folds=FOLDED_FACTORS,
        largest_divisor=2.0**126,
    )
