"""The tile kernel: computes programs without reductions, and can store the result in two layouts.

FP8 tensor cores contract only the last dimension. The kernel stores operands that GEMMs contract
over rows and over columns in both layouts (section G.3 of the COAT paper). It reaches 85% of the
bandwidth of a copy; Inductor reaches 50 to 70% (`benchmarks/kernels.py`). A thread packs elements
of four rows into a 32-bit word, because shared memory transposes words faster than bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.kernels.kernel_operator import define_kernel
from fp8pass.codegen.kernels.launch import Function, LaunchPart
from fp8pass.codegen.kernels.supported import UnsupportedProgram, check_stores
from fp8pass.codegen.kernels.tile_source import TileWriter
from fp8pass.codegen.kernels.triton_ops import TRITON_TYPES
from fp8pass.codegen.program.ir import AMAX_TILE, IS_COLUMN, REDUCTION_STEPS, SIDE, Program
from fp8pass.dialect.encoding import padded_size
from fp8pass.graph.nodes import tensor

# Transposed stores support E4M3 only.
FORMATS_BY_LAYOUT: dict[str, frozenset[str]] = {
    "rows": frozenset(TRITON_TYPES),
    "columns": frozenset({"e4m3"}),
    "amax": frozenset(),
    "tile_sums": frozenset(),
}


def prepare(program: Program, rows: Any, columns: int) -> LaunchPart:
    """Choose the tile size that was fastest in `sweeps.json`.

    Tiles are smaller for layout `rows`, because a thread holds the data of all stores at once.
    Raises UnsupportedProgram if this kernel does not support a store or step.
    """
    check_stores("tile", program, FORMATS_BY_LAYOUT)
    for step in program.steps:
        if step.target in (IS_COLUMN, *REDUCTION_STEPS):
            raise UnsupportedProgram(f"the tile kernel cannot compute {step.target} {step.name}")
    m, n = AMAX_TILE
    if program.has_squares:
        m = SIDE
    elif any("rows" in store.layouts for store in program.stores):
        m = 32
    is_full = columns % n == 0 and compat.statically_known_true(rows % m == 0)
    tiles = compat.ceil_div(padded_size(rows), m) * compat.ceil_div(columns, n)
    return LaunchPart(
        write(program),
        grid=tiles,
        sizes={"M": rows, "M_PADDED": padded_size(rows), "N": columns},
        constants={"M_TILE": m, "N_TILE": n, "FULL": is_full},
        num_warps=_choose_warps(program),
    )


def _choose_warps(program: Program) -> int:
    if program.has_squares:
        return 16
    return 8 if len(program.stores) > 2 and not program.reduces_tiles else 4


@cache
def write(program: Program) -> Function:
    return TileWriter(program).write()


tiles = define_kernel("tiles", prepare)


def holds_amaxes(x: fx.Node) -> bool:
    """Whether the elements of `x`, an operand of `amax`, are already amaxes of rows or tiles."""
    columns = tensor(x).shape[-1]
    if isinstance(columns, int) and columns == 1:
        return True
    kernel = x.args[0] if graph.is_getitem(x) else None
    return isinstance(kernel, fx.Node) and kernel.target is tiles
