"""Triton kernels of `wire.pack`, `wire.add_up` and `weight_gather.unpack`.

`unpack` needs a kernel because PyTorch's operator copies a table of addresses to the GPU in every
call.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS
from fp8pass.dialect.triton_scaling import largest, quotient_of
from fp8pass.runtime.triton_launcher import Launcher

# Number of groups for a Triton program of `pack` or `add_up`, 4 kB of fp32 registers.
GROUPS = 8
# Number of words of 4 bytes for a Triton program of `unpack`.
WORDS = 4096
BITS = tl.constexpr(BF16_BITS)


@triton.jit
def _positions(GROUPS: tl.constexpr, SIZE: tl.constexpr):
    # 64-bit arithmetic for each element takes longer than its read.
    return tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _clamp_remaining(length, first, most: tl.constexpr):
    return tl.minimum(length - first, most).to(tl.int32)


@triton.jit
def _read(values, inside, left, MOST: tl.constexpr):
    # Without a mask, Triton reads vectors. With a mask whose end is unknown at compile time, it
    # reads element by element.
    if left == MOST:
        found = tl.load(values + inside)
    else:
        found = tl.load(values + inside, inside < left, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _write(values, into, inside, left, MOST: tl.constexpr):
    if left == MOST:
        tl.store(into + inside, values)
    else:
        tl.store(into + inside, values, inside < left)


@triton.jit
def _pack(rows, codes, scales, length, sent, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * GROUPS
    left = _clamp_remaining(length, first * SIZE, GROUPS * SIZE)
    group, inside = tl.arange(0, GROUPS), _positions(GROUPS, SIZE)
    from_row = rows + row * length + first * SIZE
    values = _read(from_row, inside, left, GROUPS * SIZE)
    amax = tl.reduce(tl.abs(values), 1, largest)
    bits = quotient_of(amax).to(tl.int32, bitcast=True)
    scale = (bits + 0xFFFF & BITS).to(tl.float32, bitcast=True)
    scale = tl.where(amax < float("inf"), scale, float("nan"))  # so that the whole group is NaN
    coded = (values * tl.math.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
    _write(coded, codes + row * sent + first * SIZE, inside, left + left % 2, GROUPS * SIZE)
    where = scales + (row * sent + length + length % 2) // 2 + first
    tl.store(where + group, scale.to(tl.bfloat16), group * SIZE < left)


@triton.jit
def _add_up(
    codes, scales, into, terms, length, sent, factor, SIZE: tl.constexpr, GROUPS: tl.constexpr
):
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * GROUPS
    left = _clamp_remaining(length, first * SIZE, GROUPS * SIZE)
    group, inside = tl.arange(0, GROUPS), _positions(GROUPS, SIZE)
    total = tl.zeros((GROUPS, SIZE), tl.float32)
    for term in range(terms):
        begin = (term * tl.num_programs(1) + row) * sent
        from_codes = codes + begin + first * SIZE
        coded = tl.load(from_codes + inside, inside < left, other=0.0).to(tl.float32)
        where = scales + (begin + length + length % 2) // 2 + first
        scale = tl.load(where + group, group * SIZE < left, other=0.0).to(tl.float32)
        total += coded * scale[:, None]
    total = (total * factor).to(into.dtype.element_ty)
    tl.store(into + row * length + first * SIZE + inside, total, inside < left)


@triton.jit
def _unpack(
    table, shards, whole, words, COUNT: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr
):
    block, rank = tl.program_id(0), tl.program_id(1).to(tl.int64)
    piece = 0
    for other in tl.static_range(1, COUNT):
        piece = tl.where(block >= tl.load(table + 3 * other), other, piece)
    first = (block - tl.load(table + 3 * piece)) * WORDS
    begin = tl.multiple_of(tl.load(table + 3 * piece + 1), ALIGNED)
    size = tl.multiple_of(tl.load(table + 3 * piece + 2), ALIGNED)
    source = shards + rank * tl.multiple_of(words, ALIGNED) + begin + first
    target = whole + tl.num_programs(1) * begin + rank * size + first
    inside, left = tl.arange(0, WORDS), size - first
    if left >= WORDS:  # no mask, for the same reason as in _read
        tl.store(target + inside, tl.load(source + inside))
    else:
        tl.store(target + inside, tl.load(source + inside, inside < left), inside < left)


_launch_pack, _launch_add_up = Launcher(_pack), Launcher(_add_up)
_launch_unpack = Launcher(_unpack)


def pack(rows: Tensor, wire: Tensor, group_size: int) -> None:
    """Quantize contiguous rows [R, N] into `wire`, uint8 [R, B]."""
    count, length = rows.shape
    grid = triton.cdiv(length, group_size * GROUPS), count, 1
    parts = wire.view(torch.float8_e4m3fn), wire.view(torch.bfloat16)
    _launch_pack(grid, (rows, *parts), (length, wire.shape[-1]), (group_size, GROUPS))


def add_up(wire: Tensor, into: Tensor, factor: float, group_size: int) -> None:
    """Dequantize `wire`, uint8 [T, R, B], and write `factor` times the sum over T to `into`."""
    terms, count, sent = wire.shape
    length = into.shape[-1]
    grid = triton.cdiv(length, group_size * GROUPS), count, 1
    parts = wire.view(torch.float8_e4m3fn), wire.view(torch.bfloat16)
    numbers = terms, length, sent, float(factor)
    _launch_add_up(grid, (*parts, into), numbers, (group_size, GROUPS))


def unpack(shards: Tensor, whole: Tensor, sizes: tuple[int, ...]) -> None:
    """Copy the packed shards of all ranks, uint8 [ranks, B], to `whole`, the full weights.

    `sizes` are the bytes of each piece (data or scales of one weight) in `whole`. A rank's buffer
    has its rows of each piece, in order.
    """
    ranks, sent = shards.shape
    blocks, table, constants = _make_table(sizes, ranks, shards.device)
    tensors = table, shards.view(torch.int32), whole.view(torch.int32)
    _launch_unpack((blocks, ranks, 1), tensors, (sent // 4,), constants)


@lru_cache(maxsize=1024)
def _make_table(
    sizes: tuple[int, ...], ranks: int, device: torch.device
) -> tuple[int, Tensor, tuple[int, ...]]:
    """Return the number of programs per rank, the kernel's table, and the kernel's constants.

    For each piece, the table, int64 [pieces, 3], has the index of the first program, and the offset
    and the length of the piece in a rank's buffer, in words.
    """
    words = [size // ranks // 4 for size in sizes]
    begins = list(accumulate(words, initial=0))
    blocks = list(accumulate((triton.cdiv(n, WORDS) for n in words), initial=0))
    table = list(zip(blocks, begins, words, strict=False))
    aligned = math.gcd(4, *words)  # up to 16 bytes per read
    return blocks[-1], torch.tensor(table, device=device), (len(words), aligned, WORDS)
