"""What a fused kernel computes: operators on an [M, N] matrix, and what of it to store.

A `Program` is plain data, so that it travels as a string through graphs and caches. It is read off
FX nodes by `reader.py`; `reference` here says what it means, in fp32 and plain PyTorch, and
`tile_kernel.py` and `row_kernel.py` write Triton kernels that compute it. Values are fp32 and not
rounded in between, as in Inductor's kernels, unless they are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.formats import FORMATS, GROUP_SCALE_DTYPE
from fp8pass.ops import encode, group_scale, padded, quantize_groups, scale_of, transpose

# How an operand lies in the matrix. `groups` is a pair: codes like `full`, and the scales of groups
# along its rows, [M, N / G].
OPERANDS = ("scalar", "column", "row", "full", "groups")
# Rows and columns over which the first stage of an amax goes.
AMAX_TILE = 64, 128
# Programs that sum over rows, each over its own, so that the order of the sum is always the same.
PARTIAL_SUMS = 1024


class NotAMatrix(Exception):
    """A value does not lie in the matrix that a kernel works on."""


@dataclass(frozen=True)
class Load:
    """An operand of one of `OPERANDS`, value `name`; `group_size` is only of `groups`."""

    name: str
    operand: str
    group_size: int = 0


@dataclass(frozen=True)
class Step:
    """`name = target(*args)`: an operator on values (their names) and constants.

    An aten operator, or one of `ROW_OPERATORS`, whose result is a value for each row.
    """

    name: str
    target: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Store:
    """What is kept of the value `name`, one tensor for each of `layouts`.

    `rows`     codes [M, N], `scale` being a scalar or a value for each row
    `columns`  their transpose [N, M'], M' being M padded with zeros to what GEMMs contract
    `amax`     largest magnitudes of tiles of `AMAX_TILE`, fp32 [M / 64, N / 128]
    `groups`   codes [M, N] and bf16 scales [M, N / G] of groups: two tensors
    `full`     the value, [M, N] in `dtype`; what follows uses the rounded value
    `row`      a value for each row, [M, 1] in `dtype`
    `sums`     sums over every `PARTIAL_SUMS`-th row, fp32 [PARTIAL_SUMS, N]

    Codes in `rows` or `columns` may lie in a matrix of `width` columns, from column `offset` on,
    beside what other programs store there (`batch.py`).
    """

    name: str
    layouts: tuple[str, ...]
    scale: str = ""
    format: str = ""
    group_size: int = 0
    dtype: str = ""
    width: int = 0
    offset: int = 0

    @property
    def result_count(self) -> int:
        """How many tensors are stored."""
        return len(self.layouts) + ("groups" in self.layouts)


@dataclass(frozen=True)
class Program:
    """Loads, then steps, then stores."""

    loads: tuple[Load, ...]
    steps: tuple[Step, ...]
    stores: tuple[Store, ...]

    def dumps(self) -> str:
        """The program as text."""
        return json.dumps(asdict(self))

    @staticmethod
    @cache
    def parse(text: str) -> Program:
        """The program that `dumps` wrote."""
        data = json.loads(text)
        return Program(
            tuple(Load(**x) for x in data["loads"]),
            tuple(Step(x["name"], x["target"], tuple(x["args"])) for x in data["steps"]),
            tuple(Store(**{**x, "layouts": tuple(x["layouts"])}) for x in data["stores"]),
        )

    def canonical(self) -> Program:
        """The program with values numbered, so that layers that are alike share a kernel."""
        names = [x.name for x in self.loads] + [x.name for x in self.steps]
        new = {name: f"v{i}" for i, name in enumerate(names)}
        return Program(
            tuple(replace(x, name=new[x.name]) for x in self.loads),
            tuple(replace(x, name=new[x.name], args=_renamed(x.args, new)) for x in self.steps),
            tuple(replace(x, name=new[x.name], scale=new.get(x.scale, "")) for x in self.stores),
        )

    @property
    def finishes_amax(self) -> bool:
        """Whether all that is stored are numbers of rows: an amax of what kernels left of it."""
        return all(store.layouts == ("row",) for store in self.stores)

    @property
    def takes_amaxes(self) -> bool:
        """Whether amaxes of tiles are stored, by a kernel of its own, with tiles of one size."""
        return any("amax" in store.layouts for store in self.stores)

    @property
    def input_count(self) -> int:
        """How many tensors a program reads."""
        return sum(2 if load.operand == "groups" else 1 for load in self.loads)

    @property
    def matrix_input(self) -> int:
        """Index of the first input that is a matrix; before it, every operand is one tensor."""
        kinds = [load.operand for load in self.loads]
        return min(kinds.index(kind) for kind in ("full", "groups") if kind in kinds)

    def sizes(self, inputs: Sequence[Tensor]) -> tuple[Any, int]:
        """M and N."""
        x = inputs[self.matrix_input]
        return x.numel() // x.shape[-1], x.shape[-1]

    def empty_outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialized results."""
        rows, columns = self.sizes(inputs)
        outputs = []
        for store in self.stores:
            code = FORMATS[store.format].dtype if store.format else None
            value = getattr(torch, store.dtype) if store.dtype else None
            for layout in store.layouts:
                shapes: dict[str, list[tuple[Any, Any]]] = {
                    "rows": [((rows, store.width or columns), code)],
                    "columns": [((columns, store.width or padded(rows)), code)],
                    "sums": [((PARTIAL_SUMS, columns), torch.float32)],
                    "amax": [(amax_shape(rows, columns), torch.float32)],
                    "full": [((rows, columns), value)],
                    "row": [((rows, 1), value)],
                }
                if layout == "groups":
                    scales = (rows, columns // store.group_size)
                    shapes["groups"] = [((rows, columns), code), (scales, GROUP_SCALE_DTYPE)]
                outputs += [inputs[0].new_empty(s, dtype=d) for s, d in shapes[layout]]
        return outputs


def amax_shape(rows: Any, columns: int) -> tuple[Any, int]:
    """How many tiles of `AMAX_TILE` a matrix has, in both dimensions."""
    return compat.ceil_div(rows, AMAX_TILE[0]), compat.ceil_div(columns, AMAX_TILE[1])


def _renamed(args: tuple[Any, ...], new: dict[str, str]) -> tuple[Any, ...]:
    return tuple(new.get(x, x) if isinstance(x, str) else x for x in args)


REDUCTIONS = ("row_sum", "row_amax")
# Reductions over rows, and the scale of what they give.
ROW_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "row_sum": lambda x: x.sum(-1, keepdim=True),
    "row_amax": lambda x: x.abs().amax(-1, keepdim=True),
    "scale": lambda amax, format: scale_of(amax, FORMATS[format]),
}


# `aten.where.self` takes no numbers.
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    **ROW_OPERATORS,
    "aten.where.self": torch.where,
}


def operator_named(target: str) -> Any:
    """`aten.mul.Tensor` -> torch.ops.aten.mul.Tensor."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def reference(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a program, computed operator by operator."""
    rows, columns = program.sizes(inputs)
    values = _loaded(program, inputs, columns)
    rounded = {s.name: getattr(torch, s.dtype) for s in program.stores if "full" in s.layouts}
    for name in set(rounded) & set(values):
        values[name] = values[name].to(rounded[name]).float()
    for step in program.steps:
        args: list[Any] = [values.get(x, x) if isinstance(x, str) else x for x in step.args]
        if step.target in REDUCTIONS:
            args[0] = args[0].expand(rows, columns)
        found = (_OPERATORS.get(step.target) or operator_named(step.target))(*args)
        name = step.name
        values[name] = found.to(rounded[name]).float() if name in rounded else found
    results: list[Tensor] = []
    for store in program.stores:
        value = values[store.name]
        for layout in store.layouts:
            results += _stored(store, layout, value, values, (rows, columns))
    return results


def _stored(
    store: Store, layout: str, value: Tensor, values: dict[str, Tensor], size: tuple[int, int]
) -> list[Tensor]:
    if layout == "row":
        return [value.to(getattr(torch, store.dtype)).expand(size[0], 1).contiguous()]
    value = value.expand(size)
    if layout == "full":
        return [value.to(getattr(torch, store.dtype)).contiguous()]
    if layout == "amax":
        return [_amax_of_tiles(value)]
    if layout == "sums":
        padding = (0, 0, 0, -size[0] % PARTIAL_SUMS)
        rows = torch.nn.functional.pad(value, padding).reshape(-1, PARTIAL_SUMS, size[1])
        return [rows.sum(0)]
    if layout == "groups":
        scales = group_scale(value, store.format, store.group_size)
        return [quantize_groups(value, scales, store.format, store.group_size), scales]
    codes = encode(value * values[store.scale].reciprocal(), FORMATS[store.format]).contiguous()
    return [codes if layout == "rows" else transpose(codes)]


def _amax_of_tiles(value: Tensor) -> Tensor:
    (m, n), (rows, columns) = AMAX_TILE, value.shape
    down, across = amax_shape(rows, columns)
    padding = (0, across * n - columns, 0, down * m - rows)
    tiles = torch.nn.functional.pad(value.abs(), padding).reshape(down, m, across, n)
    return tiles.amax(dim=(1, 3))


def _loaded(program: Program, inputs: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
    values = {}
    tensors = iter(inputs)
    for load in program.loads:
        x = next(tensors).float()
        if load.operand == "groups":
            groups = x.reshape(-1, columns).unflatten(-1, (-1, load.group_size))
            scales = next(tensors).float().reshape(*groups.shape[:2], 1)
            values[load.name] = (groups * scales).flatten(-2)
        else:
            shape = {"full": (-1, columns), "row": (-1, 1), "column": (1, -1), "scalar": (1, 1)}
            values[load.name] = x.reshape(shape[load.operand])
    return values
