"""Quantize the rows of several matrices with one launch of a Triton kernel.

One launch for each matrix would take more time on the CPU than the kernels take on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass.dialect.triton_scaling import largest, scale_of
from fp8pass.runtime.triton_launcher import Launcher

# Elements of a row that a Triton program loads at once.
ROW_BLOCK = 2048
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _quantize_rows(
    table, data, scales, FROM: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr,
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
    for first in range(0, left, BLOCK):  # the row is now in the cache
        at = first + column
        values = tl.load(source + at, at < left, other=0.0).to(DTYPE).to(tl.float32)
        tl.store(data + begin + at, (values * inverse).to(tl.float8e4nv), at < left)


_launch = Launcher(_quantize_rows)


def quantize_rows(
    matrices: Sequence[Tensor], dtype: torch.dtype, data: Tensor, scales: Tensor
) -> None:
    """Round contiguous matrices [M, K] of one dtype to `dtype`, and quantize each row.

    The concatenated results are written to `data` (E4M3) and `scales` (fp32).
    """
    first = matrices[0]
    addresses = tuple(x.data_ptr() for x in matrices)
    rows, table, constants = _arguments(
        addresses, tuple(x.shape for x in matrices), first.dtype, dtype, first.device
    )
    _launch((rows, 1, 1), (table, data, scales), (), constants)


@lru_cache(maxsize=4096)
def _arguments(
    addresses: tuple[int, ...],
    shapes: tuple[torch.Size, ...],
    source_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, Tensor, tuple[Any, ...]]:
    """Return the total number of rows, the kernel's table, and the kernel's constants.

    For each matrix, the table, int64 [matrices, 4], has the index of its first row in `scales`, its
    row length, the index of its first element in `data`, and its address.
    """
    table, row, element = [], 0, 0
    for (rows, length), address in zip(shapes, addresses, strict=True):
        table.append((row, length, element, address))
        row, element = row + rows, element + rows * length
    # A power of two that divides all row lengths, indices and addresses, in elements. Triton can
    # then load and store several elements at once.
    offsets = (n for _, k, e, x in table for n in (k, e, x // source_dtype.itemsize))
    aligned = math.gcd(16, *offsets)
    block = min(triton.next_power_of_2(max(k for _, k in shapes)), ROW_BLOCK)
    types = TRITON_DTYPES[source_dtype], TRITON_DTYPES[dtype]
    constants = (*types, len(shapes), aligned, block)
    return row, torch.tensor(table, device=device), constants
