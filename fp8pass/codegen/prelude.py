"""Triton functions that all kernels share."""

from __future__ import annotations

# NaN must reach the user: Triton's own reductions and comparisons drop it.
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
def scale_of(amax, step, smallest_scale):
    return tl.where(amax == 0, 1.0, largest(amax * step, smallest_scale))


@triton.jit
def truncated(x):
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)

"""

# What Triton makes of these takes care of denormals, or is a library function: three to twenty
# instructions for one, and kernels would wait for them instead of for memory. The hardware's own
# are off by 2^-22. Triton's interpreter has no assembly.
_FAST = {
    "log2": "lg2.approx.ftz.f32",
    "exp2": "ex2.approx.ftz.f32",
    "root": "sqrt.approx.ftz.f32",
    "reciprocal": "rcp.approx.ftz.f32",
}
_ASSEMBLY = """tl.inline_asm_elementwise(
        "{} $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )"""
_INTERPRETED = {
    "log2": "tl.log2(x)",
    "exp2": "tl.exp2(x)",
    "root": "tl.sqrt(x)",
    "reciprocal": "1.0 / x",
}
_FUNCTION = """
@triton.jit
def {name}(x):
    return {value}

"""
_SIGMOID = """
@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -1.4426950408889634))

"""
# The codes of four values in a word: the hardware converts two values at a time.
_WORD_OF = """
@triton.jit
def word_of(a, b, c, d):
    return {value}

"""
_WORD_ASSEMBLY = """tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
    )"""
_WORD_INTERPRETED = " | ".join(
    f"{x}.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << {8 * i}"
    for i, x in enumerate("abcd")
)


def prelude() -> str:
    """What every kernel's module begins with."""
    import triton

    values = {name: _ASSEMBLY.format(instruction) for name, instruction in _FAST.items()}
    word = _WORD_ASSEMBLY
    if triton.knobs.runtime.interpret:
        values, word = _INTERPRETED, _WORD_INTERPRETED
    fast = "".join(_FUNCTION.format(name=name, value=value) for name, value in values.items())
    return _PRELUDE + fast + _SIGMOID + _WORD_OF.format(value=word)
