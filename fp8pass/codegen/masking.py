"""Numbers masked to a format, in aten; the reference is `dialect/masking.py`."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.codegen.coding import bits_of, shift_left
from fp8pass.codegen.emitter import Emitter
from fp8pass.dialect.formats import Format
from fp8pass.dialect.masking import clamps_inside, clamps_outside, kept_bits, largest
from fp8pass.graph.nodes import aten, prims, tensor

cast = prims.convert_element_type.default


def masked(emit: Emitter, x: fx.Node, fmt: Format, inner: bool, outer: bool) -> fx.Node:
    """`x` masked to a format, in its own dtype."""
    dtype = tensor(x).dtype
    value = as_stored(emit, x)
    kept = emit(aten.bitwise_and.Scalar, bits_of(emit, value), kept_bits(fmt))
    kept = emit(aten.view.dtype, kept, torch.float32)
    if outer and clamps_outside(fmt):
        kept = _clamped_outside(emit, kept, largest(fmt, dtype))
    if inner and clamps_inside(fmt):
        kept = _clamped_inside(emit, value, kept, 2.0**fmt.min_exponent)
    kept = emit(aten.where.self, emit(aten.isnan.default, value), value, kept)
    return emit(cast, kept, dtype)


def as_stored(emit: Emitter, x: fx.Node) -> fx.Node:
    """`x` in fp32, as it is in memory.

    Generated code keeps results of 16 bits in fp32, unrounded, until they are stored. To look at
    their bits rounds them: cut off without that, a number a little below a power of two would lose
    half a step more than it has.
    """
    dtype = tensor(x).dtype
    if dtype is torch.float32:
        return x
    bits = emit(cast, emit(aten.view.dtype, x, torch.int16), torch.int32)
    if dtype is torch.bfloat16:  # the upper half of a float32 number
        return emit(aten.view.dtype, shift_left(emit, bits, 16), torch.float32)
    # By way of int32: Inductor takes a view of a view for what it was.
    return emit(cast, emit(aten.view.dtype, emit(cast, bits, torch.int16), dtype), torch.float32)


def _clamped_outside(emit: Emitter, kept: fx.Node, limit: float) -> fx.Node:
    clamped = emit(aten.clamp_max.default, emit(aten.clamp_min.default, kept, -limit), limit)
    return emit(aten.where.self, emit(aten.isinf.default, kept), kept, clamped)


def _clamped_inside(emit: Emitter, value: fx.Node, kept: fx.Node, least: float) -> fx.Node:
    is_small = emit(aten.lt.Scalar, emit(aten.abs.default, kept), least)
    is_small = emit(aten.bitwise_and.Tensor, is_small, emit(aten.ne.Scalar, value, 0))
    negative = emit(aten.lt.Scalar, value, 0)
    signed = emit(
        aten.where.self, negative, emit.constant(value, -least), emit.constant(value, least)
    )
    return emit(aten.where.self, is_small, signed, kept)
