"""The row kernel: computes programs with reductions along rows.

It reads a row once, and computes the norm's statistics, the scale, the quantized row, and the
groups saved for the backward (section 5.2 of the COAT paper, section 3 of the LLMQ paper).
Inductor's code reads the row again for each of these results (`benchmarks/kernels.py`).
"""

from __future__ import annotations

from typing import Any

from fp8pass.codegen.kernels.kernel_operator import define_kernel
from fp8pass.codegen.kernels.launch import LaunchPart
from fp8pass.codegen.kernels.row_source import VECTOR, RowWriter, Shape, sums_rows, write
from fp8pass.codegen.kernels.supported import UnsupportedProgram, check_stores
from fp8pass.codegen.kernels.triton_ops import GROUP_FORMATS, TRITON_TYPES
from fp8pass.codegen.program.ir import IS_COLUMN, PARTIAL_SUMS, ROW_EXP_SUM, Load, Program
from fp8pass.dialect.formats import FORMATS

LONGEST_HELD = 16384
# Registers hold rows of more than `LONGEST_HELD` elements, up to this length and in chunks of
# `WIDE_CHUNK`, if a kernel reads at most `WIDE_LOADS` tensors and no format is packed. Other long
# rows are read in a loop. On an H200 the loop takes 18% longer for SwiGLUs of 18,944 features, and
# 35% longer for 28,672.
LONGEST_WIDE = 28672
WIDE_CHUNK = 8192
WIDE_LOADS = 2
# Longest rows of kernels with sums over rows, for passes that fuse such sums.
LONGEST_SUMMED = 8192
# Kernels with sums over rows load short rows ahead, in this many stages. For the backward of norms
# of 768 to 2,048 features, that takes 5 to 11% less time; for 3,584 features, 2% more.
LONGEST_STAGED, SUMMED_STAGES = 2048, 3
# Largest number of elements that a thread holds. More would leave too few threads to hide the
# latency of memory (`benchmarks/results/sweeps.json`).
HELD = 44
HELD_SUMMED = 32  # with one sum over rows
# Smallest number of elements of the last chunk that each thread holds. The shortest possible last
# chunk makes the forwards of SwiGLUs of 8,960 and 18,944 features 6% faster.
FEWEST_HELD = 4
# Elements of a chunk, if the row is read in a loop.
ROW_CHUNK = 4096
# Elements of a chunk, if a kernel stores only one number for each row of more than `LONGEST_HELD`
# elements. `fuse_scales` reduces up to `LONGEST_REDUCED` elements.
REDUCED_CHUNK = 16384
LONGEST_REDUCED = 131072
SMALLEST_CHUNK = 128


FORMATS_BY_LAYOUT: dict[str, frozenset[str]] = {
    "rows": frozenset(TRITON_TYPES),
    "groups": GROUP_FORMATS,
    "full": frozenset(),
    "row": frozenset(),
    "sums": frozenset(),
}


def prepare(program: Program, rows: Any, columns: int) -> LaunchPart:
    """Choose the chunk size and warps that are fastest on an H200.

    Raises UnsupportedProgram if this kernel does not support a store.
    """
    _check(program, columns)
    shape, warps = _choose_shape(program, columns)
    function = write(program, shape)
    if sums_rows(program):
        stages = SUMMED_STAGES if columns <= LONGEST_STAGED else 1
        constants = {"PROGRAMS": PARTIAL_SUMS, "STAGES": stages}
        return LaunchPart(function, PARTIAL_SUMS, {"M": rows}, constants, warps)
    return LaunchPart(function, rows, sizes={}, constants={}, num_warps=warps)


def _check(program: Program, columns: int) -> None:
    check_stores("row", program, FORMATS_BY_LAYOUT)
    for store in program.stores:
        if store.width or store.block:
            kind = "blocks" if store.block else "a wider matrix"
            raise UnsupportedProgram(f"the row kernel cannot store {store.name} in {kind}")
        size = store.group_size
        if size > ROW_CHUNK or size & (size - 1):
            raise UnsupportedProgram(f"the row kernel cannot store groups of {size}")
    if sums_rows(program) and columns > LONGEST_HELD:
        raise UnsupportedProgram(f"the row kernel cannot sum over rows of {columns}")


def _may_overwrite(program: Program, columns: int, load: Load, store: int) -> bool:
    """Whether store number `store` may take the memory of `load`."""
    return RowWriter(program, _choose_shape(program, columns)[0]).may_overwrite(load, store)


def _choose_shape(program: Program, columns: int) -> tuple[Shape, int]:
    """Return the chunks, which contain whole groups, and the number of warps."""
    targets = {step.target for step in program.steps}
    if columns > LONGEST_HELD:
        if not targets.isdisjoint((ROW_EXP_SUM, IS_COLUMN)):
            return Shape(columns, ROW_CHUNK, held=False), 8
        if all(store.layouts == ("row",) for store in program.stores):
            return Shape(columns, REDUCED_CHUNK, held=False), 16
        if columns <= LONGEST_WIDE and _needs_few_registers(program):
            return _end_short(columns, WIDE_CHUNK, 8)
        return Shape(columns, ROW_CHUNK, held=False), 4
    sums = sum("sums" in store.layouts for store in program.stores)
    # Each sum takes as many registers as the elements of a row.
    held, vector = (2 * HELD_SUMMED // (1 + sums), VECTOR) if sums else (HELD, 2 * VECTOR)
    warps = next((w for w in (4, 8) if columns <= 32 * w * held), 16)
    largest_group = max((store.group_size for store in program.stores), default=1)
    chunk = min(32 * warps * vector, 1 << (columns - 1).bit_length())
    chunk = max(chunk, largest_group, SMALLEST_CHUNK)
    if sums or ROW_EXP_SUM in targets:
        return Shape(columns, chunk, held=True), warps
    return _end_short(columns, chunk, warps, largest_group)


def _end_short(columns: int, chunk: int, warps: int, smallest: int = 1) -> tuple[Shape, int]:
    """Return the shape with the shortest possible last chunk, and the number of warps."""
    rest = columns % chunk
    last = max(1 << (rest - 1).bit_length(), smallest, 32 * warps * FEWEST_HELD) if rest else chunk
    is_short = last < chunk < columns
    return Shape(columns, chunk, held=True, last=last if is_short else 0), warps


def _needs_few_registers(program: Program) -> bool:
    formats = {x.format for x in program.loads} | {x.format for x in program.stores}
    packs = any(FORMATS[name].packed for name in formats if name)
    return not packs and sum(x.operand in ("full", "groups") for x in program.loads) <= WIDE_LOADS


rows = define_kernel("rows", prepare, may_overwrite=_may_overwrite)
