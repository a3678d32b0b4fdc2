"""The Triton kernel of a program without reductions: reads a tile once, stores it in both layouts.

COAT G.3. A linear layer's operand in the backward is contracted over its rows by one GEMM and over
its columns by another, and FP8 tensor cores take one layout. What Inductor generates for a
transposed store moves 50 to 70% of what a copy does (`benchmarks/kernels.py`); this kernel, 85%:
neighbouring programs read neighbouring tiles of the same rows, and a thread packs the codes of four
rows into a word, so that shared memory, where they change layout, sees words instead of bytes. The
pointwise body is generated from the graph, so that any activation gets this kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from fp8pass import compat
from fp8pass.codegen.kernel_op import Launch, define_kernel
from fp8pass.codegen.prelude import prelude
from fp8pass.codegen.program import AMAX_TILE, Load, Program, Store
from fp8pass.codegen.triton_ops import (
    CODE_TYPES,
    coded,
    column_in_head,
    expression,
    kernel_name,
    pointers,
)
from fp8pass.ops import padded

# Codes in a word.
WORD = 4

# Rows are held in slices: of n slices, slice i has rows i, i + n, i + 2n, ... of the tile.
_KERNEL = """
@triton.jit
def {name}({parameters}, M, M_PADDED, N,
          M_TILE: tl.constexpr, N_TILE: tl.constexpr, FULL: tl.constexpr):
    tiles_in_row = tl.cdiv(N, N_TILE)
    row_tile = tl.program_id(0) // tiles_in_row
    column_tile = tl.program_id(0) % tiles_in_row
    in_tile, column_in_tile = tl.arange(0, M_TILE // {slices}), tl.arange(0, N_TILE)
    column = column_tile * N_TILE + column_in_tile
    column_there = FULL | (column < N)
    # A matrix may have more elements than 32 bits count, a tile has not.
    first_row = (row_tile * M_TILE).to(tl.int64) * N
    first = first_row + column_tile * N_TILE
{body}
"""

_SLICE = """
in_tile_{i} = {slices} * in_tile + {i}
row_{i} = row_tile * M_TILE + in_tile_{i}
row_there_{i} = FULL | (row_{i} < M)
there_{i} = row_there_{i}[:, None] & column_there[None, :]
full_{i} = in_tile_{i}[:, None] * N + column_in_tile[None, :]
"""
_TRANSPOSED = """
in_column = row_tile * (M_TILE // {word}) + in_tile
place_there = column_there[:, None] & (FULL | (in_column < M_PADDED // {word}))[None, :]
"""

_LOADS = {
    "full": "{name} = tl.load({0} + first + full_{i}, there_{i}, other=0.0).to(tl.float32)",
    "row": "{name} = tl.load({0} + row_{i}, row_there_{i}, other=0.0).to(tl.float32)[:, None]",
    "column": "{name} = tl.load({0} + column, column_there, other=0.0).to(tl.float32)[None, :]",
    "scalar": "{name} = tl.load({0}).to(tl.float32)",
}
# Operands of which column c of a head is read from column (c + shift) mod head.
_ROLLED = {
    "full": "{name} = tl.load({0} + first_row + (in_tile_{i}[:, None] * N"
    " + (column // {head} * {head} + {column})[None, :]), there_{i}, other=0.0).to(tl.float32)",
    "table": "{name} = tl.load({0} + (row_{i}{repeats})[:, None] * {head}"
    " + {column}[None, :], there_{i}, other=0.0).to(tl.float32)",
}


def source(program: Program) -> str:
    """The Triton module of a program."""
    results = [f"out{i}" for i in range(sum(len(s.layouts) for s in program.stores))]
    transposes = any("columns" in store.layouts for store in program.stores)
    slices = WORD if transposes else 1
    body = [_SLICE.format(i=i, slices=slices) for i in range(slices)]
    body += [_TRANSPOSED.format(word=WORD)] * transposes
    for i in range(slices):
        body += _slice_lines(program, i)
    remaining = iter(results)
    for store in program.stores:
        body += _store_lines(store, [next(remaining) for _ in store.layouts], slices)
    lines = [f"    {line}" for part in body for line in part.strip("\n").splitlines()]
    parameters = [f"in{i}" for i in range(program.input_count)] + results
    return prelude() + _KERNEL.format(
        name=kernel_name("tiles", program),
        parameters=", ".join(parameters),
        slices=slices,
        body="\n".join(lines),
    )


def _slice_lines(program: Program, i: int) -> Iterator[str]:
    """Loads and steps of a slice, whose values are called `{name}_{i}`."""
    where = pointers(program)
    loads = {load.name: load for load in program.loads}
    for load in program.loads:
        yield from _load_lines(load, where[load], i)
    for step in program.steps:
        if step.target == "rolled":
            load = loads[step.args[0]]
            yield _rolled_line(replace(load, name=step.name), where[load], step.args[1:], i)
        else:
            args = tuple(f"{x}_{i}" if isinstance(x, str) else x for x in step.args)
            yield f"{step.name}_{i} = {expression(replace(step, args=args))}"


def _rolled_line(load: Load, where: list[str], roll: tuple[int, int], i: int) -> str:
    """Reads an operand with the columns of each head rolled."""
    return _ROLLED[load.operand].format(
        *where,
        name=f"{load.name}_{i}",
        head=roll[0],
        column=column_in_head(*roll),
        repeats=f" % {load.period}" if load.period else "",
        i=i,
    )


def _load_lines(load: Load, where: list[str], i: int) -> list[str]:
    name, size = f"{load.name}_{i}", load.group_size
    if load.operand == "table":
        return [_rolled_line(load, where, (load.head, 0), i)]
    if load.operand != "groups":
        return [_LOADS[load.operand].format(*where, name=name, i=i)]
    codes, scales = where
    first = f"{scales} + row_{i}.to(tl.int64) * (N // {size})"
    return [
        # A tile within one group has one scale in each row.
        f"if {size} % N_TILE == 0:",
        f"    {name}_scale = tl.load({first} + column_tile * N_TILE // {size}, row_there_{i},"
        " other=0.0).to(tl.float32)[:, None]",
        "else:",
        f"    {name}_scale = tl.load(({first})[:, None] + (column // {size})[None, :], there_{i},"
        " other=0.0).to(tl.float32)",
        f"{name} = tl.load({codes} + first + full_{i}, there_{i}, other=0.0).to(tl.float32)"
        f" * {name}_scale",
    ]


def _store_lines(store: Store, pointers_: list[str], slices: int) -> Iterator[str]:
    names = [f"{store.name}_{i}" for i in range(slices)]
    if store.layouts == ("amax",):
        (name,) = names  # in a program of its own, which transposes nothing
        magnitude = f"tl.where(there_0, tl.abs({name}), 0.0)"
        amax = f"tl.reduce(tl.reduce({magnitude}, 1, largest), 0, largest)"
        yield f"tl.store({pointers_[0]} + tl.program_id(0), {amax})"
        return
    for i, name in enumerate(names):
        # What pads a matrix must be zero, whatever the body makes of it.
        scale = f"{store.scale}_{i}"
        yield f"{name}_coded = tl.where(there_{i}, {coded(name, scale)}, 0.0)"
    for layout, pointer in zip(store.layouts, pointers_, strict=True):
        if layout == "rows":
            yield from _row_lines(store, pointer, names)
        else:
            yield from _column_lines(store, pointer, names)


def _row_lines(store: Store, pointer: str, names: list[str]) -> Iterator[str]:
    first = f"{pointer} + first"
    if store.width:
        row = f"(row_tile * M_TILE).to(tl.int64) * {store.width}"
        first = f"{pointer} + {row} + column_tile * N_TILE + {store.offset}"
    for i, name in enumerate(names):
        place = f"full_{i}"
        if store.width:
            row = f"({len(names)} * in_tile + {i})[:, None]"
            place = f"{row} * {store.width} + column_in_tile[None, :]"
        codes = f"{name}_coded.to({CODE_TYPES[store.format]})"
        yield f"tl.store({first} + {place}, {codes}, there_{i})"


def _column_lines(store: Store, pointer: str, names: list[str]) -> Iterator[str]:
    width = f"({store.width or 'M_PADDED'} // {WORD})"
    words = f"word_of({', '.join(f'{name}_coded' for name in names)})"
    first = f"(column_tile * N_TILE).to(tl.int64) * {width} + {store.offset // WORD}"
    place = f"column_in_tile[:, None] * {width} + in_column[None, :]"
    where = f"{pointer}.to(tl.pointer_type(tl.int32)) + {first} + {place}"
    yield f"tl.store({where}, tl.trans({words}), place_there)"


def prepare(program: Program, rows: Any, columns: int) -> Launch:
    """The kernel of a program, with the tiles that were fastest (`benchmarks/sweeps.py`).

    One that is stored as rows, too, is smaller: the codes of all its stores are held at once.
    """
    m, n = AMAX_TILE
    if any("rows" in store.layouts for store in program.stores):
        m = 32
    is_full = columns % n == 0 and compat.statically_known_true(rows % m == 0)
    tiles = compat.ceil_div(padded(rows), m) * compat.ceil_div(columns, n)
    return Launch(
        _kernel(program),
        grid=(tiles,),
        sizes={"M": rows, "M_PADDED": padded(rows), "N": columns},
        constants={"M_TILE": m, "N_TILE": n, "FULL": is_full},
        num_warps=8 if len(program.stores) > 2 and not measures(program) else 4,
    )


def measures(program: Program) -> bool:
    """Whether a program takes amaxes: of tiles of one size, and in a kernel of its own."""
    return any("amax" in store.layouts for store in program.stores)


@cache
def _kernel(program: Program) -> Any:
    return getattr(compat.load_source(source(program)), kernel_name("tiles", program))


tiles = define_kernel("tiles", prepare)
