"""Fused updates as Triton source: one kernel updates all parameters of a group.

A program updates a chunk of one parameter, tile by tile, with the fp32 arithmetic of the eager
update. It has one warp, because several warps would have to synchronize. Tiles are prefetched.
Numbers that change between steps are read from memory, so that the kernel is compiled once, and
CUDA graphs can replay it. A `FusedRule` contains the arithmetic of one optimizer.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.codegen.kernels.device_functions import Instructions, shared_source, write_functions
from fp8pass.dialect.scaling import SMALLEST_SCALE
from fp8pass.optim.group_options import PARAMETER, Storage
from fp8pass.optim.rounding import FIRST_FACTOR, FOLDED_FACTORS, ROTATIONS, SECOND_FACTOR
from fp8pass.optim.state_formats import DIGITS, MAX_POWER, MIN_POWER, SPARE, StateFormat
from fp8pass.optim.update import Group

CHUNK = 16384  # elements that a program updates
TILE = 1024  # elements that a program updates at once; whole groups
STAGES = 3  # stages of Triton's pipeline, which prefetches tiles
MAX_PARTS = 4  # most parts of a group; each thread has elements of all parts
# The fastest launch options on an H200. Longer chunks are 1% faster for a 7B model, but a small
# model then has too few programs (benchmarks/results/optimizer_sweep.json).
LAUNCH = {"num_warps": 1, "maxnreg": 168}
GRADIENT = "gradient"

_PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
_TYPES = {x: f"tl.{x}".replace("torch.", "") for x in _PLAIN_TYPES}
_TYPES |= {torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5"}
_TYPES |= {torch.int8: "tl.int8"}


class Axes(NamedTuple):
    """The order of a tile's first two axes: rows (one for each group), and parts of groups."""

    each_row: str  # index that broadcasts one value for each row to a tile
    each_part: str  # index that broadcasts one value for each part to a tile
    part: int  # axis of parts, 0 or 1


@cache
def axes() -> Axes:
    """Return the order of axes for which each thread has elements of all parts.

    Triton distributes threads along the last axis first. Next is the first axis in versions up to
    3.6, and the second axis in later versions.
    """
    import triton

    first, second = "[:, None, None]", "[None, :, None]"
    until_3_6 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return Axes(first, second, 1) if until_3_6 else Axes(second, first, 0)


_INSTRUCTIONS = {
    "log2_magnitude": Instructions(
        "{ .reg .f32 y; abs.f32 y, $1; lg2.approx.ftz.f32 $0, y; }",
        f"tl.log2(tl.where(tl.abs(x) < {SMALLEST_SCALE!r}, 0.0, tl.abs(x)))",
    ),
    "root": Instructions("sqrt.approx.ftz.f32 $0, $1;", "tl.sqrt(x)"),
    # Clamps to [0, 1]; NaN becomes 0.
    "saturate": Instructions("mul.sat.f32 $0, $1, 0f3F800000;", "tl.where(x > 0, x, 0.0)"),
    "copy_sign": Instructions(
        "lop3.b32 $0, $1, $2, 0x80000000, 0xF8;",
        "(x.to(tl.int32, bitcast=True) | of & -2147483648).to(tl.float32, bitcast=True)",
        parameters="x, of",
        registers="=f,f,r",
    ),
    # The exclusive or of the upper and the lower half of a 64-bit product.
    "fold_product": Instructions(
        "{ .reg .b64 product; .reg .b32 low, high; mul.wide.u32 product, $1, $2;"
        " mov.b64 {low, high}, product; xor.b32 $0, low, high; }",
        "((x.to(tl.uint32, bitcast=True).to(tl.uint64) * factor >> 32).to(tl.uint32)"
        " ^ x.to(tl.uint32, bitcast=True) * factor).to(tl.int32, bitcast=True)",
        parameters="x, factor",
        registers="=r,r,r",
        dtype="int32",
    ),
    # The upper halves of `bits` are noise. NaN plus noise would wrap around, so both numbers are
    # truncated if one is NaN.
    "round_stochastically": Instructions(
        "{ .reg .pred nan; .reg .b32 a, b, c, d, e, f; setp.nan.f32 nan, $1, $2;"
        " mov.b32 a, $1; mov.b32 b, $2; shr.u32 c, $3, 16; shr.u32 d, $4, 16;"
        " add.u32 e, a, c; add.u32 f, b, d; prmt.b32 $0, e, f, 0x7632;"
        " @nan prmt.b32 $0, a, b, 0x7632; }",
        "((to_bits(x) + tl.where(x == x, bits >> 16 & 0xFFFF, 0)) >> 16)"
        ".to(tl.int16).to(tl.bfloat16, bitcast=True)",
        parameters="x, bits",
        registers="=r,f,f,r,r",
        dtype="bfloat16",
        pack=2,
    ),
    # Extracts the byte that starts at bit `shift` of the upper half of each number.
    "extract_bytes": Instructions(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x7632; prmt.b32 b, $3, $4, 0x7632;"
        " shr.u32 a, a, $5; shr.u32 b, b, $5; prmt.b32 $0, a, b, 0x6420; }",
        "(x >> 16 + shift).to(tl.uint8)",
        parameters="x, shift",
        registers="=r,r,r,r,r,r,r,r,r",
        dtype="uint8",
        pack=4,
    ),
    # The compiler cannot infer that the result equals `x`.
    "hide_from_compiler": Instructions("mov.b32 $0, $1;", "x", registers="=r,r", dtype="int32"),
    "widen": Instructions(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
        "x.to(tl.float32)",
        registers="=r,=r,r",
        pack=2,
    ),
}

_FUNCTIONS = """
@triton.jit
def to_bits(x):
    return x.to(tl.int32, bitcast=True)

@triton.jit
def mix(x):
    x = (x ^ (x >> 16 & 0xFFFF)) * {first}
    x = (x ^ (x >> 15 & 0x1FFFF)) * {second}
    return x ^ (x >> 16 & 0xFFFF)

# Two neighbours share one hash; the second has its halves exchanged. The second result is the first
# one with the halves exchanged.
@triton.jit
def random_bits(key, pair):
    x = key + pair
    x = fold_product(fold_product(x, {folds[0]}), {folds[1]})
    exchanged = x << 16 | x >> 16 & 0xFFFF
    return interleave(x, exchanged), interleave(exchanged, x)

@triton.jit
def interleave(a, b):
    return tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * a.shape[2]))

@triton.jit
def uniform(bits):
    return (bits >> 9 & 0x7FFFFF).to(tl.float32) * {uniform_step!r}

# FACTOR maps the subnormal numbers of the format to subnormal fp32 numbers. Then the bits of a
# number from SHIFT on are its code, and the bits below SHIFT determine the rounding.
@triton.jit
def add_noise(x, bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    noise = bits.to(tl.uint32, bitcast=True) >> (32 - SHIFT)
    return to_bits(saturate(x * FACTOR)) + noise.to(tl.int32)

# The same with rounding to nearest, ties to even.
@triton.jit
def add_half(x, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    found = to_bits(saturate(x * FACTOR))
    return found + (found >> SHIFT & 1) + ((1 << SHIFT - 1) - 1)

# Negating the exponent approximates the reciprocal to within 5%. One iteration with these constants
# reduces the error to 3.3e-5. The reciprocal unit of the GPU would be the bottleneck of the update.
@triton.jit
def quotient(x, y, linear, constant):
    inverse = (0x7EF34000 - to_bits(y)).to(tl.float32, bitcast=True)
    error = linear - y * inverse
    return x * inverse * (error * error + constant)

# The largest and the smallest number of each group of a tile.
@triton.jit
def group_max(x):
    return tl.reduce(tl.reduce(x, {part}, largest), 1, largest)

@triton.jit
def group_min(x):
    return tl.min(tl.min(x, {part}), 1)

@triton.jit
def round_up(x):
    return (to_bits(x) + 0xFFFF & -65536).to(tl.float32, bitcast=True)

@triton.jit
def select_by_group(x, amax, ZERO: tl.constexpr, not_finite):
    return tl.where(amax == ZERO, 1.0, tl.where(amax < float("inf"), x, not_finite))

# A thread reads eight elements or 16 bytes at once, so that FP8 data and FP32 numbers have the same
# register layout.
@triton.jit
def address(table, ALIGNED: tl.constexpr, ELEMENT: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(pointer, min(ELEMENT.primitive_bitwidth, 16)) if ALIGNED else pointer

"""


_KERNEL = """
@triton.jit(do_not_specialize=["count", "seed"])
def {name}(
    tables, addresses, sizes, numbers, steps, factors, control, parameter_of, first_chunk,
    {arguments}, ALIGNED: tl.constexpr,
):
    if tl.load(control + 1) != 0.0:
        return
    chunk = tl.program_id(0)
    number = tl.load(parameter_of + chunk)
    size = tl.load(sizes + number)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    begin = (chunk - tl.load(first_chunk + number)).to(tl.int64) * {chunk}
    # A thread has eight numbers of each part of a group, which are 16 bytes in BF16.
    row = tl.arange(0, {rows})
    part = tl.arange(0, {parts}){each_part}
    of_part = part * {length}
    in_tile = row{each_row} * {group} + tl.arange(0, {length})[None, None, :]
    table = tables + number * {columns}
    left = tl.minimum(size - begin, {chunk}).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
{before}
    for first in tl.range(0, left, {tile}, num_stages={stages}):
        place = first + in_tile
        there = place < left - of_part
        # Recompute addresses of results, or the addresses of prefetched tiles occupy registers.
        result = hide_from_compiler(first // {tile}) * {tile} + in_tile
        result_there = result < left - of_part
        group = first // {group} + row
        any_there = group * {group} < left
        any_next = (group + {rows}) * {group} < left
{body}
"""

_KEY = """
key = mix(mix(seed) + tl.load(numbers + number))
key = mix(key + tl.load(steps + number).to(tl.int32)) + (begin // 2).to(tl.int32)
pair_in_tile = (row{each_row} * {parts} + part) * {pairs}
pair_in_tile += tl.arange(0, {pairs})[None, None, :]
"""
# The hash returns bits rotated by 0 and by 16; `_ROTATE` makes the other rotations.
_DRAW = "bits, rotated_16 = random_bits(key, (first // 2) + pair_in_tile)"
_ROTATE = "rotated_{by} = bits << {by} | bits >> {rest} & {mask}"

# Triton prefetches tiles, but not loads of less than four bytes, such as scales and powers. `_ASK`
# and `_READ` prefetch these.
_ASK = "{x}_next = tl.load({x}_first + row, row * {group} < left, other=1.0)"
_READ = """
{x}_at = {x}_first + group
{x} = {x}_next.to(tl.float32)
{x}_next = tl.load({x}_at + {rows}, any_next, other=1.0)
"""
# scale · (code / middle)^(1/k); the offset contains the terms that are equal in a group.
_ROOT = """
{x}_inverse = reciprocal({x}_power)
{x}_offset = log2_magnitude({x}_scale) - {x}_inverse * {log2_middle!r}
{x}_root = exp2(log2_magnitude({x}) * {x}_inverse{each_row} + {x}_offset{each_row})
"""

# A group in which all numbers are subnormal in fp32 becomes zero.
_AMAX = """
{x}_amax = group_max(tl.abs({x}))
{x}_amax = tl.where({x}_amax < {tiny!r}, 0.0, {x}_amax)
"""
_PLAIN_SCALE = """
{x}_scale = round_up(largest({x}_amax * {per_max!r}, {tiny!r}))
{x}_scale = select_by_group({x}_scale, {x}_amax, 0.0, float("nan"))
{x}_scaled = {x} * tl.where({x}_amax == 0, 0.0, tl.div_rn(1.0, {x}_scale)){each_row}
"""
# middle · (|x| / scale)^k, with an offset as in `_ROOT`. `finite` is NaN for zeros; the minimum
# ignores NaN.
_EXPANSION = """
{x}_log = log2_magnitude({x})
{x}_high = group_max({x}_log)
{x}_finite = {x}_log * 0.0 + {x}_log
{x}_low = largest(group_min({x}_finite), {x}_high - {longest!r})
{x}_scale = exp2(({x}_high + {x}_low) * 0.5)
{x}_scale = select_by_group({x}_scale, {x}_high, float("-inf"), float("nan"))
{x}_scale = {x}_scale.to(tl.bfloat16).to(tl.float32)
{x}_center = log2_magnitude({x}_scale)
{x}_reach = largest({x}_high - {x}_center, {x}_center - {x}_low)
{x}_power = truncated(smallest({half_span!r} * reciprocal({x}_reach), {max_power!r}))
{x}_power = select_by_group({x}_power, {x}_high, float("-inf"), 1.0)
{x}_offset = {log2_middle!r} - {x}_power * {x}_center
{x}_offset = ({x}_offset + (1.0 - reciprocal({x}_power)) * {log2_lost!r}){each_row}
tl.store({x}_power_at, {x}_power.to(tl.bfloat16), any_there)
"""
_SIGNED_CODES = "{x}_scaled = exp2({x}_log * {x}_power{each_row} + {x}_offset)"
_SIGN = "{x}_scaled = copy_sign({x}_scaled, to_bits({x}))"
# Zeros stay NaN, which rounding turns into 0. Other numbers do not become zero.
_UNSIGNED_CODES = """
{x}_scaled = {x}_finite * {x}_power{each_row} + {x}_offset
{x}_scaled = exp2(largest({x}_scaled, {log2_min!r}))
"""
# Binary search of the largest code not above the number; rounding may select the next code.
_SEARCH = """
{x}_code = tl.zeros({x}_scaled.shape, tl.int32)
for bit in tl.static_range(8):
    {x}_probe = {x}_code + (128 >> bit)
    {x}_code = tl.where(tl.load({x}_values + {x}_probe) <= {x}_scaled, {x}_probe, {x}_code)
{x}_code = tl.minimum({x}_code, 254)
{x}_low = tl.load({x}_values + {x}_code)
{x}_distance = tl.load({x}_values + {x}_code + 1) - {x}_low
{x}_code += ({x}_scaled - {x}_low > {share} * {x}_distance).to(tl.int32)
"""
# Adds the sign bit of a float code to the bits of its magnitude.
_SIGNED = "{x}_code = {x}_code | to_bits({x}) >> {down} & {sign}"

# Converts the magnitude to a signed code in two's complement.
_INTEGER = """
{x}_code = {x}_code >> {shift}
{x}_code = tl.where({x} < 0, -{x}_code, {x}_code)
"""

_DECODE = "{x} = {code}.to({dtype}, bitcast=True).to(tl.float32) * {x}_scale{each_row}"

# Where the parameter differs from the rounded master copy, the user has changed the parameter. The
# master copy then takes the parameter's value.
_TAKE_WRITTEN = """
as_parameter = master.to({dtype}).to(tl.float32)
master = tl.where(as_parameter == parameter, master, parameter)
"""


@dataclass(frozen=True, eq=False)
class FusedRule:
    """The arithmetic of a kernel.

    Attributes:
        name: of the kernel.
        numbers: arguments of the kernel that are equal for all parameters, fp32.
        factors: returns k numbers for each of n parameters, fp32 [k, n], given the group, step
            counts, fp32 [n], and the rows and columns of whole parameters, fp64 [n, 2].
        write: adds lines to the kernel that compute the new states, and either `result` or the new
            weights (`UpdateWriter.weights`).
        decays: for a state by name, the text that multiplies it by its decay when it is read.
        result: name of a BF16 tensor that the kernel computes. If it is empty, the kernel updates
            the parameters.
    """

    name: str
    numbers: Mapping[str, Callable[[Group], float]]
    factors: Callable[[Group, Tensor, Tensor], Tensor]
    write: Callable[[UpdateWriter], None]
    decays: Mapping[str, str] = field(default_factory=dict)
    result: str = ""


class UpdateWriter:
    """Writes the kernel for one dtype of parameters, one dtype of gradients, and one `Storage`."""

    def __init__(
        self, rule: FusedRule, storage: Storage, parameter: torch.dtype, gradient: torch.dtype
    ) -> None:
        self.rule, self.storage = rule, storage
        self.states = storage.states(parameter)
        self.columns = table_columns(storage, parameter)
        self.dtypes = {PARAMETER: parameter, GRADIENT: gradient}
        self.rounded = storage.rounded(parameter)
        self.group_size = storage.group_size
        self.rows = max(1, TILE // self.group_size)
        self.parts = min(MAX_PARTS, self.group_size // 8)
        self.before: list[str] = []
        self.lines: list[str] = []

    @property
    def weights(self) -> str:
        """The kernel's variable with the exact weights: the master copy or the parameter."""
        return "master" if "master" in self.states else PARAMETER

    def write(self) -> str:
        rule = self.rule
        if not rule.result:
            self._locate(PARAMETER, self.dtypes[PARAMETER])
        self._locate(GRADIENT, self.dtypes[GRADIENT])
        self._load(GRADIENT)
        for name, format in self.states.items():
            self._read_state(name, format)
        if not rule.result:
            self._load(PARAMETER)
        if self.weights == "master":
            self.add(_TAKE_WRITTEN, dtype=_TYPES[self.dtypes[PARAMETER]])
        rule.write(self)
        if self.rounded:
            pairs = self.group_size // self.parts // 2
            self.add_before(_KEY, parts=self.parts, pairs=pairs)
            self.lines.append(_DRAW)
        self._write_result()
        for name in reversed([*self.storage.moments]):
            self._write_state(name, self.states[name])
        # Addresses in tables of values depend on loaded codes, so such tiles are not prefetched.
        looks_up = any(format.values for format in self.states.values())
        values = [f"{name}_values" for name in self.storage.moments]
        kernel = _KERNEL.format(
            name=rule.name,
            arguments=", ".join([*values, "count", "seed", *rule.numbers]),
            chunk=CHUNK,
            tile=self.rows * self.group_size,
            stages=1 if looks_up else STAGES,
            rows=self.rows,
            group=self.group_size,
            parts=self.parts,
            **axes()._asdict(),
            length=self.group_size // self.parts,
            columns=len(self.columns),
            before=textwrap.indent("\n".join(self.before), " " * 4),
            body=textwrap.indent("\n".join(self.lines), " " * 8),
        )
        mixing = {"first": FIRST_FACTOR, "second": SECOND_FACTOR, "folds": FOLDED_FACTORS}
        functions = _FUNCTIONS.format(**mixing, uniform_step=2.0**-DIGITS, part=axes().part)
        return shared_source() + write_functions(_INSTRUCTIONS) + functions + kernel

    def _write_result(self) -> None:
        if self.rule.result:
            self._locate(self.rule.result, torch.bfloat16)
            self._store(self.rule.result, self.rule.result, torch.bfloat16)
            return
        if self.weights == "master":  # first, because the parameter is the rounded stored copy
            self._write_state("master", self.states["master"])
        # Writing the weights first, and then the states in reverse, takes the fewest registers.
        value = self.weights
        if PARAMETER in self.rounded:
            value = f"round_stochastically({value}, {self._bits(PARAMETER)})"
        self._store(PARAMETER, value, self.dtypes[PARAMETER])

    def add(self, template: str, **names: Any) -> None:
        self.lines += template.format(each_row=axes().each_row, **names).strip().splitlines()

    def add_before(self, template: str, **names: Any) -> None:
        self.before += template.format(each_row=axes().each_row, **names).strip().splitlines()

    def _locate(self, name: str, dtype: torch.dtype) -> None:
        where = f"table + {self.columns[name]}" if name in self.columns else "addresses + number"
        if name == self.rule.result:
            where = "addresses + count + number"
        self.before.append(f"{name}_first = address({where}, ALIGNED, {_TYPES[dtype]}) + begin")

    def _load(self, name: str) -> None:
        value = f"tl.load({name}_first + place + of_part, there, other=0.0)"
        bf16 = self.dtypes.get(name) == torch.bfloat16
        value = f"widen({value})" if bf16 else f"{value}.to(tl.float32)"
        self.lines.append(f"{name} = {value}")

    def _read_state(self, x: str, format: StateFormat) -> None:
        """Read a state, and multiply it by its decay."""
        self._locate(x, format.storage_dtype)
        decay = self.rule.decays.get(x, "")
        if not format.grouped:
            self._load(x)
            self.lines.append(f"{x} = {x}{decay}")
            return
        for part in format.parts:
            where = f"table + {self.columns[f'{x}_{part}']}"
            first = f"address({where}, False, tl.bfloat16) + begin // {self.group_size}"
            self.before.append(f"{x}_{part}_first = {first}")
            self.add_before(_ASK, x=f"{x}_{part}", group=self.group_size)
            self.add(_READ, x=f"{x}_{part}", rows=self.rows)
        if decay:
            self.lines.append(f"{x}_scale = {x}_scale{decay}")
        codes = f"tl.load({x}_first + place + of_part, there, other={format.zero_code})"
        value = f"{codes}.to({_TYPES[format.dtype]}, bitcast=True).to(tl.float32)"
        if format.values:
            value = f"tl.load({x}_values + {codes}.to(tl.int32))"
        self.lines.append(f"{x} = {value}")
        if not format.expands:
            self.add("{x} = {x} * {x}_scale{each_row}", x=x)
            return
        self.add(_ROOT, x=x, log2_middle=math.log2(format.middle))
        root = f"copy_sign({x}_root, to_bits({x}))" if format.signed else f"{x}_root"
        self.lines.append(f"{x} = {root}")

    def _write_state(self, x: str, format: StateFormat) -> None:
        if not format.grouped:
            value = f"round_stochastically({x}, {self._bits(x)})" if x in self.rounded else x
            self._store(x, value, format.dtype)
            return
        numbers = {
            "per_max": 1 / format.max,
            "tiny": SMALLEST_SCALE,
            "log2_middle": math.log2(format.middle),
            "log2_min": math.log2(format.min),
            "log2_lost": math.log2(1 + format.mean_loss) if x in self.rounded else 0.0,
            "half_span": format.span / 2 - SPARE,
            "longest": format.span / MIN_POWER,
            "max_power": MAX_POWER,
        }
        if format.expands:
            self.add(_EXPANSION, x=x, **numbers)
            self.add(_SIGNED_CODES if format.signed else _UNSIGNED_CODES, x=x, **numbers)
        else:
            self.add(_AMAX + _PLAIN_SCALE, x=x, **numbers)
            if not format.signed:
                least = f"largest({x}_scaled, {format.min!r})"
                self.lines.append(f"{x}_scaled = tl.where({x}_scaled > 0, {least}, {x}_scaled)")
        self.lines.append(f"tl.store({x}_scale_at, {x}_scale.to(tl.bfloat16), any_there)")
        if not format.values:
            self._write_float(x, format)
            return
        if format.signed and format.expands:
            self.add(_SIGN, x=x)
        # Values above this share of the distance between their neighboring codes are rounded up.
        share = f"uniform({self._bits(x)})" if x in self.rounded else "0.5"
        self.add(_SEARCH, x=x, share=share)
        self._store(x, f"{x}_code", format.storage_dtype)

    def _write_float(self, x: str, format: StateFormat) -> None:
        """Round the scaled values of state `x`, and store the codes."""
        fp32 = torch.finfo(torch.float32)
        # Maps the smallest normal number of the format to the smallest normal fp32 number. Then the
        # bits above the lowest `shift` bits are the code.
        factor = fp32.tiny / (format.min * 2**format.mantissa)
        magnitude, shift = f"{x}_scaled", -round(math.log2(fp32.eps)) - format.mantissa
        if not format.expands:  # SPARE keeps expanded values below the maximum
            magnitude = f"smallest(tl.abs({magnitude}), {format.max!r})"
        rounding = f"add_noise({magnitude}, {self._bits(x)}" if x in self.rounded else ""
        rounding = rounding or f"add_half({magnitude}"
        self.lines.append(f"{x}_code = {rounding}, {factor!r}, {shift})")
        if format.dtype == torch.int8:
            self.add(_INTEGER, x=x, shift=shift)
            self._store(x, f"{x}_code.to(tl.int8)", format.storage_dtype, bitcast=True)
            return
        if format.signed:
            sign = shift + 8 * format.dtype.itemsize - 1
            self.add(_SIGNED, x=x, down=31 - sign, sign=1 << sign)
        code = f"({x}_code >> {shift}).to(tl.uint16)"
        if format.dtype.itemsize == 1:
            code = f"extract_bytes({x}_code, {shift - 16})"
        self._store(x, code, format.storage_dtype, bitcast=True)
        if x == "master":
            self.add(_DECODE, x=x, code=code, dtype=_TYPES[format.dtype])

    def _bits(self, name: str) -> str:
        by = ROTATIONS[name]
        if by in (0, 16):
            return "rotated_16" if by else "bits"
        self.add(_ROTATE, by=by, rest=32 - by, mask=(1 << by) - 1)
        return f"rotated_{by}"

    def _store(self, name: str, value: str, dtype: torch.dtype, *, bitcast: bool = False) -> None:
        value = f"{value}.to({_TYPES[dtype]}, bitcast={bitcast})"
        self.lines.append(f"tl.store({name}_first + result + of_part, {value}, result_there)")


def table_columns(storage: Storage, parameter: torch.dtype) -> dict[str, int]:
    names = [PARAMETER]
    for name, format in storage.states(parameter).items():
        names += [name, *(f"{name}_{part}" for part in format.parts)]
    return {name: i for i, name in enumerate(names)}


@cache
def kernel(rule: FusedRule, storage: Storage, parameter: torch.dtype, gradient: torch.dtype) -> Any:
    source = UpdateWriter(rule, storage, parameter, gradient).write()
    return getattr(compat.load_source(source), rule.name)
