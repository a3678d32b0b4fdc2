"""The Triton kernel of `transpose_segments`: quantize, transpose and pad the tokens of experts.

    codes[k, place] = x[rows[token], k] / scale[e]     x may be FP8 data with row scales
    token = start of e + (place - padded start of e)

`e` is the expert of the column `place`. The GPU computes it from the offsets, because the CPU would
have to wait for a copy of the offsets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.config import BUG
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.expert_groups import padded_length
from fp8pass.dialect.formats import E4M3

PLACES, COLUMNS = 128, 64
SPAN = 1024
TILE = tl.constexpr(CONTRACTION_MULTIPLE)


@triton.jit
def _transpose_segments(
    x, rows, row_scales, scales, offsets, codes, count, columns, length, EXPERTS: tl.constexpr,
    ALL: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, ALL)
    end = tl.load(offsets + expert, expert < EXPERTS, other=0)
    start = tl.load(offsets + expert - 1, (expert > 0) & (expert < EXPERTS), other=0)
    tiles = tl.maximum((end - start + TILE - 1) // TILE, 1)
    padded = tl.where(expert < EXPERTS, tiles * TILE, 0)
    padded_end = tl.cumsum(padded, 0)
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    first = (padded_end - padded)[None, :]
    own = (place[:, None] >= first) & (place[:, None] < padded_end[None, :])
    token = place + tl.sum(tl.where(own, start[None, :] - first, 0), 1)
    held = token < tl.sum(tl.where(own, end[None, :], 0), 1)
    row = token
    if rows is not None:
        row = tl.load(rows + token, held, other=0)
        row = tl.where(row < 0, row + count, row)  # negative indices count from the end
    number = tl.sum(tl.where(own, expert[None, :], 0), 1)
    inverse = tl.math.div_rn(1.0, tl.load(scales + number))
    if row_scales is not None:
        own_scale = tl.load(row_scales + row, held, other=0.0)
    for column in range(tl.program_id(1) * SPAN, tl.program_id(1) * SPAN + SPAN, COLUMNS):
        k = column + tl.arange(0, COLUMNS)
        there = held[:, None] & (k < columns)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * columns + k[None, :], there, other=0.0)
        values = values.to(tl.float32)
        if row_scales is not None:
            values = values * own_scale[:, None]
        scaled = tl.where(there, values * inverse[:, None], 0.0)
        to = codes + k.to(tl.int64)[:, None] * length + place[None, :]
        inside = (k < columns)[:, None] & (place < length)[None, :]
        tl.store(to, tl.trans(scaled).to(tl.float8e4nv), inside)


def transpose_segments(
    x: Tensor,
    scales: Tensor,
    offsets: Tensor,
    format: str,
    rows: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> Tensor:
    """Compute `dialect.ops.transpose_segments` in E4M3 on a GPU."""
    if format != E4M3.name:
        raise ValueError(f"The kernel for tokens of experts quantizes to e4m3, not {format}. {BUG}")
    x, columns, experts = x.contiguous(), x.shape[1], len(offsets)
    rows, row_scales = (y if y is None else y.contiguous() for y in (rows, row_scales))
    length = padded_length(len(x if rows is None else rows), experts)
    codes = x.new_empty((columns, length), dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(length, PLACES), triton.cdiv(columns, SPAN))
    with torch.cuda.device_of(x):
        _transpose_segments[grid](
            x, rows, row_scales, scales.contiguous(), offsets.contiguous(), codes, len(x), columns,
            length, EXPERTS=experts, ALL=triton.next_power_of_2(experts), PLACES=PLACES,
            COLUMNS=COLUMNS, SPAN=SPAN, num_warps=8,
        )  # fmt: skip
    return codes
