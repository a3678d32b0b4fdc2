"""The Triton kernel of GEMMs whose operands have a scale for each block of 128 columns.

    out[m, n] = Σ over blocks k: a_scale[m, k] b_scale[n, k] (Σ over i in block k: a[m, i] b[n, i])

The tensor cores multiply one block of the contraction, and the product is added to an FP32 sum
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8pass import hardware

BLOCK = 128
# Rows and columns of a tile of the result, and the number of row tiles that share columns of `b`.
TILE_M, TILE_N, GROUP = 128, 128, 8
# Compute capabilities with at most 99 KiB of shared memory for a program.
SMALL = 89, 120


def stages(capability: int) -> int:
    """Return how many blocks of the operands are in shared memory at once."""
    return 2 if capability in SMALL else 3


@triton.jit
def _multiply_blocks(
    a, a_scale, b, b_scale, bias, out, M, N, K, a_row, a_step, b_row, b_step,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Neighboring programs share rows of `a` and columns of `b`, which then stay in the L2 cache.
    index, down, across = tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    first = index // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    m = (first + index % (GROUP * across) % height) * TILE_M + tl.arange(0, TILE_M)
    n = (index % (GROUP * across) // height) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, BLOCK)
    in_rows, in_columns = m < M, n < N
    a_places = a + m.to(tl.int64)[:, None] * K + k[None, :]
    b_places = b + n.to(tl.int64)[None, :] * K + k[:, None]
    a_scales = a_scale + (m // A_ROWS).to(tl.int64) * a_row
    b_scales = b_scale + (n // B_ROWS).to(tl.int64) * b_row
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in range(K // BLOCK):
        x = tl.load(a_places, in_rows[:, None], other=0.0)
        y = tl.load(b_places, in_columns[None, :], other=0.0)
        x_scale = tl.load(a_scales, in_rows, other=0.0)
        y_scale = tl.load(b_scales, in_columns, other=0.0)
        total += tl.dot(x, y) * x_scale[:, None] * y_scale[None, :]
        a_places += BLOCK
        b_places += BLOCK
        a_scales += a_step
        b_scales += b_step
    if bias is not None:
        total += tl.load(bias + n, in_columns, other=0.0).to(tl.float32)[None, :]
    places = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(places, total.to(out.dtype.element_ty), in_rows[:, None] & in_columns[None, :])


def multiply_blocks(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_rows: int,
    b_rows: int,
) -> Tensor:
    """Return `dequantize(a) @ dequantize(b).T + bias`, [M, N], summed in FP32.

    Args:
        a: FP8 data [M, K], row-major; K is a multiple of 128.
        a_scale: fp32 [M / a_rows, K / 128], in any layout.
        b: FP8 data [N, K], row-major.
        b_scale: fp32 [N / b_rows, K / 128], in any layout.
        bias: [N], or None.
        out_dtype: dtype of the result.
        a_rows: number of rows of `a` that share a scale.
        b_rows: number of rows of `b` that share a scale.
    """
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[0]
    out = a.new_empty((M, N), dtype=out_dtype)
    major, minor = hardware.capability_of(a.device) if a.is_cuda else (9, 0)  # else interpreted
    num_stages = stages(10 * major + minor)
    grid = (triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N),)
    with torch.cuda.device_of(a):
        _multiply_blocks[grid](
            a, a_scale, b, b_scale, None if bias is None else bias.contiguous(), out, M, N, K,
            *a_scale.stride(), *b_scale.stride(), A_ROWS=a_rows, B_ROWS=b_rows, TILE_M=TILE_M,
            TILE_N=TILE_N, BLOCK=BLOCK, GROUP=GROUP, num_warps=8, num_stages=num_stages,
        )  # fmt: skip
    return out
