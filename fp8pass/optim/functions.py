"""Triton functions of the fused update, in addition to those of `codegen/kernels/prelude.py`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fp8pass.codegen.kernels.prelude import Instructions, assembled
from fp8pass.dialect.scaling import SMALLEST_SCALE
from fp8pass.optim.groups import DIGITS
from fp8pass.optim.rounding import FIRST_FACTOR, FOLDED_FACTORS, SECOND_FACTOR


class Axes(NamedTuple):
    """The order of a tile's axes: rows, which are groups, and parts of groups.

    Attributes:
        each_row, each_part: index that broadcasts values of rows or parts to a tile, in Triton.
        part: the number of the axis of parts.
    """

    each_row: str
    each_part: str
    part: int


@cache
def axes() -> Axes:
    """The order of axes for which each thread has elements of all parts.

    Triton distributes threads along the axis with the longest vectors first. The other two have no
    vectors; until 3.6 Triton takes the first of them next, since then the last.
    """
    import triton

    first, second = "[:, None, None]", "[None, :, None]"
    until_3_6 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return Axes(first, second, 1) if until_3_6 else Axes(second, first, 0)


class Quotient(NamedTuple):
    """Constants of `quotient`, and its first approximation of the reciprocal of one."""

    magic: int
    linear: float
    constant: float
    of_one: float


QUOTIENT = Quotient(0x7EF34000, 1.500971, 0.7490293, 0.9501953125)

_INSTRUCTIONS = {
    "log2_of_magnitude": Instructions(
        "{ .reg .f32 y; abs.f32 y, $1; lg2.approx.ftz.f32 $0, y; }",
        f"tl.log2(tl.where(tl.abs(x) < {SMALLEST_SCALE!r}, 0.0, tl.abs(x)))",
    ),
    "root": Instructions("sqrt.approx.ftz.f32 $0, $1;", "tl.sqrt(x)"),
    # Clamped to [0, 1]; NaN becomes 0.
    "saturated": Instructions("mul.sat.f32 $0, $1, 0f3F800000;", "tl.where(x > 0, x, 0.0)"),
    "with_sign": Instructions(
        "lop3.b32 $0, $1, $2, 0x80000000, 0xF8;",
        "(x.to(tl.int32, bitcast=True) | of & -2147483648).to(tl.float32, bitcast=True)",
        parameters="x, of",
        registers="=f,f,r",
    ),
    # The xor of the two halves of a 64-bit product.
    "folded": Instructions(
        "{ .reg .b64 product; .reg .b32 low, high; mul.wide.u32 product, $1, $2;"
        " mov.b64 {low, high}, product; xor.b32 $0, low, high; }",
        "((x.to(tl.uint32, bitcast=True).to(tl.uint64) * factor >> 32).to(tl.uint32)"
        " ^ x.to(tl.uint32, bitcast=True) * factor).to(tl.int32, bitcast=True)",
        parameters="x, factor",
        registers="=r,r,r",
        dtype="int32",
    ),
    # Rounded by the upper halves of `bits`. NaN would wrap around: a pair with a NaN is truncated.
    "stochastic": Instructions(
        "{ .reg .pred nan; .reg .b32 a, b, c, d, e, f; setp.nan.f32 nan, $1, $2;"
        " mov.b32 a, $1; mov.b32 b, $2; shr.u32 c, $3, 16; shr.u32 d, $4, 16;"
        " add.u32 e, a, c; add.u32 f, b, d; prmt.b32 $0, e, f, 0x7632;"
        " @nan prmt.b32 $0, a, b, 0x7632; }",
        "((bits_of(x) + tl.where(x == x, bits >> 16 & 0xFFFF, 0)) >> 16)"
        ".to(tl.int16).to(tl.bfloat16, bitcast=True)",
        parameters="x, bits",
        registers="=r,f,f,r,r",
        dtype="bfloat16",
        pack=2,
    ),
    # The byte at `shift` in the upper half of each number.
    "upper_bytes": Instructions(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x7632; prmt.b32 b, $3, $4, 0x7632;"
        " shr.u32 a, a, $5; shr.u32 b, b, $5; prmt.b32 $0, a, b, 0x6420; }",
        "(x >> 16 + shift).to(tl.uint8)",
        parameters="x, shift",
        registers="=r,r,r,r,r,r,r,r,r",
        dtype="uint8",
        pack=4,
    ),
    # The same number, which the compiler cannot know to be the same.
    "unknown": Instructions("mov.b32 $0, $1;", "x", registers="=r,r", dtype="int32"),
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


# Two neighbours share a hash, which is computed once; its halves are exchanged for the second. The
# second result is the first one with its halves exchanged.
@triton.jit
def random_bits(key, pair):
    x = key + pair
    x = folded(folded(x, {folds[0]}), {folds[1]})
    exchanged = x << 16 | x >> 16 & 0xFFFF
    return neighbours(x, exchanged), neighbours(exchanged, x)


@triton.jit
def neighbours(a, b):
    return tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * a.shape[2]))


@triton.jit
def uniform(bits):
    return (bits >> 9 & 0x7FFFFF).to(tl.float32) * {uniform_step!r}


# FACTOR maps the format's subnormal numbers to those of fp32, so that the bits of a number from
# SHIFT on are its code, and the bits below decide about rounding.
@triton.jit
def dithered(x, bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    noise = bits.to(tl.uint32, bitcast=True) >> (32 - SHIFT)
    return bits_of(saturated(x * FACTOR)) + noise.to(tl.int32)


# As `dithered`, but rounded to nearest, ties to even.
@triton.jit
def nearest(x, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    found = bits_of(saturated(x * FACTOR))
    return found + (found >> SHIFT & 1) + ((1 << SHIFT - 1) - 1)


# Negating the exponent gives the reciprocal up to a twentieth; a step with these constants reduces
# the error to 3.3e-5. The hardware's reciprocal unit would be the bottleneck of the update.
@triton.jit
def quotient(x, y, linear, constant):
    inverse = ({magic} - bits_of(y)).to(tl.float32, bitcast=True)
    error = linear - y * inverse
    return x * inverse * (error * error + constant)


# The largest and smallest number of each group of a tile.
@triton.jit
def highest(x):
    return tl.reduce(tl.reduce(x, {part}, largest), 1, largest)


@triton.jit
def lowest(x):
    return tl.min(tl.min(x, {part}), 1)


@triton.jit
def rounded_up(x):
    return (bits_of(x) + 0xFFFF & -65536).to(tl.float32, bitcast=True)


@triton.jit
def of_groups(x, amax, ZERO: tl.constexpr, not_finite):
    return tl.where(amax == ZERO, 1.0, tl.where(amax < float("inf"), x, not_finite))


# Accesses are of eight elements or of 16 bytes, so that codes have the register layout of numbers.
@triton.jit
def address(table, ALIGNED: tl.constexpr, ELEMENT: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, min(ELEMENT.primitive_bitwidth, 16)) if ALIGNED else pointer

"""


def functions() -> str:
    """The source of all functions."""
    return assembled(_INSTRUCTIONS) + _REST.format(
        first=FIRST_FACTOR,
        second=SECOND_FACTOR,
        folds=FOLDED_FACTORS,
        uniform_step=2.0**-DIGITS,
        magic=QUOTIENT.magic,
        part=axes().part,
    )
