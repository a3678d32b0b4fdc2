"""Check that programs are well formed.

Kernels of malformed programs would compute wrong results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.codegen.program.ir import (
    BLOCKS,
    IS_COLUMN,
    OPERAND_KINDS,
    REDUCTION_STEPS,
    ROW_EXP_SUM,
    SQUARE_BLOCK,
    TILE_REDUCTIONS,
    Load,
    Program,
    Step,
    Store,
)
from fp8pass.config import BUG
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.pointwise import triton_template

# The fields that each layout requires, except `width` and `offset`.
_FIELDS: dict[str, frozenset[str]] = {
    "rows": frozenset({"scale", "format"}),
    "columns": frozenset({"format"}),
    "groups": frozenset({"format", "group_size"}),
    "full": frozenset({"dtype"}),
    "row": frozenset({"dtype"}),
    "sums": frozenset(),
    "amax": frozenset(),
    "tile_sums": frozenset(),
}
# Values of `columns` that are already divided by their scale do not have a `scale`. Sums of FP32
# values do not have a `dtype`.
_OPTIONAL: dict[str, frozenset[str]] = {
    "columns": frozenset({"scale"}),
    "tile_sums": frozenset({"dtype"}),
    "groups": frozenset({"scale_form"}),
}
_QUANTIZED = frozenset({"rows", "columns"})


class MalformedProgram(AssertionError):
    """A program violates a rule. The message names the load, step or store."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def verify(program: Program, inputs: Sequence[Tensor] | None = None) -> None:
    """Raise MalformedProgram unless a program is well formed.

    - Every value is defined once, before its uses.
    - The program reads a matrix. Every operand is one of `OPERAND_KINDS`. Parts lie within
      matrices.
    - Kernels support every step. Reductions have one operand.
    - The program stores a value. Stores have known layouts, and the fields that these layouts
      require.
    - Values stored as `row`, and the scales of quantized matrices, do not vary along a row.
    - A program that stores amaxes or sums of tiles does not store anything else.
    - A value that is stored as `full` several times has the same dtype each time.
    - If `inputs` are given: group sizes divide rows, and parts fit into wider matrices.
    """
    defined: set[str] = set()
    varying: set[str] = set()
    for load in program.loads:
        _verify_load(load)
        _define(load, defined)
        if load.operand in ("column", "full", "groups"):
            varying.add(load.name)
    matrices = [load for load in program.loads if load.operand in ("full", "groups")]
    _require(bool(matrices), "the program", "reads no matrix")
    for step in program.steps:
        operands = _verify_step(step, defined)
        _define(step, defined)
        if step.target == ROW_EXP_SUM:
            value, largest = operands
            is_largest = Step(largest, "row_max", (value,)) in program.steps
            _require(is_largest, step, f"{largest} is not the maximum of each row of {value}")
            equal = [s for s in program.steps if s.target == ROW_EXP_SUM and s.args == step.args]
            _require(len(equal) == 1, step, "is computed twice")
        if step.target == IS_COLUMN:
            same = varying.isdisjoint(operands)
            _require(same, step, "compares columns with a value that varies along a row")
            varying.add(step.name)
        elif step.target not in REDUCTION_STEPS and not varying.isdisjoint(operands):
            varying.add(step.name)
    _require(bool(program.stores), "the program", "stores nothing")
    for store in program.stores:
        _verify_store(store, defined, varying)
    _verify_together(program)
    if inputs is not None:
        _verify_sizes(program, inputs)


def _define(definition: Load | Step, defined: set[str]) -> None:
    _require(definition.name not in defined, definition, "is defined twice")
    defined.add(definition.name)


def _verify_load(load: Load) -> None:
    _require(load.operand in OPERAND_KINDS, load, f"unknown operand '{load.operand}'")
    is_grouped = load.operand == "groups"
    _require(is_grouped == (load.group_size > 0), load, f"has groups of {load.group_size}")
    if is_grouped:
        _verify_format(load, load.format)
    else:
        _require(not load.format, load, "has a format, which only groups have")
    if load.width:
        _verify_part(load)
    else:
        _require(not load.columns and not load.offset, load, "is a part, but has no width")


def _verify_part(load: Load) -> None:
    is_matrix = load.operand in ("full", "groups") and not load.packed
    _require(is_matrix, load, "is a part of a matrix, but only unpacked matrices can have parts")
    inside = 0 <= load.offset <= load.offset + load.columns <= load.width and load.columns > 0
    _require(inside, load, f"lies outside of {load.width} columns")
    size = load.group_size or 1
    whole = load.offset % size == load.width % size == 0
    _require(whole, load, f"cuts groups of {size}")


def _verify_step(step: Step, defined: set[str]) -> list[str]:
    """Return the names of the operands."""
    arguments = step.args
    if step.target == "scale":
        _require(len(arguments) == 2, step, "needs an amax and a format")
        _verify_format(step, arguments[1])
        arguments = arguments[:1]
    operands = [x for x in arguments if isinstance(x, str)]
    for operand in operands:
        _require(operand in defined, step, f"uses {operand}, which is not defined before")
    if step.target in ("scale", IS_COLUMN, *REDUCTION_STEPS):
        count, takes = (2, "two values") if step.target == ROW_EXP_SUM else (1, "one value")
        _require(len(operands) == len(arguments) == count, step, f"takes {takes}")
    else:
        known = triton_template(step.target, arguments) is not None
        _require(known, step, "is not an operator that kernels compute")
    return operands


def _verify_format(where: Load | Step | Store, format: Any) -> None:
    known = format in FORMATS and not FORMATS[format].lossless
    _require(known, where, f"'{format}' is not a format of quantized data")


def _verify_store(store: Store, defined: set[str], varying: set[str]) -> None:
    _require(store.name in defined, store, "is not defined")
    _require(bool(store.layouts), store, "has no layout")
    for layout in store.layouts:
        _require(layout in _FIELDS, store, f"unknown layout '{layout}'")
    alone = len(store.layouts) == 1 or _QUANTIZED.issuperset(store.layouts)
    distinct = len(set(store.layouts)) == len(store.layouts)
    _require(alone and distinct, store, f"{' and '.join(store.layouts)} are not stored together")
    _verify_fields(store)
    if store.format:
        _verify_format(store, store.format)
    if store.dtype:
        dtype = getattr(torch, store.dtype, None)
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        _require(is_float, store, f"'{store.dtype}' is not a floating point dtype")
    if store.scale:
        _require(store.scale in defined, store, f"its scale {store.scale} is not defined")
        _require(store.scale not in varying, store, f"its scale {store.scale} varies along a row")
    if store.layouts == ("row",):
        _require(store.name not in varying, store, "varies along a row")


def _verify_fields(store: Store) -> None:
    layout = store.layouts[0]
    needed = frozenset[str]().union(*(_FIELDS[x] for x in store.layouts))
    allowed = needed | _OPTIONAL.get(layout, frozenset())
    if store.block:
        layouts = _QUANTIZED if store.block == SQUARE_BLOCK else {"rows"}
        is_known = store.block in BLOCKS and layouts.issuperset(store.layouts)
        _require(is_known, store, f"has blocks {store.block}, which {layout} do not take")
        needed, allowed = frozenset({"format"}), frozenset({"format"})
    for name in ("scale", "format", "group_size", "scale_form", "dtype"):
        has = bool(getattr(store, name))
        _require(has or name not in needed, store, f"has no {name}")
        _require(not has or name in allowed, store, f"has a {name}, which {layout} do not take")
    if not store.width:
        _require(not store.offset, store, "has an offset, but no width")
        return
    is_alone = store.layouts in (("rows",), ("columns",))
    _require(
        is_alone, store, "is stored in a wider matrix, which needs exactly one quantized layout"
    )
    _require(0 <= store.offset < store.width, store, f"lies outside of {store.width} columns")
    if layout == "columns":
        whole = store.offset % CONTRACTION_MULTIPLE == store.width % CONTRACTION_MULTIPLE == 0
        _require(whole, store, f"its columns do not start at a multiple of {CONTRACTION_MULTIPLE}")


def _verify_together(program: Program) -> None:
    rounded: dict[str, str] = {}
    for store in program.stores:
        if program.reduces_tiles:
            reduces = TILE_REDUCTIONS.issuperset(store.layouts)
            _require(reduces, store, "is stored together with amaxes or sums of tiles")
        if store.layouts == ("full",):
            dtype = rounded.setdefault(store.name, store.dtype)
            _require(dtype == store.dtype, store, f"is rounded to {dtype}, too")


def _verify_sizes(program: Program, inputs: Sequence[Tensor]) -> None:
    count = program.input_count
    _require(len(inputs) == count, "the program", f"reads {count} tensors, not {len(inputs)}")
    rows, columns = program.sizes([x.shape for x in inputs])
    grouped: list[Load | Store] = [*program.loads, *program.stores]
    for store in program.stores:
        for side, size in zip(BLOCKS.get(store.block, ()), (rows, columns), strict=False):
            divides = not isinstance(size, int) or size % side == 0
            _require(divides, store, f"blocks {store.block} do not divide {rows}×{columns}")
    for x in grouped:
        divides = not x.group_size or columns % x.group_size == 0
        _require(divides, x, f"groups of {x.group_size} do not divide {columns} columns")
    tensors = iter(inputs)
    for load in program.loads:
        fits = load.columns in (0, columns)
        _require(fits, load, f"has {load.columns} columns instead of {columns}")
        *data, last = (next(tensors) for _ in range(load.tensor_count))
        for plane in data:
            _verify_width(load, plane, load.width)
        _verify_width(load, last, load.width // load.group_size if data else load.width)
    for store in program.stores:
        fits = store.layouts != ("rows",) or store.offset + columns <= (store.width or columns)
        _require(fits, store, f"{columns} columns do not fit into the wider matrix")


def _verify_width(load: Load, x: Tensor, width: int) -> None:
    """If the load reads some columns of a wider matrix, check the width of this matrix."""
    if load.width:
        found = x.shape[-1]
        _require(found == width, load, f"is a part of {width} columns, but its tensor has {found}")


def _require(condition: bool, where: Load | Step | Store | str, problem: str) -> None:
    if not condition:
        raise MalformedProgram(f"{_describe(where)}: {problem}")


def _describe(where: Load | Step | Store | str) -> str:
    if isinstance(where, str):
        return where
    if isinstance(where, Load):
        return f"load {where.name} ({where.operand})"
    if isinstance(where, Step):
        return f"step {where.name} = {where.target}({', '.join(map(str, where.args))})"
    return f"store of {where.name} ({', '.join(where.layouts)})"
