"""The Triton source of the fused update: one kernel for all parameters of a group.

A program updates a chunk of one parameter, tile by tile. It reads codes, scales, gradient and
weights once, computes the update of `update.py` in fp32, computes the new scales of its groups in
registers, and writes. It is one warp, which needs no synchronization, and prefetches tiles. It
reads addresses from tables of pointers. Formats and dtypes are written into the source; numbers
that change between steps are read from memory, so that the kernel is compiled once and CUDA graphs
can replay it.
"""

from __future__ import annotations

import math
import textwrap
from functools import cache
from typing import Any

import torch

from fp8pass import compat
from fp8pass.codegen.kernels.prelude import prelude
from fp8pass.dialect.scaling import SMALLEST_SCALE
from fp8pass.optim.functions import QUOTIENT, axes, functions
from fp8pass.optim.groups import MAX_POWER, MIN_POWER, SPARE
from fp8pass.optim.options import PARAMETER, Storage
from fp8pass.optim.rounding import ROTATIONS
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.update import SMALLEST_EPS

CHUNK = 16384  # elements of a program
TILE = 1024  # elements of a tile, which has at least one group
STAGES = 3  # tiles that are prefetched
MAX_PARTS = 4  # of a group; each thread has elements of all parts
# The fastest on an H200, but for longer chunks: 1% for 7B, and fewer programs for a small model
# (benchmarks/results/optimizer_sweep.json).
LAUNCH = {"num_warps": 1, "maxnreg": 168}
# A smaller rate counts as zero, so that no finite second moment gives a divisor beyond 2^126. An
# infinite one gives no finite quotient, and a group that is not finite from the next step on.
SMALLEST_RATE = 2.0**-61
GRADIENT = "gradient"

_TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.uint8: "tl.uint8",
}

_KERNEL = """
@triton.jit(do_not_specialize=["count", "seed"])
def adamw(
    tables, gradients, sizes, numbers, steps, factors, control, parameter_of, first_chunk,
    exp_avg_values, exp_avg_sq_values,
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
    # A thread has eight numbers of each part of a group: 16 bytes in BF16.
    row = tl.arange(0, {rows})
    part = tl.arange(0, {parts}){each_part}
    of_part = part * {length}
    in_tile = row{each_row} * {group} + tl.arange(0, {length})[None, None, :]
    table = tables + number * {columns}
    beta1 = 1.0 - complement1
    left = tl.minimum(size - begin, {chunk}).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
{before}
    for first in tl.range(0, left, {tile}, num_stages={stages}):
        place = first + in_tile
        there = place < left - of_part
        # Addresses of results are computed again: registers would hold those of prefetched tiles.
        result = unknown(first // {tile}) * {tile} + in_tile
        result_there = result < left - of_part
        group = first // {group} + row
        any_there = group * {group} < left
        any_next = (group + {rows}) * {group} < left
{body}
"""

_NUMBERS = """
of_first = tl.load(control) * complement1
of_second = tl.load(control) * root(complement2)
decay = tl.load(factors + number)
rate = tl.load(factors + count + number)
# Instead of correcting the root of the second moment, the inverse factor scales the other terms.
uncorrected = 1.0 / tl.load(factors + 2 * count + number)
rate = rate * uncorrected
least = tl.maximum(eps, {least!r}) * uncorrected
"""
# For a rate of zero the divisor is one, and the quotient of finite numbers zero.
_INVERSE_RATE = """
moves = tl.abs(rate) > {smallest_rate!r}
inverse_rate = tl.where(moves, 1.0 / rate, 0.0)
least = tl.where(moves, least * inverse_rate, 1.0)
linear = tl.where(moves, {linear!r}, {of_one!r})
constant = tl.where(moves, {constant!r}, 0.0)
"""
_KEY = """
key = mix(mix(seed) + tl.load(numbers + number))
key = mix(key + tl.load(steps + number).to(tl.int32)) + (begin // 2).to(tl.int32)
pair_in_tile = (row{each_row} * {parts} + part) * {pairs}
pair_in_tile += tl.arange(0, {pairs})[None, None, :]
"""
# Bits rotated by 16 come with the others; those rotated by 0 are the others.
_DRAW = "bits, rotated_16 = random_bits(key, (first // 2) + pair_in_tile)"
_ROTATE = "rotated_{by} = bits << {by} | bits >> {rest} & {mask}"

_UPDATE = """
exp_avg = exp_avg + of_first * gradient
scaled = of_second * gradient
exp_avg_sq = exp_avg_sq + scaled * scaled
"""
# The error of this quotient is below that of the codes. Its divisor includes the rate.
_STEP = """
divisor = root(exp_avg_sq) * inverse_rate + least
{weights} = {weights} * decay - quotient(exp_avg, divisor, linear, constant)
"""
_EXACT_STEP = "{weights} = {weights} * decay - rate * (exp_avg / (root(exp_avg_sq) + least))"

# Triton prefetches tiles, but no loads of less than four bytes, as those of scales and powers.
_ASK = "{x}_next = tl.load({x}_first + row, row * {group} < left, other=1.0)"
_READ = """
{x}_at = {x}_first + group
{x} = {x}_next.to(tl.float32)
{x}_next = tl.load({x}_at + {rows}, any_next, other=1.0)
"""
# scale · (code / middle)^(1/k); the exponent has the terms that are the same for a group.
_ROOT = """
{x}_inverse = reciprocal({x}_power)
{x}_offset = log2_of_magnitude({x}_scale) - {x}_inverse * {log2_middle!r}
{x}_root = exp2(log2_of_magnitude({x}) * {x}_inverse{each_row} + {x}_offset{each_row})
"""

# A group in which all numbers are subnormal in fp32 becomes zero.
_AMAX = """
{x}_amax = highest(tl.abs({x}))
{x}_amax = tl.where({x}_amax < {tiny!r}, 0.0, {x}_amax)
"""
_PLAIN_SCALE = """
{x}_scale = rounded_up(largest({x}_amax * {per_max!r}, {tiny!r}))
{x}_scale = of_groups({x}_scale, {x}_amax, 0.0, float("nan"))
{x}_coded = {x} * tl.where({x}_amax == 0, 0.0, tl.div_rn(1.0, {x}_scale)){each_row}
"""
# middle · (|x| / scale)^k, likewise. `finite` is NaN for zeros, which the minimum ignores.
_EXPANSION = """
{x}_log = log2_of_magnitude({x})
{x}_high = highest({x}_log)
{x}_finite = {x}_log * 0.0 + {x}_log
{x}_low = largest(lowest({x}_finite), {x}_high - {longest!r})
{x}_scale = exp2(({x}_high + {x}_low) * 0.5)
{x}_scale = of_groups({x}_scale, {x}_high, float("-inf"), float("nan"))
{x}_scale = {x}_scale.to(tl.bfloat16).to(tl.float32)
{x}_center = log2_of_magnitude({x}_scale)
{x}_reach = largest({x}_high - {x}_center, {x}_center - {x}_low)
{x}_power = truncated(smallest({half_span!r} * reciprocal({x}_reach), {max_power!r}))
{x}_power = of_groups({x}_power, {x}_high, float("-inf"), 1.0)
{x}_offset = {log2_middle!r} - {x}_power * {x}_center
{x}_offset = ({x}_offset + (1.0 - reciprocal({x}_power)) * {log2_lost!r}){each_row}
tl.store({x}_power_at, {x}_power.to(tl.bfloat16), any_there)
"""
_SIGNED_CODES = "{x}_coded = exp2({x}_log * {x}_power{each_row} + {x}_offset)"
_SIGN = "{x}_coded = with_sign({x}_coded, bits_of({x}))"
# Zeros remain NaN, and no other number becomes zero.
_UNSIGNED_CODES = """
{x}_coded = {x}_finite * {x}_power{each_row} + {x}_offset
{x}_coded = exp2(largest({x}_coded, {log2_min!r}))
"""
# The code below, or the one above: never beyond the last.
_SEARCH = """
{x}_code = tl.zeros({x}_coded.shape, tl.int32)
for bit in tl.static_range(8):
    {x}_probe = {x}_code + (128 >> bit)
    {x}_code = tl.where(tl.load({x}_values + {x}_probe) <= {x}_coded, {x}_probe, {x}_code)
{x}_code = tl.minimum({x}_code, 254)
{x}_low = tl.load({x}_values + {x}_code)
{x}_distance = tl.load({x}_values + {x}_code + 1) - {x}_low
{x}_code += ({x}_coded - {x}_low > {share} * {x}_distance).to(tl.int32)
"""
# The sign of a code that is a float, above the bits of its magnitude.
_SIGNED = "{x}_code = {x}_code | bits_of({x}) >> {down} & {sign}"

_DECODE = "{x} = {code}.to({dtype}, bitcast=True).to(tl.float32) * {x}_scale{each_row}"

# Where the parameter is not its master copy, rounded, the user has written the parameter.
_TAKE_WRITTEN = """
as_parameter = master.to({dtype}).to(tl.float32)
master = tl.where(as_parameter == parameter, master, parameter)
"""

# The factor of a state when it is read.
_DECAYS = {"exp_avg": " * beta1", "exp_avg_sq": " * beta2", "master": ""}


class UpdateWriter:
    """Writes the kernel for the dtypes of parameters and gradients, and the storage of states."""

    def __init__(self, storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> None:
        self.states = storage.states(parameter)
        self.columns = table_columns(storage, parameter)
        self.dtypes = {PARAMETER: parameter, GRADIENT: gradient}
        self.rounded = storage.rounded(parameter)
        self.group_size = storage.group_size
        self.rows = max(1, TILE // self.group_size)
        self.parts = min(MAX_PARTS, self.group_size // 8)
        self.before: list[str] = []
        self.lines: list[str] = []

    def write(self) -> str:
        """The Triton module."""
        weights = "master" if "master" in self.states else PARAMETER
        self._locate(PARAMETER, self.dtypes[PARAMETER])
        self._locate(GRADIENT, self.dtypes[GRADIENT])
        self._load(GRADIENT)
        for name, format in self.states.items():
            self._read(name, format)
        self._load(PARAMETER)
        if weights == "master":
            self._add(_TAKE_WRITTEN, dtype=_TYPES[self.dtypes[PARAMETER]])
        self._update(weights)
        if self.rounded:
            pairs = self.group_size // self.parts // 2
            key = _KEY.format(each_row=axes().each_row, parts=self.parts, pairs=pairs)
            self.before += key.strip().splitlines()
            self.lines.append(_DRAW)
        if weights == "master":  # the parameter is the stored copy, rounded
            self._write_state("master", self.states["master"])
        # In the order that takes the fewest registers.
        self._store_parameter(weights)
        for name in ("exp_avg_sq", "exp_avg"):
            self._write_state(name, self.states[name])
        # Loads of codes' values depend on other loads, which would have to be prefetched, too.
        looks_up = any(format.values for format in self.states.values())
        kernel = _KERNEL.format(
            chunk=CHUNK,
            tile=self.rows * self.group_size,
            stages=1 if looks_up else STAGES,
            rows=self.rows,
            group=self.group_size,
            parts=self.parts,
            each_row=axes().each_row,
            each_part=axes().each_part,
            length=self.group_size // self.parts,
            columns=len(self.columns),
            before=textwrap.indent("\n".join(self.before), " " * 4),
            body=textwrap.indent("\n".join(self.lines), " " * 8),
        )
        return prelude() + functions() + kernel

    def _update(self, weights: str) -> None:
        self.before += _NUMBERS.format(least=SMALLEST_EPS).strip().splitlines()
        self._add(_UPDATE)
        if not self.states["exp_avg_sq"].grouped:
            self._add(_EXACT_STEP, weights=weights)
            return
        inverse = _INVERSE_RATE.format(smallest_rate=SMALLEST_RATE, **QUOTIENT._asdict())
        self.before += inverse.strip().splitlines()
        self._add(_STEP, weights=weights)

    def _add(self, template: str, **names: Any) -> None:
        self.lines += template.format(each_row=axes().each_row, **names).strip().splitlines()

    def _locate(self, name: str, dtype: torch.dtype) -> None:
        where = "gradients + number" if name == GRADIENT else f"table + {self.columns[name]}"
        self.before.append(f"{name}_first = address({where}, ALIGNED, {_TYPES[dtype]}) + begin")

    def _load(self, name: str) -> None:
        value = f"tl.load({name}_first + place + of_part, there, other=0.0)"
        bf16 = self.dtypes.get(name) == torch.bfloat16
        value = f"widened({value})" if bf16 else f"{value}.to(tl.float32)"
        self.lines.append(f"{name} = {value}")

    def _read(self, x: str, format: StateFormat) -> None:
        """Read and decode a state; a moment is multiplied by its beta."""
        self._locate(x, format.stored)
        decay = _DECAYS[x]
        if not format.grouped:
            self._load(x)
            self.lines.append(f"{x} = {x}{decay}")
            return
        for part in format.parts:
            where = f"table + {self.columns[f'{x}_{part}']}"
            first = f"address({where}, False, tl.bfloat16) + begin // {self.group_size}"
            self.before.append(f"{x}_{part}_first = {first}")
            self.before.append(_ASK.format(x=f"{x}_{part}", group=self.group_size))
            self._add(_READ, x=f"{x}_{part}", rows=self.rows)
        if decay:
            self.lines.append(f"{x}_scale = {x}_scale{decay}")
        codes = f"tl.load({x}_first + place + of_part, there, other={format.zero})"
        if format.values:
            value = f"tl.load({x}_values + {codes}.to(tl.int32))"
        else:
            value = f"{codes}.to({_TYPES[format.dtype]}, bitcast=True).to(tl.float32)"
        self.lines.append(f"{x} = {value}")
        if not format.expands:
            self._add("{x} = {x} * {x}_scale{each_row}", x=x)
            return
        self._add(_ROOT, x=x, log2_middle=math.log2(format.middle))
        root = f"with_sign({x}_root, bits_of({x}))" if format.signed else f"{x}_root"
        self.lines.append(f"{x} = {root}")

    def _write_state(self, x: str, format: StateFormat) -> None:
        if not format.grouped:
            value = f"stochastic({x}, {self._bits(x)})" if x in self.rounded else x
            self._store(x, value, format.dtype)
            return
        numbers = {
            "per_max": 1 / format.max,
            "tiny": SMALLEST_SCALE,
            "log2_middle": math.log2(format.middle),
            "log2_min": math.log2(format.min),
            "log2_lost": math.log2(1 + format.lost) if x in self.rounded else 0.0,
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
                least = f"largest({x}_coded, {format.min!r})"
                self.lines.append(f"{x}_coded = tl.where({x}_coded > 0, {least}, {x}_coded)")
        self.lines.append(f"tl.store({x}_scale_at, {x}_scale.to(tl.bfloat16), any_there)")
        if format.values:
            self._write_dynamic(x, format)
        else:
            self._write_float(x, format)

    def _write_dynamic(self, x: str, format: StateFormat) -> None:
        """Find and store the codes of a format without dtype."""
        if format.signed and format.expands:
            self._add(_SIGN, x=x)
        # A value is rounded up if its distance to the code below exceeds this share of a step.
        share = f"uniform({self._bits(x)})" if x in self.rounded else "0.5"
        self._add(_SEARCH, x=x, share=share)
        self._store(x, f"{x}_code", format.stored)

    def _write_float(self, x: str, format: StateFormat) -> None:
        """Store codes that are floats."""
        magnitude, shift = f"{x}_coded", _shift(format)
        if not format.expands:  # which leaves room for errors of scaled values
            magnitude = f"smallest(tl.abs({magnitude}), {format.max!r})"
        if x in self.rounded:
            rounded = f"dithered({magnitude}, {self._bits(x)}, {_factor(format)!r}, {shift})"
        else:
            rounded = f"nearest({magnitude}, {_factor(format)!r}, {shift})"
        self.lines.append(f"{x}_code = {rounded}")
        if format.signed:
            sign = shift + 8 * format.dtype.itemsize - 1
            self._add(_SIGNED, x=x, down=31 - sign, sign=1 << sign)
        code = _upper_bits(f"{x}_code", format)
        self._store(x, code, format.stored, bitcast=True)
        if x == "master":
            self._add(_DECODE, x=x, code=code, dtype=_TYPES[format.dtype])

    def _bits(self, name: str) -> str:
        """The random bits by which `name` is rounded."""
        by = ROTATIONS[name]
        if by in (0, 16):
            return "rotated_16" if by else "bits"
        self._add(_ROTATE, by=by, rest=32 - by, mask=(1 << by) - 1)
        return f"rotated_{by}"

    def _store_parameter(self, weights: str) -> None:
        value = weights
        if PARAMETER in self.rounded:
            value = f"stochastic({weights}, {self._bits(PARAMETER)})"
        self._store(PARAMETER, value, self.dtypes[PARAMETER])

    def _store(self, name: str, value: str, dtype: torch.dtype, *, bitcast: bool = False) -> None:
        value = f"{value}.to({_TYPES[dtype]}, bitcast={bitcast})"
        self.lines.append(f"tl.store({name}_first + result + of_part, {value}, result_there)")


def table_columns(storage: Storage, parameter: torch.dtype) -> dict[str, int]:
    """The columns of the table of pointers: a parameter, its states and their parts."""
    names = [PARAMETER]
    for name, format in storage.states(parameter).items():
        names += [name, *(f"{name}_{part}" for part in format.parts)]
    return {name: i for i, name in enumerate(names)}


def _shift(format: StateFormat) -> int:
    """The lowest bit of a float format's codes in fp32 numbers multiplied by `_factor`."""
    return -round(math.log2(torch.finfo(torch.float32).eps)) - format.mantissa


def _factor(format: StateFormat) -> float:
    """The factor that maps the smallest normal number of a float format to that of fp32."""
    return torch.finfo(torch.float32).tiny / (format.min * 2**format.mantissa)


def _upper_bits(numbers: str, format: StateFormat) -> str:
    """The codes in the upper bits of fp32 numbers, as Triton source."""
    if format.dtype.itemsize == 1:
        return f"upper_bytes({numbers}, {_shift(format) - 16})"
    return f"({numbers} >> {_shift(format)}).to(tl.uint16)"


@cache
def kernel(storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> Any:
    """The Triton function that updates parameters of a dtype with gradients of a dtype."""
    return compat.load_source(UpdateWriter(storage, parameter, gradient).write()).adamw
