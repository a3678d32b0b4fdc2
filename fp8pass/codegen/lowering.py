"""The dialect in terms of aten, so that Inductor fuses it with the operators around it.

Runs on the forward and on the backward graph right before Inductor compiles them. Each operator of
the dialect has one function here, which computes the same as its reference in `dialect/ops.py`; the
tests compare the two. Only operators that survive Inductor's decompositions may be emitted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fp8pass import compat
from fp8pass.codegen import grouped
from fp8pass.codegen.buffers import emit_buffer
from fp8pass.codegen.coding import bits_of, decode, encode, shift_left, shift_right
from fp8pass.codegen.emitter import Emitter
from fp8pass.codegen.kernels.tiles import holds_amaxes
from fp8pass.codegen.masking import masked
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE, is_fp8
from fp8pass.dialect.formats import FORMATS, Format, divisor_group, simulated_format
from fp8pass.dialect.quantization import SCALE_FORMS, Block, Quantization, parse, parse_block
from fp8pass.dialect.scaling import BF16_BITS, EXPONENT_BITS, MANTISSA_BITS, SMALLEST_SCALE
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR, remove_unused
from fp8pass.graph.nodes import aten, prims, tensor

fp8 = torch.ops.fp8pass
cast = prims.convert_element_type.default

# The first stage of a tensor's amax; the size of the groups that saved values are quantized in.
AMAX_GROUP = 128


Lowering = Callable[..., fx.Node]
LOWERINGS: dict[Callable[..., Any], Lowering] = {}


def _lowers(target: Callable[..., Any]) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        assert target not in LOWERINGS, target
        LOWERINGS[target] = function
        return function

    return register


def lower(gm: fx.GraphModule, only: Callable[..., Any] | None = None) -> None:
    """Replace every fp8pass:: operator of a module's graph, or `only` one of them."""
    lower_graph(gm.graph, only)
    gm.recompile()


def lower_graph(g: fx.Graph, only: Callable[..., Any] | None = None) -> None:
    """Replace every fp8pass:: operator of a graph, or `only` one of them, by aten operators."""
    changed = False
    for node in list(g.nodes):
        lowering = LOWERINGS.get(node.target) if node.op == "call_function" else None
        if lowering is None or only not in (None, node.target):
            continue
        with g.inserting_before(node):
            node.replace_all_uses_with(lowering(Emitter(node), *node.args))
        g.erase_node(node)
        changed = True
    if changed:
        remove_unused(g)


@_lowers(fp8.amax.default)
def _amax(emit: Emitter, x: fx.Node, block: str) -> fx.Node:
    rows, columns = parse_block(block)
    if columns:
        return _amax_of_blocks(emit, x, (rows, columns))
    if rows:
        largest = emit(aten.amax.default, emit(aten.abs.default, x), [-1], True)
        return emit(cast, largest, torch.float32)
    return _amax_of_tensor(emit, x)


def _amax_of_tensor(emit: Emitter, x: fx.Node) -> fx.Node:
    """Two stages (COAT's Group Scaling): over groups, then over all of their maxima.

    Inductor fuses the first stage into the kernel that computes `x`. Groups have the size of those
    that saved values are quantized in, and share a kernel with them; rows would need another one.
    """
    if holds_amaxes(x):  # the first stage is done
        return emit(cast, emit(aten.amax.default, x), torch.float32)
    length = tensor(x).shape[-1]
    group = divisor_group(length, AMAX_GROUP) if isinstance(length, int) else None
    groups = _split_groups(emit, x, group) if group else x
    first = emit(aten.amax.default, emit(aten.abs.default, groups), [-1])
    return emit(cast, emit(aten.amax.default, first), torch.float32)


def _amax_of_blocks(emit: Emitter, x: fx.Node, block: Block) -> fx.Node:
    """The parts of groups that share bytes of the first plane are reduced together.

    Packing that plane goes over the same elements in the same way, so that both share a loop.
    """
    if block[0] > 1:
        magnitudes = emit(aten.abs.default, _split(emit, x, block))
        return emit(cast, emit(aten.amax.default, magnitudes, [-3, -1]), torch.float32)
    scales = [user for user in emit.node.users if user.target is fp8.scale.default]
    width = parse(str(scales[0].args[1])).format.planes[0] if scales else 8
    parts = _split_parts(emit, x, block[1], 8 // width)
    magnitudes_of_parts = (emit(aten.abs.default, part) for part in parts)
    largest = reduce(partial(emit, aten.maximum.default), magnitudes_of_parts)
    return emit(cast, emit(aten.amax.default, largest, [-1]), torch.float32)


@_lowers(fp8.scale.default)
def _scale(emit: Emitter, amax: fx.Node, quantization: str) -> fx.Node:
    how = parse(quantization)
    scales = quotient_of(emit, amax, how.format)
    _, rounds_up = SCALE_FORMS[how.scales]
    if rounds_up and not how.format.lossless:
        scales = power_of_two(emit, scales)
    elif not rounds_up:
        scales = truncated(emit, scales)
    return scales if how.scale_dtype is torch.float32 else emit(cast, scales, how.scale_dtype)


def quotient_of(emit: Emitter, amax: fx.Node, fmt: Format) -> fx.Node:
    """`dialect.scaling.quotient_of` in aten."""
    if fmt.lossless:
        return emit(aten.pow.Tensor_Scalar, amax, 0)
    return emit(aten.clamp_min.default, emit(aten.mul.Tensor, amax, 1 / fmt.max), SMALLEST_SCALE)


def power_of_two(emit: Emitter, x: fx.Node) -> fx.Node:
    """`dialect.scaling.power_of_two` in aten."""
    above = emit(aten.add.Tensor, bits_of(emit, x), MANTISSA_BITS)
    bits = emit(aten.bitwise_and.Scalar, above, EXPONENT_BITS)
    is_finite = emit(aten.lt.Scalar, x, math.inf)
    return emit(aten.where.self, is_finite, emit(aten.view.dtype, bits, torch.float32), x)


def truncated(emit: Emitter, x: fx.Node) -> fx.Node:
    """`dialect.scaling.truncated` in aten."""
    bits = emit(aten.bitwise_and.Scalar, bits_of(emit, x), BF16_BITS)
    return emit(aten.view.dtype, bits, torch.float32)


@_lowers(fp8.quantize.default)
def _quantize(
    emit: Emitter, x: fx.Node, scale: fx.Node, quantization: str, plane: int = 0
) -> fx.Node:
    how = parse(quantization)
    if how.format.lossless:
        return emit(aten.clone.default, x) if how.is_in_groups else x
    if how.format.packed or (how.is_in_groups and how.block[0] == 1):
        return _quantize_groups(emit, x, scale, how, plane)
    inverse = _spread(emit, _inverse(emit, scale), how.block)
    wide = _split(emit, emit(cast, x, torch.float32), how.block)
    codes = encode(emit, emit(aten.mul.Tensor, wide, inverse), how.format)
    if how.block[1]:
        codes = emit(aten.reshape.default, codes, emit.sizes(x))
    return _row_major(emit(cast, codes, how.format.dtype) if how.format.emulated else codes)


def _quantize_groups(
    emit: Emitter, x: fx.Node, scales: fx.Node, how: Quantization, plane: int
) -> fx.Node:
    fmt, group_size = how.format, how.block[1]
    width = fmt.planes[plane]
    inverse = _spread(emit, _inverse(emit, scales), how.block)
    codes = [
        encode(emit, emit(aten.mul.Tensor, part, inverse), fmt)
        for part in _split_parts(emit, emit(cast, x, torch.float32), group_size, 8 // width)
    ]
    if fmt.emulated:
        fields = (
            shift_left(emit, _field(emit, code, fmt, plane), position * width)
            for position, code in enumerate(codes)
        )
        data = emit(cast, reduce(partial(emit, aten.bitwise_or.Tensor), fields), torch.uint8)
    else:
        (data,) = codes
    *leading, length = emit.sizes(x)
    return emit(aten.reshape.default, data, [*leading, length * width // 8])


@_lowers(fp8.dequantize.default)
def _dequantize(
    emit: Emitter, planes: list[fx.Node], scale: fx.Node, quantization: str, dtype: torch.dtype
) -> fx.Node:
    how = parse(quantization)
    if how.format.lossless:
        return planes[0]
    if how.format.packed:
        codes = _unpack(emit, planes, how.format, how.block[1])
    else:
        codes = _split(emit, planes[0], how.block)
    factors = _spread(emit, emit(cast, scale, torch.float32), how.block)
    values = emit(cast, emit(aten.mul.Tensor, decode(emit, codes, how.format), factors), dtype)
    if not how.is_in_groups:
        return values
    shape = emit.sizes(planes[0])
    if how.format.packed:
        *leading, groups = emit.sizes(scale)
        shape = [*leading, groups * how.block[1]]
    return emit(aten.reshape.default, values, shape)


@_lowers(fp8.transpose.default)
def _transpose(emit: Emitter, data: fx.Node) -> fx.Node:
    swapped = emit(aten.permute.default, _pad_rows(emit, data), [1, 0])
    if not is_fp8(tensor(data).dtype):
        return swapped
    return _row_major(emit(aten.clone.default, swapped, memory_format=torch.contiguous_format))


def _pad_rows(emit: Emitter, data: fx.Node) -> fx.Node:
    val = tensor(data)
    rows = val.shape[0]
    known = compat.statically_known_true(rows % CONTRACTION_MULTIPLE == 0)
    if known or not is_fp8(val.dtype):
        return data
    if isinstance(rows, int):
        padding: Any = -rows % CONTRACTION_MULTIPLE
    else:
        size = emit(aten.sym_size.int, data, 0)
        padding = emit(operator.sub, emit.padded(size), size)
    codes = emit(aten.view.dtype, data, torch.uint8)  # FP8 has no fill kernel
    padded = emit(aten.constant_pad_nd.default, codes, [0, 0, 0, padding], 0)
    return emit(aten.view.dtype, padded, val.dtype)


def _row_major(x: fx.Node) -> fx.Node:
    """Pin the layout: Inductor may choose another one for pointwise results."""
    return emit_buffer(x, [0, 1])


@_lowers(fp8.joined.default)
def _joined(emit: Emitter, parts: list[fx.Node]) -> fx.Node:
    codes = [emit(aten.view.dtype, part, torch.uint8) for part in parts]  # FP8 has no copy kernel
    whole = emit(aten.cat.default, codes, 1)
    return _row_major(emit(aten.view.dtype, whole, tensor(parts[0]).dtype))


@_lowers(fp8.as_bytes.default)
def _as_bytes(emit: Emitter, data: fx.Node) -> fx.Node:
    return emit(aten.view.dtype, data, torch.uint8)


@_lowers(fp8.as_codes.default)
def _as_codes(emit: Emitter, data: fx.Node, format: str) -> fx.Node:
    """Bytes that NCCL gathered are gathered as codes: so Inductor finds what a GEMM reads."""
    if data.target is WAIT_TENSOR and tensor(data).device.type == "cuda":
        gather: Any = data.args[0]
        sent = gather.args[0]
        if sent.target is aten.view.dtype:
            return emit(WAIT_TENSOR, emit(ALL_GATHER, sent.args[0], *gather.args[1:]))
    return emit(aten.view.dtype, data, FORMATS[format].dtype)


@_lowers(fp8.mask_format.default)
def _mask_format(emit: Emitter, x: fx.Node, format: str, inner: bool, outer: bool) -> fx.Node:
    return masked(emit, x, simulated_format(format), inner, outer)


@_lowers(fp8.scaled_mm.default)
def _scaled_mm(
    emit: Emitter,
    a: fx.Node,
    a_scale: fx.Node,
    b: fx.Node,
    b_scale: fx.Node,
    bias: fx.Node | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
    a_quantization: str,
    b_quantization: str,
) -> fx.Node:
    b_transposed = emit(aten.permute.default, b, [1, 0])
    if not is_fp8(tensor(a).dtype):
        if bias is None:
            return emit(aten.mm.default, a, b_transposed)
        return emit(aten.addmm.default, bias, a, b_transposed)
    quantizations = a_quantization, b_quantization
    if any(parse(text).is_in_groups for text in quantizations):
        return _dequantized_mm(emit, a, a_scale, b, b_scale, bias, out_dtype, quantizations)
    if tensor(a).device.type == "cuda":
        operands = a, a_scale, b_transposed, b_scale
        return _cuda_scaled_mm(emit, *operands, bias, out_dtype, fast_accumulation)
    product = emit(
        aten.mm.default, emit(cast, a, torch.float32), emit(cast, b_transposed, torch.float32)
    )
    scaled = emit(aten.mul.Tensor, product, _product_scale(emit, a_scale, b_scale))
    if bias is not None:
        scaled = emit(aten.add.Tensor, scaled, emit(cast, bias, torch.float32))
    return emit(cast, scaled, out_dtype)


def _dequantized_mm(
    emit: Emitter,
    a: fx.Node,
    a_scale: fx.Node,
    b: fx.Node,
    b_scale: fx.Node,
    bias: fx.Node | None,
    out_dtype: torch.dtype,
    quantizations: tuple[str, str],
) -> fx.Node:
    """A product of operands whose scales vary along the contraction: dequantize and multiply."""
    left, right = (
        _dequantize(emit, [data], scale, text, torch.float32)
        for data, scale, text in zip((a, b), (a_scale, b_scale), quantizations, strict=True)
    )
    product = emit(aten.mm.default, left, emit(aten.permute.default, right, [1, 0]))
    if bias is not None:
        product = emit(aten.add.Tensor, product, emit(cast, bias, torch.float32))
    return emit(cast, product, out_dtype)


def _product_scale(emit: Emitter, a_scale: fx.Node, b_scale: fx.Node) -> fx.Node:
    """The scale of a product: [], or [M, N]."""
    if tensor(b_scale).ndim:
        b_scale = emit(aten.permute.default, b_scale, [1, 0])
    return emit(aten.mul.Tensor, a_scale, b_scale)


def _cuda_scaled_mm(
    emit: Emitter,
    a: fx.Node,
    a_scale: fx.Node,
    b: fx.Node,
    b_scale: fx.Node,
    bias: fx.Node | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> fx.Node:
    """cuBLASLt or Triton, whichever Inductor's autotuning prefers."""
    if tensor(b_scale).ndim:
        b_scale = emit(aten.permute.default, b_scale, [1, 0])
    fused_bias = bias is not None and out_dtype in (torch.bfloat16, torch.float16)
    options = bias if fused_bias else None, None, out_dtype, fast_accumulation
    product = emit(aten._scaled_mm.default, a, b, a_scale, b_scale, *options)
    if bias is None or fused_bias:
        return product
    return emit(aten.add.Tensor, product, bias)


@_lowers(fp8.transpose_segments.default)
def _transpose_segments(emit: Emitter, *args: Any) -> fx.Node:
    return _row_major(grouped.transpose_segments(emit, *args))


_lowers(fp8.padded_ends.default)(grouped.padded_ends)
_lowers(fp8.segment_amax.default)(grouped.segment_amax)
_lowers(fp8.scaled_grouped_mm.default)(grouped.scaled_grouped_mm)
_lowers(fp8.scaled_grouped_outer.default)(grouped.scaled_grouped_outer)


def _split(emit: Emitter, x: fx.Node, block: Block) -> fx.Node:
    """`Quantization.split` in aten."""
    rows, columns = block
    if not columns:
        return x
    if rows == 1:
        return _split_groups(emit, x, columns)
    *leading, height, width = emit.sizes(x)
    shape = [*leading, height // rows, rows, width // columns, columns]
    return emit(aten.reshape.default, x, shape)


def _spread(emit: Emitter, scales: fx.Node, block: Block) -> fx.Node:
    """`Quantization.spread` in aten."""
    if not block[1]:
        return scales
    groups = emit(aten.unsqueeze.default, scales, -1)
    return emit(aten.unsqueeze.default, groups, -3) if block[0] > 1 else groups


def _split_groups(emit: Emitter, x: fx.Node, group_size: int) -> fx.Node:
    *leading, length = emit.sizes(x)
    return emit(aten.reshape.default, x, [*leading, length // group_size, group_size])


def _split_parts(emit: Emitter, x: fx.Node, group_size: int, count: int) -> list[fx.Node]:
    """The `count` parts of every group of `x` [..., K], each [..., K / G, G / count]."""
    if count == 1:
        return [_split_groups(emit, x, group_size)]
    *leading, length = emit.sizes(x)
    sizes = [*leading, length // group_size, count, group_size // count]
    parts = emit(aten.reshape.default, x, sizes)
    return [emit(aten.select.int, parts, -2, position) for position in range(count)]


def _field(emit: Emitter, code: fx.Node, fmt: Format, plane: int) -> fx.Node:
    """The bits of a code that are in one of its planes."""
    offset, width = sum(fmt.planes[:plane]), fmt.planes[plane]
    field = shift_right(emit, code, offset)
    is_last = offset + width == fmt.bits
    return field if is_last else emit(aten.bitwise_and.Scalar, field, (1 << width) - 1)


def _unpack(emit: Emitter, planes: list[fx.Node], fmt: Format, group_size: int) -> fx.Node:
    """Codes, int32 [..., K / G, G], out of packed planes."""
    fields, offset = [], 0
    for data, width in zip(planes, fmt.planes, strict=True):
        groups = _split_groups(emit, emit(cast, data, torch.int32), group_size * width // 8)
        shared = emit(aten.unsqueeze.default, groups, -2)
        shifts = emit(aten.unsqueeze.default, emit.steps(data, 8 // width, width), -1)
        parts = emit(aten.bitwise_right_shift.Tensor, shared, shifts)
        field = emit(aten.bitwise_and.Scalar, parts, (1 << width) - 1)
        *leading, number, _ = emit.sizes(groups)
        field = emit(aten.reshape.default, field, [*leading, number, group_size])
        fields.append(shift_left(emit, field, offset))
        offset += width
    return reduce(partial(emit, aten.bitwise_or.Tensor), fields)


def _inverse(emit: Emitter, scale: fx.Node) -> fx.Node:
    return emit(aten.reciprocal.default, emit(cast, scale, torch.float32))
