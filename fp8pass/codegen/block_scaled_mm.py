"""GEMMs on GPUs, for operands with scales that vary along the contraction.

cuBLASLt multiplies operands with blocks of 128. A Triton kernel does this for sizes that cuBLASLt
does not support. GPUs with microscaling tensor cores (`hardware.why_emulated`) multiply operands
with groups of 32. Other GPUs multiply dequantized operands, in BF16 for BF16 results, else in FP32.
BF16 represents dequantized operands exactly, because scales are powers of two. Only scales of FP8
checkpoints may have other values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from fp8pass import compat, hardware
from fp8pass.codegen.buffers import buffer, library
from fp8pass.dialect import ops
from fp8pass.dialect.quantization import SQUARE, TALL, Quantization
from fp8pass.graph.nodes import aten

Operand = tuple[Tensor, Tensor, Quantization]

# In cuBLASLt, the length of a column of 1×128 scales, or of a row of 128×128 scales, must be a
# multiple of this number.
ALIGNMENT = 4
# cuBLASLt multiplies block-scaled operands since CUDA 12.9.
CUDA_VERSION = tuple(int(x) for x in (torch.version.cuda or "13.0").split(".")[:2])
LIBRARY_VERSION = 12, 9
# Microscaling tensor cores read the scales of 128 rows × 4 groups from 512 consecutive bytes.
MX_TILE = 128, 4


def multiply_scaled_blocks(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return `dequantize(a) @ dequantize(b).T + bias`, [M, N] in `out_dtype`.

    Operands are FP8 data [M, K] and [N, K], their scales, and their quantizations.
    """
    device, scales = a[0].device, a[2].scales
    if hardware.why_emulated(device, scales):
        return _multiply_dequantized(a, b, bias, out_dtype)
    if scales == "e8m0":
        return _multiply(a, b, bias, out_dtype, *(swizzle(scale) for _, scale, _ in (a, b)))
    (a_scale, b_scale) = (_lay_out(scale, how) for _, scale, how in (a, b))
    if _is_native(a, b):
        return _multiply(a, b, bias, out_dtype, a_scale, b_scale.permute(1, 0))
    rows = (how.block[0] for _, _, how in (a, b))
    return on_gpu(a[0], a_scale, b[0], b_scale, bias, out_dtype, *rows)


def _multiply(
    a: Operand,
    b: Operand,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_scale: Tensor,
    b_scale: Tensor,
) -> Tensor:
    """Multiply with cuBLASLt. Add the bias separately, because cuBLASLt may not support it."""
    operands = a[0], b[0].permute(1, 0), a_scale, b_scale
    product: Tensor = aten._scaled_mm.default(*operands, None, None, out_dtype, False)
    return product if bias is None else product + bias


def _is_native(a: Operand, b: Operand) -> bool:
    """Whether `aten._scaled_mm` is known, at compile time, to support blocks in these sizes.

    PyTorch's releases disagree about the strides of 128×128 scales whose rows are not aligned.
    PyTorch mistakes the scales of a single block for row scales.
    """
    if not _has_library(a[0].device) or a[0].shape[1] == SQUARE[1]:
        return False
    if {a[2].block, b[2].block} == {SQUARE}:
        return False
    sizes = [data.shape[0] if how.block == TALL else scale.shape[1] for data, scale, how in (a, b)]
    return all(compat.statically_known_true(size % ALIGNMENT == 0) for size in sizes)


def _has_library(device: torch.device) -> bool:
    """Whether cuBLASLt multiplies block-scaled operands: only on Hopper, since CUDA 12.9."""
    is_hopper = hardware.capability_of(device)[0] == hardware.GROUPED_CAPABILITY
    return is_hopper and CUDA_VERSION >= LIBRARY_VERSION


def _lay_out(scale: Tensor, how: Quantization) -> Tensor:
    """Store 1×128 scales column-major and 128×128 scales row-major."""
    return buffer(scale, [1, 0] if how.block == TALL else [0, 1])


def _multiply_dequantized(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    dtype = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    left, right = (ops.dequantize([data], scale, str(how), dtype) for data, scale, how in (a, b))
    if bias is None:
        return (left @ right.permute(1, 0)).to(out_dtype)
    return torch.addmm(bias.to(dtype), left, right.permute(1, 0)).to(out_dtype)


def swizzle(scale: Tensor) -> Tensor:
    """Return E8M0 scales [M, K / 32] as a vector, in the order of microscaling tensor cores.

    Tiles of 128 rows × 4 groups are consecutive, row by row. In a tile, the scale of row r and
    group g is byte `16 (r mod 32) + 4 (r div 32) + g`. Bytes outside the matrix are zero.
    """
    rows, groups = scale.shape
    tiles = [
        compat.ceil_div(size, side) for size, side in zip((rows, groups), MX_TILE, strict=True)
    ]
    padding = (0, tiles[1] * MX_TILE[1] - groups, 0, tiles[0] * MX_TILE[0] - rows)
    raw = pad(scale.view(torch.uint8), padding)
    split = raw.view(tiles[0], 4, 32, tiles[1], MX_TILE[1])
    ordered = split.permute(0, 3, 2, 1, 4).clone(memory_format=torch.contiguous_format)
    return ordered.view(-1).view(scale.dtype)


def _multiply_on_gpu(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_rows: int,
    b_rows: int,
) -> Tensor:
    """Multiply with cuBLASLt if the sizes at run time allow it, else with the Triton kernel."""
    operands = (a, a_scale, a_rows), (b, b_scale, b_rows)
    aligned = all(x.shape[0] % ALIGNMENT == 0 for x, _, rows in operands if rows == 1)
    if not _has_library(a.device) or a_rows == b_rows == SQUARE[0] or not aligned:
        # A machine without a GPU may not have Triton.
        from fp8pass.codegen.kernels.block_gemm import multiply_blocks

        return multiply_blocks(a, a_scale, b, b_scale, bias, out_dtype, a_rows, b_rows)
    (left, a_type), (right, b_type) = (_for_library(scale, rows) for _, scale, rows in operands)
    product = scaled_mm(a, b.t(), left, a_type, right, b_type, output_dtype=out_dtype)
    return product if bias is None else product + bias


def _for_library(scale: Tensor, rows: int) -> tuple[Tensor, ScalingType]:
    """Return 1×128 scales column-major, or 128×128 scales with padded rows."""
    if rows == 1:
        return scale.t().contiguous().t(), ScalingType.BlockWise1x128
    return pad(scale, (0, -scale.shape[1] % ALIGNMENT)).t(), ScalingType.BlockWise128x128


library.define(
    "multiply_blocks(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, "
    "ScalarType out_dtype, int a_rows, int b_rows) -> Tensor"
)
library.impl("multiply_blocks", _multiply_on_gpu, "CUDA")
torch.library.register_fake(
    "fp8pass_codegen::multiply_blocks",
    lambda a, _a, b, _b, bias, dtype, *rows: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
    lib=library,
)
on_gpu = torch.ops.fp8pass_codegen.multiply_blocks.default
