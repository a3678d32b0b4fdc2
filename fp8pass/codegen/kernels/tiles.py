"""The Triton kernel of a program without reductions: reads a tile once, stores it in both layouts.

COAT G.3. A linear layer's operand in the backward is contracted over its rows by one GEMM and over
its columns by another, and FP8 tensor cores take one layout. What Inductor generates for a
transposed store moves 50 to 70% of what a copy does (`benchmarks/kernels.py`); this kernel, 85%:
neighbouring programs read neighbouring tiles of the same rows, and a thread packs the codes of four
rows into a word, so that shared memory, where they change layout, sees words instead of bytes. The
pointwise body is generated from the graph, so that any activation gets this kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fp8pass import compat
from fp8pass.codegen.kernels.launch import Function, Part
from fp8pass.codegen.kernels.limits import UnsupportedProgram, check_stores
from fp8pass.codegen.kernels.operator import define_kernel
from fp8pass.codegen.kernels.tile_source import TileWriter
from fp8pass.codegen.program.ir import AMAX_TILE, REDUCTIONS, Program
from fp8pass.dialect.coding import padded

# What is stored; codes are packed into words as E4M3.
LAYOUTS = frozenset({"rows", "columns", "amax"})
CODE_FORMATS = frozenset({"e4m3"})


def prepare(program: Program, rows: Any, columns: int) -> Part:
    """The kernel of a program, with the tiles that were fastest (`benchmarks/sweeps.py`).

    A tile that is also stored as rows is smaller: the codes of all stores are held at once.
    Raises UnsupportedProgram if this kernel cannot store or compute something.
    """
    check_stores("tile", program, layouts=LAYOUTS, formats=CODE_FORMATS)
    for step in program.steps:
        if step.target in REDUCTIONS:
            raise UnsupportedProgram(f"the tile kernel cannot compute {step.target} {step.name}")
    m, n = AMAX_TILE
    if any("rows" in store.layouts for store in program.stores):
        m = 32
    is_full = columns % n == 0 and compat.statically_known_true(rows % m == 0)
    tiles = compat.ceil_div(padded(rows), m) * compat.ceil_div(columns, n)
    return Part(
        function(program),
        grid=tiles,
        sizes={"M": rows, "M_PADDED": padded(rows), "N": columns},
        constants={"M_TILE": m, "N_TILE": n, "FULL": is_full},
        num_warps=8 if len(program.stores) > 2 and not program.takes_amaxes else 4,
    )


@cache
def function(program: Program) -> Function:
    """The Triton function of a program."""
    return TileWriter(program).write()


tiles = define_kernel("tiles", prepare)
