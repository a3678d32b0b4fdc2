"""`wire.packed` and `wire.add_up` as one Triton kernel each: rows are read and written once.

A program takes some groups of one row; the codes and the scales of a row lie behind one another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.scaling import BF16_BITS, SMALLEST_SCALE

# Groups of a program: 16 kB of fp32, in registers.
GROUPS = 32
STEP, SMALLEST, BITS = (tl.constexpr(x) for x in (1 / E4M3.max, SMALLEST_SCALE, BF16_BITS))


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pack(rows, codes, scales, length, sent, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(rows + row * length + column, column < length, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.abs(values), 1, _largest)
    scale = tl.where(amax == 0, 1.0, _largest(amax * STEP, SMALLEST))
    scale = (scale.to(tl.int32, bitcast=True) + 0xFFFF & BITS).to(tl.float32, bitcast=True)
    scale = tl.where(amax < float("inf"), scale, float("nan"))  # for all that it stands for
    coded = (values * tl.math.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
    even = length + length % 2
    tl.store(codes + row * sent + column, coded, column < even)
    where = scales + (row * sent + even) // 2 + group
    tl.store(where, scale.to(tl.bfloat16), group * SIZE < length)


@triton.jit
def _add_up(
    codes, scales, into, terms, length, sent, factor, SIZE: tl.constexpr, GROUPS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    even = length + length % 2
    total = tl.zeros((GROUPS, SIZE), tl.float32)
    for term in range(terms):
        begin = (term * tl.num_programs(1) + row) * sent
        coded = tl.load(codes + begin + column, column < length, other=0.0).to(tl.float32)
        where = scales + (begin + even) // 2 + group
        scale = tl.load(where, group * SIZE < length, other=0.0).to(tl.float32)
        total += coded * scale[:, None]
    total = (total * factor).to(into.dtype.element_ty)
    tl.store(into + row * length + column, total, column < length)


def pack(rows: Tensor, wire: Tensor, group_size: int) -> None:
    """Write rows [R, N], contiguous, to `wire`, uint8 [R, B], as they are sent."""
    count, length = rows.shape
    grid = (triton.cdiv(length, group_size * GROUPS), count)
    parts = wire.view(torch.float8_e4m3fn), wire.view(torch.bfloat16)
    with torch.cuda.device_of(rows):
        _pack[grid](rows, *parts, length, wire.shape[-1], SIZE=group_size, GROUPS=GROUPS)


def add_up(wire: Tensor, into: Tensor, factor: float, group_size: int) -> None:
    """Write the sums of terms uint8 [T, R, B], times `factor`, to `into` [R, N], contiguous."""
    terms, count, sent = wire.shape
    length = into.shape[-1]
    grid = (triton.cdiv(length, group_size * GROUPS), count)
    parts = wire.view(torch.float8_e4m3fn), wire.view(torch.bfloat16)
    with torch.cuda.device_of(into):
        _add_up[grid](
            *parts, into, terms, length, sent, float(factor), SIZE=group_size, GROUPS=GROUPS
        )
