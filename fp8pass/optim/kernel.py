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
from fp8pass.codegen.prelude import prelude
from fp8pass.ops import SMALLEST_SCALE
from fp8pass.optim.formats import StateFormat
from fp8pass.optim.groups import MAX_POWER, MIN_POWER
from fp8pass.optim.options import Storage
from fp8pass.optim.rounding import FIRST_FACTOR, SECOND_FACTOR

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

# What Triton makes of these takes care of denormals, or is a library function: three to twenty
# instructions for one, and the update would wait for them instead of for memory. The hardware's
# own are off by 2^-22. Triton's interpreter has no assembly.
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

_HELPERS = """
@triton.jit
def mix(x):
    x = (x ^ (x >> 16 & 0xFFFF)) * {first}
    x = (x ^ (x >> 15 & 0x1FFFF)) * {second}
    return x ^ (x >> 16 & 0xFFFF)


@triton.jit
def stochastic(x, bits):
    rounded = x.to(tl.int32, bitcast=True) + (bits & 0xFFFF) & -65536
    return tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def dithered(x, bits, PER_BINADE: tl.constexpr, LEAST: tl.constexpr):
    noise = (bits >> 9 & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    moved = x + noise * tl.maximum(binade * PER_BINADE, LEAST)
    return tl.where(x > 0, largest(moved, LEAST), x)


# Positive numbers are ordered as their bits are, with NaN above infinity.
@triton.jit
def largest_of(x):
    return tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def smallest_of(x):
    return tl.min(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up(x):
    return (x.to(tl.int32, bitcast=True) + 0xFFFF & -65536).to(tl.float32, bitcast=True)


@triton.jit
def of_groups(x, amax, not_finite):
    return tl.where(amax == 0, 1.0, tl.where(amax < float("inf"), x, not_finite))


@triton.jit
def with_sign(x, of):
    signs = of.to(tl.int32, bitcast=True) & -2147483648
    return (x.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)


@triton.jit
def address(table, ALIGNED: tl.constexpr, ELEMENT: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer

"""

_KERNEL = """
@triton.jit(do_not_specialize=["count", "seed"])
def adamw(
    tables, sizes, numbers, steps, factors, control, parameter_of, first_chunk,
    exp_avg_values, exp_avg_bounds, exp_avg_sq_values, exp_avg_sq_bounds,
    count, seed, complement1, beta2, complement2, eps, ALIGNED: tl.constexpr,
):
    if tl.load(control + 1) != 0.0:
        return
    chunk = tl.program_id(0)
    number = tl.load(parameter_of + chunk)
    size = tl.load(sizes + number)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    row = (chunk - tl.load(first_chunk + number)).to(tl.int64) * {rows} + tl.arange(0, {rows})
    element = row[:, None] * {group} + tl.arange(0, {group})[None, :]
    there = element < size
    any_there = row * {group} < size
    table = tables + number
{body}
"""

_UPDATE = """
gradient = gradient * tl.load(control)
exp_avg = exp_avg + complement1 * (gradient - exp_avg)
exp_avg_sq = exp_avg_sq * beta2 + complement2 * gradient * gradient
decay = tl.load(factors + number)
rate = tl.load(factors + count + number)
correction = tl.load(factors + 2 * count + number)
step = rate * (exp_avg * reciprocal(root(exp_avg_sq) * correction + eps))
{weights} = {weights} * decay - step
"""

_READ_SCALE = "{x}_scale = tl.load({x}_scale_at, any_there, other=1.0).to(tl.float32)"
# scale · (code / middle)^(1/k), with all that a group shares in the exponent.
_ROOT = """
{x}_inverse = reciprocal(tl.load({x}_power_at, any_there, other=1.0).to(tl.float32))
{x}_offset = log2({x}_scale) - {x}_inverse * {log2_middle!r}
{x}_root = exp2(log2(tl.abs({x})) * {x}_inverse[:, None] + {x}_offset[:, None])
"""

# Numbers below fp32's normal ones do not count, and are zero in a group of their like.
_AMAX = """
{x}_amax = largest_of(tl.abs({x}))
{x}_amax = tl.where({x}_amax < {tiny!r}, 0.0, {x}_amax)
"""
_PLAIN_SCALE = """
{x}_scale = rounded_up(largest({x}_amax * {per_max!r}, {tiny!r}))
{x}_scale = of_groups({x}_scale, {x}_amax, float("nan"))
{x}_coded = {x} * tl.where({x}_amax == 0, 0.0, tl.div_rn(1.0, {x}_scale))[:, None]
"""
# middle · (|x| / scale)^k likewise.
_EXPANSION = """
{x}_high = log2({x}_amax)
{x}_low = smallest_of(tl.where(tl.abs({x}) < {tiny!r}, float("inf"), tl.abs({x})))
{x}_low = largest(log2({x}_low), {x}_high - {longest!r})
{x}_scale = of_groups(exp2(({x}_high + {x}_low) * 0.5), {x}_amax, float("nan"))
{x}_scale = {x}_scale.to(tl.bfloat16).to(tl.float32)
{x}_center = log2({x}_scale)
{x}_reach = largest({x}_high - {x}_center, {x}_center - {x}_low)
{x}_power = truncated(smallest({half_span!r} * reciprocal({x}_reach), {max_power!r}))
{x}_power = of_groups({x}_power, {x}_amax, 1.0)
{x}_offset = {log2_middle!r} - {x}_power * {x}_center
{x}_offset = tl.where({x}_amax == 0, float("-inf"), {x}_offset)
{x}_coded = exp2(log2(tl.abs({x})) * {x}_power[:, None] + {x}_offset[:, None])
tl.store({x}_power_at, {x}_power.to(tl.bfloat16), any_there)
"""
_DRAW = """
key = mix(mix(mix(seed) + tl.load(numbers + number)) + tl.load(steps + number).to(tl.int32))
bits = mix(element.to(tl.int32) ^ key)
"""
_SEARCH = """
{x}_code = tl.zeros({x}_coded.shape, tl.int32)
for bit in tl.static_range(8):
    {x}_probe = {x}_code + (128 >> bit)
    {x}_code = tl.where(tl.load({x}_bounds + {x}_probe - 1) < {x}_coded, {x}_probe, {x}_code)
tl.store({x}_at, {x}_code.to(tl.uint8), there)
"""


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
        self._add(_UPDATE, weights=weights)
        if self.draws:
            self._add(_DRAW)
        for name, format in self.states.items():
            self._write_state(name, format)
        self._store_parameter(weights)
        helpers = _functions() + _HELPERS.format(first=FIRST_FACTOR, second=SECOND_FACTOR)
        body = textwrap.indent("\n".join(self.lines), "    ")
        rows = CHUNK // self.group_size
        return prelude() + helpers + _KERNEL.format(rows=rows, group=self.group_size, body=body)

    def _add(self, template: str, **names: Any) -> None:
        self.lines += template.format(**names).strip().splitlines()

    def _locate(self, name: str, dtype: torch.dtype) -> None:
        where = f"table + {self.columns[name]} * count"
        self.lines.append(f"{name}_at = address({where}, ALIGNED, {_TYPES[dtype]}) + element")

    def _load(self, name: str) -> None:
        self.lines.append(f"{name} = tl.load({name}_at, there, other=0.0).to(tl.float32)")

    def _read(self, x: str, format: StateFormat) -> None:
        self._locate(x, format.dtype)
        if not format.grouped:
            self._load(x)
            return
        if format.values:
            codes = f"tl.load({x}_at, there, other=0).to(tl.int32)"
            self.lines.append(f"{x} = tl.where(there, tl.load({x}_values + {codes}), 0.0)")
        else:
            self._load(x)
        for part in format.parts:
            where = f"table + {self.columns[f'{x}_{part}']} * count"
            self.lines.append(f"{x}_{part}_at = address({where}, False, tl.bfloat16) + row")
        self._add(_READ_SCALE, x=x)
        if format.expands:
            self._add(_ROOT, x=x, log2_middle=math.log2(format.middle))
            root = f"with_sign({x}_root, {x})" if format.signed else f"{x}_root"
            self.lines.append(f"{x} = {root}")
        else:
            self.lines.append(f"{x} = {x} * {x}_scale[:, None]")

    def _write_state(self, x: str, format: StateFormat) -> None:
        if not format.grouped:
            self._store(x, x, format.dtype)
            return
        self._add(_AMAX, x=x, tiny=SMALLEST_SCALE)
        numbers = {
            "per_max": 1 / format.max,
            "tiny": SMALLEST_SCALE,
            "log2_middle": math.log2(format.middle),
            "half_span": format.span / 2,
            "longest": format.span / MIN_POWER,
            "max_power": MAX_POWER,
        }
        self._add(_EXPANSION if format.expands else _PLAIN_SCALE, x=x, **numbers)
        if format.expands and format.signed:
            self.lines.append(f"{x}_coded = with_sign({x}_coded, {x})")
        self.lines.append(f"tl.store({x}_scale_at, {x}_scale.to(tl.bfloat16), any_there)")
        if format.dithers:
            widths = f"{2.0**-format.mantissa!r}, {format.min!r}"
            self.lines.append(f"{x}_coded = dithered({x}_coded, bits, {widths})")
            if format.dtype == torch.float16:  # conversions to FP8 saturate
                self.lines.append(f"{x}_coded = smallest({x}_coded, {format.max!r})")
        elif not format.signed:
            least = f"largest({x}_coded, {format.min!r})"
            self.lines.append(f"{x}_coded = tl.where({x}_coded > 0, {least}, {x}_coded)")
        if format.values:
            self._add(_SEARCH, x=x)
            return
        # Nothing that is rounded to nearest exceeds the largest code.
        self._store(x, f"{x}_coded", format.dtype)

    def _store_parameter(self, weights: str) -> None:
        if self.stochastic:
            self.lines.append(f"{weights} = stochastic({weights}, bits)")
        self._store(PARAMETER, weights, self.dtypes[PARAMETER])

    def _store(self, name: str, value: str, dtype: torch.dtype) -> None:
        self.lines.append(f"tl.store({name}_at, {value}.to({_TYPES[dtype]}), there)")


def table_columns(storage: Storage, parameter: torch.dtype) -> dict[str, int]:
    """What the table of pointers has of each parameter, and in which column."""
    names = [PARAMETER, GRADIENT]
    for name, format in storage.states(parameter).items():
        names += [name, *(f"{name}_{part}" for part in format.parts)]
    return {name: i for i, name in enumerate(names)}


def _functions() -> str:
    """The functions of one number, as the GPU's instructions unless there is no GPU."""
    import triton

    values = {name: _ASSEMBLY.format(instruction) for name, instruction in _FAST.items()}
    if triton.knobs.runtime.interpret:
        values = _INTERPRETED
    return "".join(_FUNCTION.format(name=name, value=value) for name, value in values.items())


@cache
def kernel(storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> Any:
    """The Triton function that updates parameters of a dtype by gradients of a dtype."""
    return compat.load_source(Writer(storage, parameter, gradient).write()).adamw
