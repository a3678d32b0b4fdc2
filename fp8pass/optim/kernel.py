"""The Triton source of the fused update: one kernel for all parameters of a group.

A program updates a chunk of one parameter: it reads codes, scales, gradient and weights once, does
in fp32 what `update.py` does, finds the new scales of its groups in registers, and writes. Where
everything lies it reads from tables of pointers. Formats and dtypes are written into the source;
numbers that change between steps are read from memory, so that nothing is compiled twice and CUDA
graphs can replay it.
"""

from __future__ import annotations

import math
import textwrap
from functools import cache
from typing import Any

import torch

from fp8pass import compat
from fp8pass.codegen.triton_ops import PRELUDE
from fp8pass.ops import SMALLEST_SCALE
from fp8pass.optim.formats import StateFormat
from fp8pass.optim.groups import MAX_POWER, MIN_POWER, SPARE
from fp8pass.optim.options import Storage
from fp8pass.optim.rounding import (
    FIRST_FACTOR,
    FOLDED_FACTORS,
    SECOND_FACTOR,
    SUCCESSOR_FACTOR,
)

# Elements of a program.
CHUNK = 2048
NUM_WARPS = 4
# Columns of the table of pointers, beside those of states.
PARAMETER, GRADIENT = "parameter", "gradient"

_TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.uint8: "tl.uint8",
}

# What Triton makes of these takes care of denormals, is a library function, or takes numbers out of
# registers twice: two to twenty instructions for one, and the update would wait for them instead of
# for memory. The hardware's own are off by 2^-22. Of each: instructions, registers of results and
# operands, the type of results, and how many elements it takes at a time. Triton's interpreter has
# no assembly.
_FAST = {
    "log2": ("{ .reg .f32 y; abs.f32 y, $1; lg2.approx.ftz.f32 $0, y; }", "=f,f", "float32", 1),
    "exp2": ("ex2.approx.ftz.f32 $0, $1;", "=f,f", "float32", 1),
    "root": ("sqrt.approx.ftz.f32 $0, $1;", "=f,f", "float32", 1),
    "reciprocal": ("rcp.approx.ftz.f32 $0, $1;", "=f,f", "float32", 1),
    # Two by one, which takes as long as eight products.
    "reciprocals": (
        "{ .reg .f32 y; mul.f32 y, $2, $3; rcp.approx.ftz.f32 y, y;"
        " mul.f32 $0, y, $3; mul.f32 $1, y, $2; }",
        "=f,=f,f,f",
        "float32",
        2,
    ),
    # In [0, 1], and 0 where it is NaN.
    "saturated": ("mul.sat.f32 $0, $1, 0f3F800000;", "=f,f", "float32", 1),
    "with_sign": ("lop3.b32 $0, $1, $2, 0x80000000, 0xF8;", "=f,f,r", "float32", 1),
    "bytes_of": (
        " ".join(f"prmt.b32 ${i}, $4, 0, 0x444{i};" for i in range(4)),
        "=r,=r,=r,=r,r",
        "int32",
        4,
    ),
    "widened": ("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", "float32", 2),
}
_ASSEMBLY = """tl.inline_asm_elementwise(
        "{}", "{}", [{operands}], dtype=tl.{}, is_pure=True, pack={}
    )"""
_INTERPRETED = {
    "log2": f"tl.log2(tl.where(tl.abs(x) < {SMALLEST_SCALE!r}, 0.0, tl.abs(x)))",
    "exp2": "tl.exp2(x)",
    "root": "tl.sqrt(x)",
    "reciprocal": "1.0 / x",
    "reciprocals": "1.0 / x",
    "saturated": "tl.where(x > 0, x, 0.0)",
    "with_sign": "(x.to(tl.int32, bitcast=True) | of & -2147483648).to(tl.float32, bitcast=True)",
    "bytes_of": "x.to(tl.int32)",
    "widened": "x.to(tl.float32)",
}
_FUNCTION = """
@triton.jit
def {name}({operands}):
    return {value}

"""

_HELPERS = """
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


# Zero times a number hides none that is not finite, whose bits the sum may spoil.
@triton.jit
def stochastic(x, bits):
    moved = (bits_of(x) + (bits & 0xFFFF)).to(tl.float32, bitcast=True)
    return (bits_of(x * 0.0 + moved) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


# FACTOR makes the format's subnormal numbers those of fp32, so that codes are the upper bits of
# numbers, and the others are what rounding decides about.
@triton.jit
def dithered(x, bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    noise = bits.to(tl.uint32, bitcast=True) >> (32 - SHIFT)
    return (bits_of(saturated(x * FACTOR)) + noise.to(tl.int32)) >> SHIFT


# Positive numbers are ordered as their bits are, with NaN above infinity.
@triton.jit
def largest_of(x):
    return tl.max(bits_of(x), 1).to(tl.float32, bitcast=True)


# Through shared memory: loads of scattered numbers are slow.
@triton.jit
def looked_up(table, codes):
    values = tl.load(table + tl.arange(0, 256))
    flat = tl.reshape(codes, [codes.numel])
    return tl.reshape(tl.gather(values, flat, 0), codes.shape)


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

_KERNEL = """
@triton.jit(do_not_specialize=["count", "seed"])
def adamw(
    tables, gradients, sizes, numbers, steps, factors, control, parameter_of, first_chunk,
    exp_avg_table, exp_avg_bounds, exp_avg_sq_table, exp_avg_sq_bounds,
    count, seed, complement1, beta2, complement2, eps, ALIGNED: tl.constexpr,
):
    if tl.load(control + 1) != 0.0:
        return
    chunk = tl.program_id(0)
    number = tl.load(parameter_of + chunk)
    size = tl.load(sizes + number)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    begin = (chunk - tl.load(first_chunk + number)).to(tl.int64) * {chunk}
    row = tl.arange(0, {rows})
    place = row[:, None] * {group} + tl.arange(0, {group})[None, :]
    left = tl.minimum(size - begin, {chunk}).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    there = place < left
    any_there = row * {group} < left
    table = tables + number * {columns}
    beta1 = 1.0 - complement1
{body}
"""

_UPDATE = """
factor = tl.load(control)
exp_avg = exp_avg + (complement1 * factor) * gradient
scaled = (root(complement2) * factor) * gradient
exp_avg_sq = exp_avg_sq + scaled * scaled
decay = tl.load(factors + number)
rate = tl.load(factors + count + number)
correction = tl.load(factors + 2 * count + number)
# What is divided by has a product of two that is not zero.
least = tl.maximum(eps, {least!r})
step = exp_avg * reciprocals(root(exp_avg_sq) * correction + least)
{weights} = {weights} * decay - rate * step
"""

_READ_SCALE = "{x}_scale = tl.load({x}_scale_at, any_there, other=1.0).to(tl.float32){decay}"
# scale · (code / middle)^(1/k), with all that a group shares in the exponent.
_ROOT = """
{x}_codes = bytes_of(tl.load({x}_at, there, other={zero}))
{x}_inverse = reciprocal(tl.load({x}_power_at, any_there, other=1.0).to(tl.float32))
{x} = looked_up({x}_table, {x}_codes) * {x}_inverse[:, None] + log2({x}_scale)[:, None]
{x} = exp2({x})
"""

# Numbers below fp32's normal ones do not count, and are zero in a group of their like.
_AMAX = """
{x}_amax = largest_of(tl.abs({x}))
{x}_amax = tl.where({x}_amax < {tiny!r}, 0.0, {x}_amax)
"""
_PLAIN_SCALE = """
{x}_scale = rounded_up(largest({x}_amax * {per_max!r}, {tiny!r}))
{x}_scale = of_groups({x}_scale, {x}_amax, 0.0, float("nan"))
{x}_coded = {x} * tl.where({x}_amax == 0, 0.0, tl.div_rn(1.0, {x}_scale))[:, None]
"""
# middle · (|x| / scale)^k likewise. The log of zero is in no minimum: it times zero is NaN.
_EXPANSION = """
{x}_log = log2({x})
{x}_high = tl.reduce({x}_log, 1, largest)
{x}_finite = {x}_log * 0.0 + {x}_log
{x}_low = largest(tl.min({x}_finite, 1), {x}_high - {longest!r})
{x}_scale = exp2(({x}_high + {x}_low) * 0.5)
{x}_scale = of_groups({x}_scale, {x}_high, float("-inf"), float("nan"))
{x}_scale = {x}_scale.to(tl.bfloat16).to(tl.float32)
{x}_center = log2({x}_scale)
{x}_reach = largest({x}_high - {x}_center, {x}_center - {x}_low)
{x}_power = truncated(smallest({half_span!r} * reciprocal({x}_reach), {max_power!r}))
{x}_power = of_groups({x}_power, {x}_high, float("-inf"), 1.0)
{x}_offset = ({log2_middle!r} - {x}_power * {x}_center)[:, None]
tl.store({x}_power_at, {x}_power.to(tl.bfloat16), any_there)
"""
_SIGNED_CODES = (
    "{x}_coded = with_sign(exp2({x}_log * {x}_power[:, None] + {x}_offset), bits_of({x}))"
)
# Zero remains NaN, and nothing else becomes zero.
_UNSIGNED_CODES = """
{x}_coded = {x}_finite * {x}_power[:, None] + {x}_offset
{x}_coded = exp2(largest({x}_coded, {log2_min!r}))
"""
_DRAW = """
key = mix(mix(mix(seed) + tl.load(numbers + number)) + tl.load(steps + number).to(tl.int32))
bits = random_bits(key, begin.to(tl.int32) + place)
"""
_SEARCH = """
{x}_code = tl.zeros({x}_coded.shape, tl.int32)
for bit in tl.static_range(8):
    {x}_probe = {x}_code + (128 >> bit)
    {x}_code = tl.where(tl.load({x}_bounds + {x}_probe - 1) < {x}_coded, {x}_probe, {x}_code)
tl.store({x}_at, {x}_code.to(tl.uint8), there)
"""

# What a state is multiplied with as it is read.
_DECAYS = {"exp_avg": " * beta1", "exp_avg_sq": " * beta2", "master": ""}
# What is added to roots at least: the product of two denominators is a normal number.
SMALLEST_ADDEND = 2.0**-62


class Writer:
    """Writes the kernel of parameters and gradients of some dtype, stored in one way."""

    def __init__(self, storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> None:
        self.states = storage.states(parameter)
        self.columns = table_columns(storage, parameter)
        self.dtypes = {PARAMETER: parameter, GRADIENT: gradient}
        self.stochastic = storage.rounds_weights(parameter)
        self.draws = self.stochastic or storage.second.dithers
        self.group_size = storage.group_size
        self.lines: list[str] = []

    def write(self) -> str:
        """The Triton module."""
        weights = "master" if "master" in self.states else PARAMETER
        self._locate(PARAMETER, self.dtypes[PARAMETER])
        self._locate(GRADIENT, self.dtypes[GRADIENT])
        self._load(GRADIENT)
        for name, format in self.states.items():
            self._read(name, format)
        if weights == PARAMETER:
            self._load(PARAMETER)
        self._add(_UPDATE, weights=weights, least=SMALLEST_ADDEND)
        if self.draws:
            self._add(_DRAW)
        # In the order in which the fewest registers wait: random bits are not for first moments.
        self._store_parameter(weights)
        for name, format in reversed(self.states.items()):
            self._write_state(name, format)
        helpers = _functions() + _HELPERS.format(
            first=FIRST_FACTOR,
            second=SECOND_FACTOR,
            folds=FOLDED_FACTORS,
            successor=SUCCESSOR_FACTOR,
        )
        body = textwrap.indent("\n".join(self.lines), "    ")
        return (
            PRELUDE
            + helpers
            + _KERNEL.format(
                chunk=CHUNK,
                rows=CHUNK // self.group_size,
                group=self.group_size,
                columns=len(self.columns),
                body=body,
            )
        )

    def _add(self, template: str, **names: Any) -> None:
        self.lines += template.format(**names).strip().splitlines()

    def _locate(self, name: str, dtype: torch.dtype) -> None:
        where = "gradients + number" if name == GRADIENT else f"table + {self.columns[name]}"
        pointer = f"address({where}, ALIGNED, {_TYPES[dtype]})"
        self.lines.append(f"{name}_at = {pointer} + begin + place")

    def _load(self, name: str) -> None:
        value = f"tl.load({name}_at, there, other=0.0)"
        bf16 = self.dtypes.get(name) == torch.bfloat16
        value = f"widened({value})" if bf16 else f"{value}.to(tl.float32)"
        self.lines.append(f"{name} = {value}")

    def _read(self, x: str, format: StateFormat) -> None:
        """A state, and a moment times its beta."""
        self._locate(x, format.stored)
        decay = _DECAYS[x]
        if not format.grouped:
            self._load(x)
            self.lines.append(f"{x} = {x}{decay}")
            return
        for part in format.parts:
            where = f"table + {self.columns[f'{x}_{part}']}"
            pointer = f"address({where}, False, tl.bfloat16)"
            self.lines.append(f"{x}_{part}_at = {pointer} + begin // {self.group_size} + row")
        self._add(_READ_SCALE, x=x, decay=decay)
        if format.expands:
            self._add(_ROOT, x=x, zero=format.zero)
            if format.signed:
                sign = f"{x}_codes - {format.zero}" if format.values else f"{x}_codes << 24"
                self.lines.append(f"{x} = with_sign({x}, {sign})")
            return
        codes = f"tl.load({x}_at, there, other={format.zero})"
        if format.values:
            self.lines.append(f"{x} = looked_up({x}_table, bytes_of({codes}))")
        else:
            self.lines.append(
                f"{x} = {codes}.to({_TYPES[format.dtype]}, bitcast=True).to(tl.float32)"
            )
        self.lines.append(f"{x} = {x} * {x}_scale[:, None]")

    def _write_state(self, x: str, format: StateFormat) -> None:
        if not format.grouped:
            self._store(x, x, format.dtype)
            return
        numbers = {
            "per_max": 1 / format.max,
            "tiny": SMALLEST_SCALE,
            "log2_middle": math.log2(format.middle),
            "log2_min": math.log2(format.min),
            "half_span": format.span / 2 - SPARE,
            "longest": format.span / MIN_POWER,
            "max_power": MAX_POWER,
        }
        if format.expands:
            self._add(_EXPANSION, x=x, **numbers)
            self._add(_SIGNED_CODES if format.signed else _UNSIGNED_CODES, x=x, **numbers)
        else:
            self._add(_AMAX + _PLAIN_SCALE, x=x, **numbers)
            if not format.signed:
                self.lines.append(f"{x}_coded = smallest({x}_coded, {format.max!r})")
                least = f"largest({x}_coded, {format.min!r})"
                self.lines.append(f"{x}_coded = tl.where({x}_coded > 0, {least}, {x}_coded)")
        self.lines.append(f"tl.store({x}_scale_at, {x}_scale.to(tl.bfloat16), any_there)")
        if format.values:
            self._add(_SEARCH, x=x)
        elif format.dithers:
            code = f"dithered({x}_coded, bits, {_alignment(format)})"
            bits = f"tl.uint{8 * format.dtype.itemsize}"
            self._store(x, f"{code}.to({bits})", format.stored, bitcast=True)
        else:
            # Nothing that is rounded to nearest exceeds the largest code.
            code = f"{x}_coded.to({_TYPES[format.dtype]})"
            self._store(x, code, format.stored, bitcast=True)

    def _store_parameter(self, weights: str) -> None:
        value = f"stochastic({weights}, bits)" if self.stochastic else weights
        self._store(PARAMETER, value, self.dtypes[PARAMETER])

    def _store(self, name: str, value: str, dtype: torch.dtype, *, bitcast: bool = False) -> None:
        value = f"{value}.to({_TYPES[dtype]}, bitcast={bitcast})"
        self.lines.append(f"tl.store({name}_at, {value}, there)")


def table_columns(storage: Storage, parameter: torch.dtype) -> dict[str, int]:
    """What the table of pointers has of each parameter, and in which column."""
    names = [PARAMETER]
    for name, format in storage.states(parameter).items():
        names += [name, *(f"{name}_{part}" for part in format.parts)]
    return {name: i for i, name in enumerate(names)}


def _alignment(format: StateFormat) -> str:
    """What makes codes of a float format the upper bits of fp32 numbers: a factor, and a shift."""
    fp32 = torch.finfo(torch.float32)
    smallest_normal = format.min * 2**format.mantissa
    shift = -round(math.log2(fp32.eps)) - format.mantissa
    return f"{fp32.tiny / smallest_normal!r}, {shift}"


def _functions() -> str:
    """The functions of elements, as the GPU's instructions unless there is no GPU."""
    import triton

    found = []
    for name, instructions in _FAST.items():
        operands = "x, of" if name == "with_sign" else "x"
        value = _INTERPRETED[name]
        if not triton.knobs.runtime.interpret:
            value = _ASSEMBLY.format(*instructions, operands=operands)
        found.append(_FUNCTION.format(name=name, operands=operands, value=value))
    return "".join(found)


@cache
def kernel(storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> Any:
    """The Triton function that updates parameters of a dtype by gradients of a dtype."""
    return compat.load_source(Writer(storage, parameter, gradient).write()).adamw
