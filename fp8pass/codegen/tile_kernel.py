"""The Triton kernel of a program without reductions: reads a tile once, stores it in both layouts.

COAT G.3. A linear layer's operand in the backward is contracted over its rows by one GEMM and over
its columns by another, and FP8 tensor cores take one layout. What Inductor generates for a
transposed store moves 50 to 70% of what a copy does (`benchmarks/kernels.py`); this kernel, 85%:
neighbouring programs read neighbouring tiles of the same rows, and codes change layout in shared
memory, a byte each. The pointwise body is generated from the graph, so that any activation gets
this kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fp8pass import compat
from fp8pass.codegen.kernel_op import Launch, define_kernel
from fp8pass.codegen.program import AMAX_TILE, Load, Program, Store
from fp8pass.codegen.triton_ops import CODE_TYPES, PRELUDE, coded, expression, kernel_name, pointers
from fp8pass.ops import padded

_KERNEL = """
@triton.jit
def {name}({parameters}, M, M_PADDED, N,
          M_TILE: tl.constexpr, N_TILE: tl.constexpr, FULL: tl.constexpr):
    tiles_in_row = tl.cdiv(N, N_TILE)
    row_tile = tl.program_id(0) // tiles_in_row
    column_tile = tl.program_id(0) % tiles_in_row
    in_tile, column_in_tile = tl.arange(0, M_TILE), tl.arange(0, N_TILE)
    row = row_tile * M_TILE + in_tile
    column = column_tile * N_TILE + column_in_tile
    row_there, column_there = FULL | (row < M), FULL | (column < N)
    there = row_there[:, None] & column_there[None, :]
    transposed_there = column_there[:, None] & (FULL | (row < M_PADDED))[None, :]
    # A matrix may have more elements than 32 bits count, a tile has not.
    first = (row_tile * M_TILE).to(tl.int64) * N + column_tile * N_TILE
    full = in_tile[:, None] * N + column_in_tile[None, :]
    first_transposed = (column_tile * N_TILE).to(tl.int64) * M_PADDED + row_tile * M_TILE
    transposed = column_in_tile[:, None] * M_PADDED + in_tile[None, :]
{body}
"""

_LOADS = {
    "full": "{name} = tl.load({0} + first + full, there, other=0.0).to(tl.float32)",
    "row": "{name} = tl.load({0} + row, row_there, other=0.0).to(tl.float32)[:, None]",
    "column": "{name} = tl.load({0} + column, column_there, other=0.0).to(tl.float32)[None, :]",
    "scalar": "{name} = tl.load({0}).to(tl.float32)",
}


def source(program: Program) -> str:
    """The Triton module of a program."""
    results = [f"out{i}" for i in range(sum(len(s.layouts) for s in program.stores))]
    parameters = [f"in{i}" for i in range(program.input_count)] + results
    where = pointers(program)
    body = [line for load in program.loads for line in _load_lines(load, where[load])]
    body += [f"{step.name} = {expression(step)}" for step in program.steps]
    remaining = iter(results)
    for store in program.stores:
        body += _store_lines(store, [next(remaining) for _ in store.layouts])
    lines = "\n".join(f"    {line}" for line in body)
    name = kernel_name("tiles", program)
    return PRELUDE + _KERNEL.format(name=name, parameters=", ".join(parameters), body=lines)


def _load_lines(load: Load, where: list[str]) -> list[str]:
    if load.operand != "groups":
        return [_LOADS[load.operand].format(*where, name=load.name)]
    name, size = load.name, load.group_size
    codes, scales = where
    first = f"{scales} + row.to(tl.int64) * (N // {size})"
    return [
        # A tile within one group has one scale in each row.
        f"if {size} % N_TILE == 0:",
        f"    {name}_scale = tl.load({first} + column_tile * N_TILE // {size}, row_there,"
        " other=0.0).to(tl.float32)[:, None]",
        "else:",
        f"    {name}_scale = tl.load(({first})[:, None] + (column // {size})[None, :], there,"
        " other=0.0).to(tl.float32)",
        f"{name} = tl.load({codes} + first + full, there, other=0.0).to(tl.float32) * {name}_scale",
    ]


def _store_lines(store: Store, pointers_: list[str]) -> list[str]:
    if store.layouts == ("amax",):
        magnitude = f"tl.where(there, tl.abs({store.name}), 0.0)"
        amax = f"tl.reduce(tl.reduce({magnitude}, 1, largest), 0, largest)"
        return [f"tl.store({pointers_[0]} + tl.program_id(0), {amax})"]
    name = f"{store.name}_codes"
    lines = [
        f"{name} = {coded(store.name, store.scale)}",
        # What pads a matrix must be zero, whatever the body makes of it.
        f"{name} = tl.where(there, {name}, 0.0).to({CODE_TYPES[store.format]})",
    ]
    for layout, pointer in zip(store.layouts, pointers_, strict=True):
        if layout == "rows":
            lines.append(f"tl.store({pointer} + first + full, {name}, there)")
        else:
            where = f"{pointer} + first_transposed + transposed"
            lines.append(f"tl.store({where}, tl.trans({name}), transposed_there)")
    return lines


def prepare(program: Program, rows: Any, columns: int) -> Launch:
    """The kernel of a program, with the tiles that were fastest on the H200.

    A tile that stores many results is smaller, or their codes do not fit in registers.
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
        num_warps=8 if len(program.stores) > 2 else 4,
    )


@cache
def _kernel(program: Program) -> Any:
    return getattr(compat.load_source(source(program)), kernel_name("tiles", program))


tiles = define_kernel("tiles", prepare)
