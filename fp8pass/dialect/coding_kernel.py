"""`coded_weight.coded` as one Triton kernel: codes and scales of the rows of several matrices.

A program takes one row of one of them: to launch a kernel for each matrix takes the CPU longer than
it takes the GPU to run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.triton_functions import largest, scale_of

# Elements of a row that a program holds at once.
ROW_BLOCK = 2048
TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _code_rows(
    table, codes, scales, FROM: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    matrix = 0
    for other in tl.static_range(1, COUNT):
        matrix = tl.where(row >= tl.load(table + 4 * other), other, matrix)
    row_of_matrix = row - tl.load(table + 4 * matrix)
    length = tl.multiple_of(tl.load(table + 4 * matrix + 1), ALIGNED)
    begin = tl.multiple_of(tl.load(table + 4 * matrix + 2), ALIGNED) + row_of_matrix * length
    source = tl.load(table + 4 * matrix + 3).to(tl.pointer_type(FROM))
    source = tl.multiple_of(source, ALIGNED * FROM.primitive_bitwidth // 8) + row_of_matrix * length
    column, left = tl.arange(0, BLOCK), length.to(tl.int32)
    most = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, left, BLOCK):
        at = first + column
        values = tl.load(source + at, at < left, other=0.0).to(DTYPE).to(tl.float32)
        most = largest(most, tl.abs(values))
    scale = scale_of(tl.reduce(most, 0, largest))
    tl.store(scales + row, scale)
    inverse = tl.math.div_rn(1.0, scale)
    for first in range(0, left, BLOCK):  # from the cache
        at = first + column
        values = tl.load(source + at, at < left, other=0.0).to(DTYPE).to(tl.float32)
        tl.store(codes + begin + at, (values * inverse).to(tl.float8e4nv), at < left)


def code_rows(
    matrices: Sequence[Tensor], dtype: torch.dtype, into: tuple[Tensor, Tensor] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """E4M3 codes [M, K] and fp32 scales [M, 1] of matrices [M, K], rounded to `dtype`, at once.

    The matrices are contiguous, and of one dtype. Those of a single one may be written to `into`.
    """
    first, shapes = matrices[0], [x.shape for x in matrices]
    addresses = tuple(x.data_ptr() for x in matrices)
    table, aligned, longest = _table(addresses, tuple(shapes), first.dtype, first.device)
    if into is None:
        codes = first.new_empty(sum(map(math.prod, shapes)), dtype=torch.float8_e4m3fn)
        scales = first.new_empty(sum(rows for rows, _ in shapes), dtype=torch.float32)
    else:
        codes, scales = (x.view(-1) for x in into)
    block = min(triton.next_power_of_2(longest), ROW_BLOCK)
    with torch.cuda.device_of(first):
        _code_rows[(len(scales),)](
            table, codes, scales, FROM=TRITON_DTYPES[first.dtype], DTYPE=TRITON_DTYPES[dtype],
            COUNT=len(shapes), ALIGNED=aligned, BLOCK=block,
        )  # fmt: skip
    of_codes = codes.split([*map(math.prod, shapes)])
    of_scales = scales.view(-1, 1).split([rows for rows, _ in shapes])
    parts = zip(of_codes, of_scales, shapes, strict=True)
    return [(data.view(shape), scale) for data, scale, shape in parts]


@lru_cache(maxsize=4096)
def _table(
    addresses: tuple[int, ...],
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, int, int]:
    """Of each matrix its first row among all, its row length, its first code and its address.

    And of which power of two, up to 16, these are multiples, in elements; and the longest row.
    """
    table, row, code = [], 0, 0
    for (rows, length), address in zip(shapes, addresses, strict=True):
        table.append((row, length, code, address))
        row, code = row + rows, code + rows * length
    numbers = (n for _, k, code, x in table for n in (k, code, x // dtype.itemsize))
    aligned = math.gcd(16, *numbers)
    return torch.tensor(table, device=device), aligned, max(k for _, k in shapes)
