"""Codes of a format in aten; the reference is `dialect/coding.py`."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.codegen.emitter import Emitter
from fp8pass.dialect.formats import Format
from fp8pass.graph.nodes import aten, prims

cast = prims.convert_element_type.default


def encode(emit: Emitter, x: fx.Node, fmt: Format) -> fx.Node:
    """Codes of fp32 `x`, one an element: in the format's dtype, or in int32 if emulated."""
    clamped = emit(aten.clamp_max.default, emit(aten.clamp_min.default, x, -fmt.max), fmt.max)
    return _code_points(emit, clamped, fmt) if fmt.emulated else emit(cast, clamped, fmt.dtype)


def decode(emit: Emitter, codes: fx.Node, fmt: Format) -> fx.Node:
    """The fp32 values of codes, one an element."""
    return _values(emit, codes, fmt) if fmt.emulated else emit(cast, codes, torch.float32)


# Integer arithmetic for codes that no cast converts to. An fp32 number has 23 mantissa bits and
# exponent bias 127.


def _dropped_bits(fmt: Format) -> int:
    return 23 - fmt.mantissa


def _rebias(fmt: Format) -> int:
    """The difference of the exponent fields of fp32 and `fmt`, shifted to the field of `fmt`."""
    return (127 - (1 - fmt.min_exponent)) << fmt.mantissa


def bits_of(emit: Emitter, x: fx.Node) -> fx.Node:
    """The bits of fp32 `x` as int32."""
    return emit(aten.view.dtype, x, torch.int32)


def shift_right(emit: Emitter, x: fx.Node, count: int) -> fx.Node:
    """Integers shifted by `count` bits, with their sign; `x` itself for none."""
    return emit(aten.bitwise_right_shift.Tensor_Scalar, x, count) if count else x


def shift_left(emit: Emitter, x: fx.Node, count: int) -> fx.Node:
    """Integers shifted by `count` bits; `x` itself for none."""
    return emit(aten.bitwise_left_shift.Tensor_Scalar, x, count) if count else x


def _code_points(emit: Emitter, x: fx.Node, fmt: Format) -> fx.Node:
    """fp32 within ±fmt.max to code points, nearest even, as int32."""
    magnitude = emit(aten.abs.default, x)
    is_denormal = emit(aten.lt.Scalar, magnitude, 2.0**fmt.min_exponent)
    code = emit(
        aten.where.self,
        is_denormal,
        _denormal_code(emit, magnitude, fmt),
        _normal_code(emit, magnitude, fmt),
    )
    sign_bit = 1 << fmt.bits - 1
    sign = shift_right(emit, bits_of(emit, x), 32 - fmt.bits)
    code = emit(aten.bitwise_or.Tensor, code, emit(aten.bitwise_and.Scalar, sign, sign_bit))
    nan = emit.constant(code, fmt.nan)
    return emit(aten.where.self, emit(aten.isnan.default, x), nan, code)


def _normal_code(emit: Emitter, magnitude: fx.Node, fmt: Format) -> fx.Node:
    bits, dropped = bits_of(emit, magnitude), _dropped_bits(fmt)
    # Half a step less one, plus one if the last kept bit is odd: ties go to even.
    odd = emit(aten.bitwise_and.Scalar, shift_right(emit, bits, dropped), 1)
    rounded = emit(aten.add.Tensor, emit(aten.add.Tensor, bits, odd), (1 << dropped - 1) - 1)
    return emit(aten.sub.Tensor, shift_right(emit, rounded, dropped), _rebias(fmt))


def _denormal_code(emit: Emitter, magnitude: fx.Node, fmt: Format) -> fx.Node:
    """Adding a power of two rounds a denormal to its steps, which are then fp32's last bits."""
    shift = 2.0 ** (_dropped_bits(fmt) + fmt.min_exponent)
    shifted = bits_of(emit, emit(aten.add.Tensor, magnitude, shift))
    bits = torch.tensor(shift, dtype=torch.float32).view(torch.int32)
    return emit(aten.sub.Tensor, shifted, int(bits))


def _values(emit: Emitter, codes: fx.Node, fmt: Format) -> fx.Node:
    """Code points to fp32, as fp16 numbers of the same digits and another exponent bias.

    fp16 has an exponent bias of 15 and 10 mantissa bits; its denormals convert exactly.
    """
    code = emit(cast, codes, torch.int32)
    sign_bit = 1 << fmt.bits - 1
    sign = emit(aten.bitwise_and.Scalar, shift_left(emit, code, 16 - fmt.bits), 1 << 15)
    magnitude = emit(aten.bitwise_and.Scalar, code, sign_bit - 1)
    digits = emit(aten.bitwise_or.Tensor, sign, shift_left(emit, magnitude, 10 - fmt.mantissa))
    half = emit(aten.view.dtype, emit(cast, digits, torch.int16), torch.float16)
    value = emit(aten.mul.Tensor, emit(cast, half, torch.float32), 2.0 ** (14 + fmt.min_exponent))
    if not fmt.nan:
        return value
    nan = emit.constant(value, float("nan"))
    return emit(aten.where.self, emit(aten.eq.Scalar, magnitude, fmt.nan), nan, value)
