"""Programs: descriptions of fused kernels that compute an [M, N] matrix.

A `Program` lists what a kernel reads (loads), computes (steps) and writes (stores), as plain data
that graphs and caches can contain. All values are fp32, and rounded only if they are stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.dialect.encoding import padded_size
from fp8pass.dialect.formats import FORMATS
from fp8pass.dialect.quantization import Quantization, group

# Operands of the first four kinds are broadcast from shape [], [N], [M, 1] or [M, N]. `groups`
# consist of several tensors: quantized data [M, N], or packed planes [M, N w / 8] with w bits of
# each element, and then scales [M, N / G].
OPERAND_KINDS = ("scalar", "column", "row", "full", "groups")
# Rows and columns of the elements that share a scale, by `Store.block`.
SIDE = 128
ROW_BLOCK, SQUARE_BLOCK = f"1×{SIDE}", f"{SIDE}×{SIDE}"
BLOCKS = {ROW_BLOCK: (1, SIDE), SQUARE_BLOCK: (SIDE, SIDE)}
# Rows and columns of a tile.
AMAX_TILE = 64, 128
# Layouts whose stores reduce tiles of this size.
TILE_REDUCTIONS = frozenset({"amax", "tile_sums"})
# Partial sum i adds rows i, i + 1024, ...
PARTIAL_SUMS = 1024
# `ROW_EXP_SUM` sums exp(x - max) over each row; its operands are x and the row's `row_max`.
ROW_EXP_SUM = "row_exp_sum"
# Reductions along rows, with results [M, 1].
REDUCTION_STEPS = ("row_sum", "row_amax", "row_max", ROW_EXP_SUM)
# Given a column number for each row: whether an element of the row is in that column.
IS_COLUMN = "is_column"


class NotAMatrix(Exception):
    """A value cannot be broadcast to the matrix that a kernel computes."""


@dataclass(frozen=True)
class Load:
    """Reads the value `name` from memory. `operand` is one of `OPERAND_KINDS`.

    Only `groups` have a `group_size` (in elements) and a `format`. A *part* has `columns` columns,
    from `offset`, of a matrix with `width` columns.
    """

    name: str
    operand: str
    group_size: int = 0
    format: str = ""
    columns: int = 0
    width: int = 0
    offset: int = 0

    @property
    def packed(self) -> bool:
        return bool(self.format) and FORMATS[self.format].packed

    @property
    def tensor_count(self) -> int:
        return len(FORMATS[self.format].planes) + 1 if self.format else 1


@dataclass(frozen=True)
class Step:
    """`name = target(*args)`. Arguments are names of values, or constants.

    The target is a pointwise aten operator, one of `REDUCTION_STEPS`, `IS_COLUMN` (numbers of
    columns, below 2^24), or `scale` (amax, format).
    """

    name: str
    target: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Store:
    """Stores the value `name`, once in each of `layouts`.

    `rows`     quantized data [M, N]; `scale` has one value, or one value for each row
    `columns`  the transposed data [N, M'], where M' is M padded with zeros to a length that GEMMs
               support; `scale` is '' if the values are already divided by their scale
    `amax`     the largest magnitude of each tile (`AMAX_TILE`), fp32 [M / 64, N / 128]
    `tile_sums`  sums over the rows of each tile, fp32 [M / 64, N]; the values are rounded to
               `dtype` first, unless it is ''
    `groups`   quantized data [M, N], or packed planes [M, N w / 8] with w bits of each element,
               then scales [M, N / G]: bf16, or powers of two in fp32 with `scale_form` fp32
    `full`     the value, [M, N] in `dtype`; later steps use the rounded value
    `row`      a value for each row, [M, 1] in `dtype`
    `sums`     sums over every `PARTIAL_SUMS`-th row, fp32 [PARTIAL_SUMS, N]

    `rows` and `columns` may be a part, at column `offset`, of a matrix with `width` columns.

    With a `block`, out of `BLOCKS`, the kernel computes the scales: fp32 powers of two. They follow
    the data: [N / 128, M] for 1×128 elements of `rows`, and [M / 128, N / 128] for 128×128 elements
    of `rows` and `columns`.
    """

    name: str
    layouts: tuple[str, ...]
    scale: str = ""
    format: str = ""
    group_size: int = 0
    scale_form: str = ""
    block: str = ""
    dtype: str = ""
    width: int = 0
    offset: int = 0

    @property
    def grouped(self) -> Quantization:
        """The quantization of layout `groups`."""
        return Quantization(FORMATS[self.format], group(self.group_size), self.scale_form)

    def tensor_count(self, layout: str) -> int:
        return len(FORMATS[self.format].planes) + 1 if layout == "groups" else 1

    @property
    def result_count(self) -> int:
        return sum(map(self.tensor_count, self.layouts)) + bool(self.block)

    @property
    def are_parts(self) -> list[bool]:
        """For each result, whether it is a part of a wider matrix. Scales of blocks are whole."""
        data = self.result_count - bool(self.block)
        return [bool(self.width)] * data + [False] * bool(self.block)

    def scale_shape(self, rows: Any, columns: int) -> tuple[Any, Any]:
        """Return the shape of the scales of blocks."""
        if self.block == ROW_BLOCK:
            return columns // SIDE, rows
        return rows // SIDE, columns // SIDE


@dataclass(frozen=True)
class Program:
    """A program runs its loads, then its steps, then its stores."""

    loads: tuple[Load, ...]
    steps: tuple[Step, ...]
    stores: tuple[Store, ...]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    @cache
    def parse(text: str) -> Program:
        data = json.loads(text)
        return Program(
            tuple(Load(**x) for x in data["loads"]),
            tuple(Step(x["name"], x["target"], tuple(x["args"])) for x in data["steps"]),
            tuple(Store(**{**x, "layouts": tuple(x["layouts"])}) for x in data["stores"]),
        )

    def canonical(self) -> Program:
        """Rename values to v0, v1, ..., so that repeated layers have equal programs and kernels."""
        names = [x.name for x in self.loads] + [x.name for x in self.steps]
        new = {name: f"v{i}" for i, name in enumerate(names)}
        return Program(
            tuple(replace(x, name=new[x.name]) for x in self.loads),
            tuple(replace(x, name=new[x.name], args=_rename(x.args, new)) for x in self.steps),
            tuple(replace(x, name=new[x.name], scale=new.get(x.scale, "")) for x in self.stores),
        )

    @property
    def stores_of_results(self) -> list[int]:
        """For each result, the index of the store that writes it."""
        return [i for i, store in enumerate(self.stores) for _ in range(store.result_count)]

    @property
    def finishes_amax(self) -> bool:
        """Whether this program is the second stage of an amax."""
        return all(store.layouts == ("row",) for store in self.stores)

    @property
    def reduces_tiles(self) -> bool:
        """Whether the stores reduce tiles. Such a program does not store anything else."""
        return any(not TILE_REDUCTIONS.isdisjoint(store.layouts) for store in self.stores)

    @property
    def has_squares(self) -> bool:
        """Whether the kernel computes scales of 128×128 elements."""
        return any(store.block == SQUARE_BLOCK for store in self.stores)

    @property
    def input_count(self) -> int:
        return sum(load.tensor_count for load in self.loads)

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
        matrices = ((i, x) for i, x in enumerate(self.loads) if x.operand in ("full", "groups"))
        i, load = next(matrices)  # load i reads input i, because each earlier load reads one tensor
        *leading, columns = shapes[i]
        width = FORMATS[load.format].planes[0] if load.packed else 8
        return math.prod(leading), load.columns or columns * 8 // width

    def empty_outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        rows, columns = self.sizes([x.shape for x in inputs])
        outputs = []
        for store in self.stores:
            quantized = FORMATS[store.format].dtype if store.format else None
            value = getattr(torch, store.dtype) if store.dtype else None
            for layout in store.layouts:
                shapes: dict[str, list[tuple[Any, Any]]] = {
                    "rows": [((rows, store.width or columns), quantized)],
                    "columns": [((columns, store.width or padded_size(rows)), quantized)],
                    "sums": [((PARTIAL_SUMS, columns), torch.float32)],
                    "amax": [(count_tiles(rows, columns), torch.float32)],
                    "tile_sums": [((count_tiles(rows, columns)[0], columns), torch.float32)],
                    "full": [((rows, columns), value)],
                    "row": [((rows, 1), value)],
                }
                if layout == "groups":
                    planes = FORMATS[store.format].planes
                    scales = (rows, columns // store.group_size), store.grouped.scale_dtype
                    data = [((rows, columns * width // 8), quantized) for width in planes]
                    shapes["groups"] = [*data, scales]
                outputs += [inputs[0].new_empty(s, dtype=d) for s, d in shapes[layout]]
            if store.block:
                shape = store.scale_shape(rows, columns)
                outputs.append(inputs[0].new_empty(shape, dtype=torch.float32))
        return outputs


def count_tiles(rows: Any, columns: int) -> tuple[Any, int]:
    return compat.ceil_div(rows, AMAX_TILE[0]), compat.ceil_div(columns, AMAX_TILE[1])


def _rename(args: tuple[Any, ...], new: dict[str, str]) -> tuple[Any, ...]:
    return tuple(new.get(x, x) if isinstance(x, str) else x for x in args)
