"""Functions that `lowering.py` traces instead of the reference implementations of some operators.

They call library GEMMs, fix layouts of operands, and let Inductor fuse reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import graph
from fp8pass.codegen.block_scaled_mm import multiply_scaled_blocks
from fp8pass.codegen.buffers import buffer, library
from fp8pass.codegen.kernels.tile_kernel import holds_amaxes
from fp8pass.dialect import ops
from fp8pass.dialect.encoding import is_fp8, split_groups
from fp8pass.dialect.expert_groups import expert_of
from fp8pass.dialect.formats import divisor_group
from fp8pass.dialect.quantization import TENSOR, parse, parse_block
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR
from fp8pass.graph.nodes import aten, tensor

fp8 = torch.ops.fp8pass

# The first stage of an amax reduces groups of this size, the default group size of saved tensors.
AMAX_GROUP = 128


@dataclass(frozen=True)
class Lowering:
    function: Callable[..., Tensor]
    # Returns the arguments of `function` for a node.
    arguments: Callable[[fx.Node], tuple[Any, ...]] = lambda node: node.args


LOWERINGS: dict[Callable[..., Any], Lowering] = {}


def _lowers(target: Callable[..., Any], **options: Any) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        LOWERINGS[target] = Lowering(function, **options)
        return function

    return register


def _pin_row_major(x: Tensor) -> Tensor:
    """Store `x` row-major, because Inductor may choose a different layout."""
    return buffer(x, [0, 1])


@_lowers(fp8.quantize.default)
def _quantize(x: Tensor, scale: Tensor, quantization: str, plane: int = 0) -> Tensor:
    how, data = parse(quantization), ops.quantize(x, scale, quantization, plane)
    is_saved = not how.is_for_operands or how.format.lossless
    # Inductor fails to generate C++ code for pinned groups of columns. On a CPU any layout fits.
    is_free = how.is_within_rows and x.device.type != "cuda"
    return data if is_saved or is_free else _pin_row_major(data)


@_lowers(fp8.transpose.default)
def _transpose(data: Tensor) -> Tensor:
    transposed = ops.transpose(data)
    return _pin_row_major(transposed) if is_fp8(data.dtype) else transposed


@_lowers(fp8.joined.default)
def _joined(parts: list[Tensor]) -> Tensor:
    return _pin_row_major(ops.joined(parts))


def _amax_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return `x`, the block, whether `x` contains amaxes, and the number of elements per byte.

    The last number describes the packed data that will be quantized with this amax.
    """
    x, block = node.args
    scales = [user for user in node.users if user.target is fp8.scale.default]
    width = parse(str(scales[0].args[1])).format.planes[0] if scales else 8
    return x, block, holds_amaxes(x), 8 // width  # type: ignore[arg-type]


@_lowers(fp8.amax.default, arguments=_amax_arguments)
def _amax(x: Tensor, block: str, has_amaxes: bool, parts: int) -> Tensor:
    rows, columns = parse_block(block)
    if (rows, columns) == TENSOR:
        return x.amax().float() if has_amaxes else _amax_in_two_stages(x)
    if rows == 1 and columns:
        return _amax_of_groups(x, columns, parts)
    return ops.amax(x, block)


def _amax_in_two_stages(x: Tensor) -> Tensor:
    """Compute the amax of each group, then the amax of the tensor (COAT's Group Scaling).

    Inductor fuses the first stage into the kernel that computes `x`, and shares it with the groups
    of a saved tensor. A first stage that reduces whole rows would need a separate kernel.
    """
    length = x.shape[-1]
    group = divisor_group(length, AMAX_GROUP) if isinstance(length, int) else None
    groups = x.unflatten(-1, (-1, group)) if group else x
    return groups.abs().amax(-1).amax().float()


def _amax_of_groups(x: Tensor, group_size: int, parts: int) -> Tensor:
    """Return the amax of each group. First reduce the elements that will share a byte.

    Packing combines the same elements, so Inductor computes amaxes and packs in one loop.
    """
    magnitudes = (part.abs() for part in split_groups(x, group_size, parts))
    return reduce(torch.maximum, magnitudes).amax(-1).float()


@_lowers(fp8.scaled_mm.default)
def _scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    *quantizations: str,
) -> Tensor:
    """Call `aten._scaled_mm`, which Inductor's autotuning runs in cuBLASLt or Triton."""
    if not is_fp8(a.dtype) or a.device.type != "cuda":
        options = bias, out_dtype, fast_accumulation, *quantizations
        return ops.scaled_mm(a, a_scale, b, b_scale, *options)
    a_how, b_how = map(parse, quantizations)
    if a_how.is_in_groups:
        sides = (a, a_scale, a_how), (b, b_scale, b_how)
        return multiply_scaled_blocks(*sides, bias, out_dtype)
    if b_scale.ndim:
        b_scale = b_scale.permute(1, 0)
    fuses_bias = bias is not None and out_dtype in (torch.bfloat16, torch.float16)
    options = bias if fuses_bias else None, None, out_dtype, fast_accumulation
    product: Tensor = aten._scaled_mm.default(a, b.permute(1, 0), a_scale, b_scale, *options)
    return product if bias is None or fuses_bias else product + bias


# On a CPU, the two functions below convert FP8 data to BF16, which is exact. They round results
# twice, except for BF16 results on a GPU. The reference implementations round once.


@_lowers(fp8.scaled_grouped_mm.default)
def _scaled_grouped_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    experts = offsets.shape[0]
    matrices = b.unflatten(0, (experts, -1)).permute(0, 2, 1)
    scales = b_scale.reshape(experts, -1)
    if a.device.type == "cuda":
        vectors = a_scale.reshape(-1), scales
        return _multiply_groups(a, matrices, *vectors, offsets, out_dtype, fast_accumulation)
    product = aten._grouped_mm.default(a.bfloat16(), matrices.bfloat16(), offsets)
    row = torch.arange(a.shape[0], dtype=torch.int32, device=a.device)
    return (product * (a_scale * scales[expert_of(row, offsets)])).to(out_dtype)


@_lowers(fp8.scaled_grouped_outer.default)
def _scaled_grouped_outer(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    """Repeat each expert's scale, because PyTorch's kernel needs a scale for each row."""
    b_transposed = b.permute(1, 0)
    if a.device.type == "cuda":
        pairs = (a_scale, a), (b_scale, b)
        # With a single expert, the expanded scales would have stride 0.
        vectors = [_copy(scale.expand(-1, x.shape[0])).view(-1) for scale, x in pairs]
        return _multiply_groups(a, b_transposed, *vectors, ends, out_dtype, fast_accumulation)
    products = aten._grouped_mm.default(a.bfloat16(), b_transposed.bfloat16(), ends)
    return (products * (a_scale * b_scale).unsqueeze(-1)).to(out_dtype)


def _copy(x: Tensor) -> Tensor:
    """Copy without `x.contiguous()`, which fails on fake CUDA tensors in CPU-only PyTorch."""
    return x.clone(memory_format=torch.contiguous_format)


def _multiply_groups(*args: Any) -> Tensor:
    *operands, out_dtype, fast_accumulation = args
    options = None, None, torch.bfloat16, fast_accumulation
    product: Tensor = aten._scaled_grouped_mm.default(*operands, *options)
    return product.to(out_dtype)


def _as_codes_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the data, the format, and whether the data are a concatenation on a GPU.

    If NCCL gathered the data, return this rank's FP8 data instead, and the arguments of the gather.
    """
    data, format = node.args
    assert isinstance(data, fx.Node)
    on_gpu = tensor(data).device.type == "cuda"
    if data.target is WAIT_TENSOR and on_gpu:
        gather: Any = data.args[0]
        if gather.target is ALL_GATHER and gather.args[0].target is aten.view.dtype:
            return gather.args[0].args[0], format, False, *gather.args[1:]
    return data, format, on_gpu and graph.skip_reshapes(data).target is aten.cat.default


@_lowers(fp8.as_codes.default, arguments=_as_codes_arguments)
def _as_codes(data: Tensor, format: str, is_joined: bool, *group: Any) -> Tensor:
    """Gather FP8 data instead of bytes, so that Inductor recognizes gathered GEMM operands.

    A gather along a dimension other than the first ends in a concatenation, and an exchange of
    tokens may append rows of zeros. The concatenation is stored in a buffer, because Inductor would
    compute it once for each reader.
    """
    if group:
        return WAIT_TENSOR(ALL_GATHER(data, *group))
    data = ops.as_codes(data, format)
    return buffer(data, list(range(data.ndim))) if is_joined else data


@_lowers(fp8.transpose_segments.default)
def _transpose_segments(x: Tensor, *args: Any) -> Tensor:
    on_gpu = x.device.type == "cuda"
    return _pin_row_major((transpose_on_gpu if on_gpu else ops.transpose_segments)(x, *args))


def _call_kernel(*args: Any) -> Tensor:
    # A machine without a GPU may not have Triton.
    from fp8pass.codegen.kernels.expert_transpose import transpose_segments

    return transpose_segments(*args)


_schema = torch.library.infer_schema(ops.transpose_segments, mutates_args=())
library.define(f"transpose_segments{_schema}")
library.impl("transpose_segments", _call_kernel, "CUDA")
torch.library.register_fake(
    "fp8pass_codegen::transpose_segments",
    ops.OPERATORS[fp8.transpose_segments.default].fake,
    lib=library,
)
transpose_on_gpu = torch.ops.fp8pass_codegen.transpose_segments.default
