"""Triton functions that all kernels call."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fp8pass.dialect.formats import FORMATS
from fp8pass.dialect.scaling import BF16_BITS, EXPONENT_MASK, MANTISSA_MASK, SMALLEST_SCALE

# Triton's own reductions and comparisons drop NaN. `quotient_of`, `power_of_two` and `truncated`
# compute the same values as the functions in `dialect/scaling.py`.
_PRELUDE = """
import triton
import triton.language as tl


@triton.jit
def largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smallest(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite(x):
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def quotient_of(amax, step):
    return largest(amax * step, {smallest_scale!r})


@triton.jit
def power_of_two(x):
    bits = x.to(tl.int32, bitcast=True) + {mantissa_mask} & {exponent_mask}
    return tl.where(x < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def truncated(x):
    return (x.to(tl.int32, bitcast=True) & {bf16_bits}).to(tl.float32, bitcast=True)

"""

# Functions for emulated formats. Several elements of such a format may share a byte (`planes.py`).
_PACKING = """
@triton.jit
def minifloat(code, BITS: tl.constexpr, SHIFT: tl.constexpr, factor):
    SIGN: tl.constexpr = 1 << (BITS - 1)
    half = ((code & SIGN) << (16 - BITS)) | ((code & (SIGN - 1)) << SHIFT)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor


@triton.jit
def to_minifloat(
    x,
    BITS: tl.constexpr,
    DROPPED: tl.constexpr,
    REBIAS: tl.constexpr,
    most,
    least,
    shift,
    SHIFT_BITS: tl.constexpr,
):
    magnitude = tl.minimum(tl.abs(x), most)
    bits = magnitude.to(tl.int32, bitcast=True)
    odd = (bits >> DROPPED) & 1
    normal = ((bits + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED) - REBIAS
    # Adding a power of two rounds a denormal to its steps, which are then fp32's last bits.
    denormal = (magnitude + shift).to(tl.int32, bitcast=True) - SHIFT_BITS
    code = tl.where(magnitude < least, denormal, normal)
    code = code | ((x.to(tl.int32, bitcast=True) >> (32 - BITS)) & (1 << (BITS - 1)))
    return tl.where(x == x, code, 0)


@triton.jit
def pack(fields, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    parts = tl.reshape(fields, (GROUPS, 8 // WIDTH, SIZE * WIDTH // 8))
    place = tl.arange(0, 8 // WIDTH)[None, :, None] * WIDTH
    return tl.sum(parts << place, 1).to(tl.uint8)

"""

_FUNCTION = """
@triton.jit
def {name}({parameters}):
    return {value}

"""
_ASSEMBLY = """tl.inline_asm_elementwise(
        "{instructions}", "{registers}", [{parameters}], dtype=tl.{dtype}, is_pure=True, pack={pack}
    )"""


@dataclass(frozen=True)
class Instructions:
    """An elementwise Triton function in inline assembly.

    Triton's own functions take two to twenty instructions, which would limit the speed of kernels.
    The hardware's approximations have a relative error of 2^-22.
    """

    instructions: str  # PTX
    interpreted: str  # equivalent code for Triton's interpreter
    parameters: str = "x"
    registers: str = "=f,f"  # register constraints of the results, then of the parameters
    dtype: str = "float32"
    pack: int = 1  # elements per execution


def write_functions(functions: dict[str, Instructions]) -> str:
    import triton

    found = []
    for name, function in functions.items():
        value = _ASSEMBLY.format(**asdict(function))
        if triton.knobs.runtime.interpret:
            value = function.interpreted
        found.append(_FUNCTION.format(name=name, parameters=function.parameters, value=value))
    return "".join(found)


_INSTRUCTIONS = {
    "exp2": Instructions("ex2.approx.ftz.f32 $0, $1;", "tl.exp2(x)"),
    "reciprocal": Instructions("rcp.approx.ftz.f32 $0, $1;", "1.0 / x"),
    # One hardware instruction converts two values.
    "word_of": Instructions(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        " | ".join(
            f"{x}.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << {8 * i}"
            for i, x in enumerate("abcd")
        ),
        parameters="a, b, c, d",
        registers="=r,f,f,f,f",
        dtype="int32",
    ),
}
# `erf` is formula 7.1.26 of Abramowitz and Stegun, and near 0 two terms of the Taylor series. Its
# absolute error is at most 6e-7, its relative error at most 1e-5. `tl.erf` has 30 instructions
# instead of 19: with it, an H200 takes 107 µs instead of 72 for the amax of GELU's gradient in
# GPT-2.
_FUNCTIONS = """
@triton.jit
def exp(x):
    return exp2(x * 1.4426950408889634)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -1.4426950408889634))


@triton.jit
def erf(x):
    t = reciprocal(1.0 + 0.3275911 * tl.abs(x))
    p = -1.453152027 + t * 1.061405429
    p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * p)))
    y = 1.0 - p * exp2(x * x * -1.4426950408889634)
    y = tl.where(x < 0.0, -y, y)
    return tl.where(tl.abs(x) < 0.05, x * (1.1283791671 - 0.3761263890 * x * x), y)

"""


def call_quotient_of(amax: str, format: str) -> str:
    return f"quotient_of({amax}, {1 / FORMATS[format].max!r})"


def shared_source() -> str:
    scaling = _PRELUDE.format(
        smallest_scale=SMALLEST_SCALE,
        bf16_bits=BF16_BITS,
        exponent_mask=EXPONENT_MASK,
        mantissa_mask=MANTISSA_MASK,
    )
    return scaling + write_functions(_INSTRUCTIONS) + _FUNCTIONS + _PACKING
