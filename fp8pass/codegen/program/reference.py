"""Compute the results of a program in plain PyTorch: one operator after the other, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.codegen.program.ir import (
    AMAX_TILE,
    BLOCKS,
    IS_COLUMN,
    PARTIAL_SUMS,
    REDUCTION_STEPS,
    ROW_EXP_SUM,
    Program,
    Store,
    count_tiles,
)
from fp8pass.dialect.encoding import encode
from fp8pass.dialect.formats import FORMATS
from fp8pass.dialect.ops import dequantize, quantize, transpose
from fp8pass.dialect.quantization import Quantization, group
from fp8pass.dialect.scaling import operand_scale

# `torch.where` replaces `aten.where.self`, which rejects Python numbers.
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "row_sum": lambda x: x.sum(-1, keepdim=True),
    "row_amax": lambda x: x.abs().amax(-1, keepdim=True),
    "row_max": lambda x: x.amax(-1, keepdim=True),
    ROW_EXP_SUM: lambda x, largest: (x - largest).exp().sum(-1, keepdim=True),
    "scale": lambda amax, format: operand_scale(amax, FORMATS[format]),
    "aten.where.self": torch.where,
    IS_COLUMN: lambda numbers, columns: numbers == torch.arange(columns, device=numbers.device),
}


def find_operator(target: str) -> Any:
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def compute_program(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    rows, columns = program.sizes([x.shape for x in inputs])
    values = _load(program, inputs, columns)
    rounded = {s.name: getattr(torch, s.dtype) for s in program.stores if "full" in s.layouts}
    for name in set(rounded) & set(values):
        values[name] = values[name].to(rounded[name]).float()
    for step in program.steps:
        args: list[Any] = [values.get(x, x) if isinstance(x, str) else x for x in step.args]
        if step.target in REDUCTION_STEPS:
            args[0] = args[0].expand(rows, columns)
        if step.target == IS_COLUMN:
            args.append(columns)
        found = (_OPERATORS.get(step.target) or find_operator(step.target))(*args)
        name = step.name
        values[name] = found.to(rounded[name]).float() if name in rounded else found
    results: list[Tensor] = []
    for store in program.stores:
        value = values[store.name]
        if store.block:
            results += _store_blocks(store, value.expand(rows, columns))
            continue
        for layout in store.layouts:
            results += _store(store, layout, value, values, (rows, columns))
    return results


def _store_blocks(store: Store, value: Tensor) -> list[Tensor]:
    height, width = BLOCKS[store.block]
    blocks = value.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales = operand_scale(blocks.abs().amax((1, 3)), FORMATS[store.format])
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
    data = encode(value * spread.reciprocal(), FORMATS[store.format]).contiguous()
    scales = scales.t() if height == 1 else scales
    stored = (data if layout == "rows" else transpose(data) for layout in store.layouts)
    return [*stored, scales.contiguous()]


def _store(
    store: Store, layout: str, value: Tensor, values: dict[str, Tensor], size: tuple[int, int]
) -> list[Tensor]:
    if layout == "row":
        return [value.to(getattr(torch, store.dtype)).expand(size[0], 1).contiguous()]
    value = value.expand(size)
    if layout == "full":
        return [value.to(getattr(torch, store.dtype)).contiguous()]
    if layout == "amax":
        return [_reduce_tiles(value)]
    if layout == "tile_sums":
        return [_sum_tiles(value.to(getattr(torch, store.dtype or "float32")).float())]
    if layout == "sums":
        padding = (0, 0, 0, -size[0] % PARTIAL_SUMS)
        rows = torch.nn.functional.pad(value, padding).reshape(-1, PARTIAL_SUMS, size[1])
        return [rows.sum(0)]
    if layout == "groups":
        how = store.grouped
        scales = how.scale(how.amax(value))
        planes = range(len(how.format.planes))
        return [*(quantize(value, scales, str(how), plane) for plane in planes), scales]
    scaled = value * values[store.scale].reciprocal() if store.scale else value
    data = encode(scaled, FORMATS[store.format]).contiguous()
    return [data if layout == "rows" else transpose(data)]


def _reduce_tiles(value: Tensor) -> Tensor:
    (m, n), (rows, columns) = AMAX_TILE, value.shape
    down, across = count_tiles(rows, columns)
    padding = (0, across * n - columns, 0, down * m - rows)
    tiles = torch.nn.functional.pad(value.abs(), padding).reshape(down, m, across, n)
    return tiles.amax(dim=(1, 3))


def _sum_tiles(value: Tensor) -> Tensor:
    rows, columns = value.shape
    padding = (0, 0, 0, -rows % AMAX_TILE[0])
    return torch.nn.functional.pad(value, padding).reshape(-1, AMAX_TILE[0], columns).sum(1)


def _load(program: Program, inputs: Sequence[Tensor], columns: int) -> dict[str, Tensor]:
    values = {}
    tensors = iter(inputs)
    for load in program.loads:
        width = load.width or columns
        if load.operand == "groups":
            how = Quantization(FORMATS[load.format], group(load.group_size))
            planes = [next(tensors).reshape(-1, width * w // 8) for w in how.format.planes]
            scales = next(tensors).reshape(planes[0].shape[0], -1)
            value = dequantize(planes, scales, str(how), torch.float32)
        else:
            shape = {"full": (-1, width), "row": (-1, 1), "column": (1, -1), "scalar": (1, 1)}
            value = next(tensors).float().reshape(shape[load.operand])
        if load.width:
            value = value[:, load.offset : load.offset + load.columns]
        values[load.name] = value
    return values
