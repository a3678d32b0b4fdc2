"""A table of pointwise operators. It has each operator's formula in sympy and in Triton.

Operators without a sympy formula have no error rule. Operators without Triton code are not fused
into kernels. `classify.py` treats all operators of the table as pointwise, even if PyTorch does
not tag them as pointwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from fp8pass import compat
from fp8pass.graph.nodes import aten, prims
from fp8pass.graph.symbols import (
    Formula,
    Magnitude,
    Sigmoid,
    Sign,
    UnitStep,
    Where,
    clamp,
    comparison,
    elementwise,
    logarithm,
    power,
    quotient,
    square_root,
    threshold_backward,
)


@dataclass(frozen=True)
class PointwiseOp:
    """How to compute one operator in sympy and in Triton."""

    # The sympy formula of an element, for error rules; None if not supported.
    formula: Formula | None = None
    # The Triton code of an element, for kernels; None if not supported. `{0}`, `{1}`, ... stand for
    # the operands, which are fp32 values or constants. Functions such as `sigmoid` are defined in
    # `codegen/kernels/device_functions.py`.
    triton: str | None = None


_SILU_BACKWARD = "{0} * sigmoid({1}) * (1.0 + {1} * (1.0 - sigmoid({1})))"
# Written with the sigmoid, because Triton's tanh needs a device library.
_TANH = "tl.where(tl.abs({0}) < 1e-3, {0}, 2.0 * sigmoid(2.0 * {0}) - 1.0)"

POINTWISE: dict[Any, PointwiseOp] = {
    # Arithmetic.
    aten.add.Tensor: PointwiseOp(elementwise(lambda a, b: a + b), "{0} + {1}"),
    aten.add.Scalar: PointwiseOp(elementwise(lambda a, b: a + b), "{0} + {1}"),
    aten.sub.Tensor: PointwiseOp(elementwise(lambda a, b: a - b), "{0} - {1}"),
    aten.sub.Scalar: PointwiseOp(elementwise(lambda a, b: a - b), "{0} - {1}"),
    aten.rsub.Scalar: PointwiseOp(elementwise(lambda a, b: b - a), "{1} - {0}"),
    aten.mul.Tensor: PointwiseOp(elementwise(lambda a, b: a * b), "{0} * {1}"),
    aten.mul.Scalar: PointwiseOp(elementwise(lambda a, b: a * b), "{0} * {1}"),
    aten.div.Tensor: PointwiseOp(elementwise(quotient), "{0} / {1}"),
    aten.div.Scalar: PointwiseOp(elementwise(quotient), "{0} / {1}"),
    aten.addcmul.default: PointwiseOp(elementwise(lambda a, b, c: a + b * c), "{0} + {1} * {2}"),
    aten.reciprocal.default: PointwiseOp(
        elementwise(lambda a: quotient(sympy.Integer(1), a)), "1.0 / {0}"
    ),
    aten.neg.default: PointwiseOp(elementwise(lambda a: -a), "-{0}"),
    aten.abs.default: PointwiseOp(elementwise(Magnitude), "tl.abs({0})"),
    aten.sign.default: PointwiseOp(elementwise(Sign)),
    # Powers, exponentials, logarithms.
    aten.pow.Tensor_Scalar: PointwiseOp(power),  # Triton: see `POWERS`
    aten.square.default: PointwiseOp(elementwise(lambda a: a**2), "{0} * {0}"),
    aten.sqrt.default: PointwiseOp(elementwise(square_root), "tl.sqrt({0})"),
    aten.rsqrt.default: PointwiseOp(elementwise(lambda a: square_root(a, -1)), "tl.rsqrt({0})"),
    aten.exp.default: PointwiseOp(elementwise(sympy.exp), "exp({0})"),
    aten.exp2.default: PointwiseOp(elementwise(lambda a: sympy.exp(a * math.log(2))), "exp2({0})"),
    aten.pow.Scalar: PointwiseOp(elementwise(lambda b, a: sympy.Pow(b, a))),
    aten.sinh.default: PointwiseOp(elementwise(lambda a: (sympy.exp(a) - sympy.exp(-a)) / 2)),
    aten.cosh.default: PointwiseOp(elementwise(lambda a: (sympy.exp(a) + sympy.exp(-a)) / 2)),
    aten.expm1.default: PointwiseOp(elementwise(lambda a: sympy.exp(a) - 1)),
    aten.log.default: PointwiseOp(elementwise(logarithm), "tl.log({0})"),
    aten.log1p.default: PointwiseOp(elementwise(lambda a: logarithm(1 + a))),
    aten.sin.default: PointwiseOp(None, "tl.sin({0})"),
    aten.cos.default: PointwiseOp(None, "tl.cos({0})"),
    aten.erf.default: PointwiseOp(elementwise(sympy.erf), "erf({0})"),
    # Activations and their gradients.
    aten.sigmoid.default: PointwiseOp(elementwise(Sigmoid), "sigmoid({0})"),
    aten.tanh.default: PointwiseOp(elementwise(sympy.tanh), _TANH),
    aten.silu.default: PointwiseOp(elementwise(lambda a: a * Sigmoid(a)), "{0} * sigmoid({0})"),
    aten.relu.default: PointwiseOp(
        elementwise(lambda a: Magnitude(a) * UnitStep(a)), "largest({0}, 0.0)"
    ),
    aten.sigmoid_backward.default: PointwiseOp(
        elementwise(lambda g, s: g * s * (1 - s)), "{0} * {1} * (1.0 - {1})"
    ),
    aten.tanh_backward.default: PointwiseOp(
        elementwise(lambda g, t: g * (1 - t**2)), "{0} * (1.0 - {1} * {1})"
    ),
    aten.silu_backward.default: PointwiseOp(
        elementwise(lambda g, a: g * Sigmoid(a) * (1 + a * (1 - Sigmoid(a)))), _SILU_BACKWARD
    ),
    aten.threshold_backward.default: PointwiseOp(
        threshold_backward, "tl.where({1} <= {2}, 0.0, {0})"
    ),
    aten.gelu_backward.default: PointwiseOp(),
    aten.hardtanh_backward.default: PointwiseOp(),
    aten.leaky_relu_backward.default: PointwiseOp(),
    # Comparisons and choices.
    aten.gt.Scalar: PointwiseOp(comparison(1), "{0} > {1}"),
    aten.ge.Scalar: PointwiseOp(comparison(1, or_equal=True), "{0} >= {1}"),
    aten.lt.Scalar: PointwiseOp(comparison(-1), "{0} < {1}"),
    aten.le.Scalar: PointwiseOp(comparison(-1, or_equal=True), "{0} <= {1}"),
    aten.eq.Scalar: PointwiseOp(None, "{0} == {1}"),
    aten.ne.Scalar: PointwiseOp(None, "{0} != {1}"),
    aten.gt.Tensor: PointwiseOp(comparison(1), "{0} > {1}"),
    aten.ge.Tensor: PointwiseOp(comparison(1, or_equal=True), "{0} >= {1}"),
    aten.lt.Tensor: PointwiseOp(comparison(-1), "{0} < {1}"),
    aten.le.Tensor: PointwiseOp(comparison(-1, or_equal=True), "{0} <= {1}"),
    aten.logical_and.default: PointwiseOp(elementwise(lambda a, b: a * b)),
    aten.logical_or.default: PointwiseOp(elementwise(lambda a, b: a + b - a * b)),
    aten.logical_not.default: PointwiseOp(elementwise(lambda a: 1 - a)),
    aten.clamp_min.default: PointwiseOp(clamp(1), "largest({0}, {1})"),
    aten.clamp_max.default: PointwiseOp(clamp(-1), "smallest({0}, {1})"),
    aten.maximum.default: PointwiseOp(clamp(1), "largest({0}, {1})"),
    aten.minimum.default: PointwiseOp(clamp(-1), "smallest({0}, {1})"),
    aten.where.self: PointwiseOp(elementwise(Where), "tl.where({0}, {1}, {2})"),
    # Casts and copies, which error rules and fused kernels skip.
    prims.convert_element_type.default: PointwiseOp(),
    aten._to_copy.default: PointwiseOp(),
    aten.clone.default: PointwiseOp(),
    aten.copy.default: PointwiseOp(),
    aten.lift_fresh_copy.default: PointwiseOp(),
    # Random numbers that are determined by a seed operand.
    **dict.fromkeys(compat.SEEDED_RANDOM, PointwiseOp()),
}
if hasattr(prims, "fma"):  # some PyTorch versions lack it
    POINTWISE[prims.fma.default] = PointwiseOp(elementwise(lambda a, b, c: a * b + c))

# The Triton code of `aten.pow.Tensor_Scalar`, by exponent.
POWERS: dict[float, str] = {
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}

# The Triton code of all operators except `aten.pow.Tensor_Scalar`, by the operator's name.
TRITON_TEMPLATES: dict[str, str] = {
    str(op): row.triton for op, row in POINTWISE.items() if row.triton
}


def triton_template(target: str, arguments: Sequence[Any]) -> str | None:
    """Return the Triton code of a call to an operator, or None if kernels cannot compute the call.

    The call must have as many arguments as the template. No argument may be a NaN constant. Such a
    constant may fill a matrix with NaN, and CUDA 13's assembler packs elements wrongly if they are
    known to be equal.
    """
    if any(x != x for x in arguments):
        return None
    if target == str(aten.pow.Tensor_Scalar):
        return POWERS.get(arguments[1])
    template = TRITON_TEMPLATES.get(target, "")
    has_last = f"{{{len(arguments) - 1}}}" in template
    has_more = f"{{{len(arguments)}}}" in template
    return template if has_last and not has_more else None
