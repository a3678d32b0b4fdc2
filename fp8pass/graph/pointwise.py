"""Pointwise operators: one row for each says what it computes, in sympy and in Triton.

An operator that the error rules cannot derive yet lacks a formula, one that kernels cannot compute
yet lacks its Triton. All in the table are pointwise, whether PyTorch tags them so or not.
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
    clamped,
    compared,
    logarithm,
    of_numbers,
    over,
    power,
    root,
    sigmoid_backward,
    silu_backward,
    tanh_backward,
    threshold_backward,
    where,
)


@dataclass(frozen=True)
class Meaning:
    """What one operator computes.

    Attributes:
        formula: its value in sympy, None where the error rules have none.
        triton: its value in Triton, None where kernels have none. `{0}`, `{1}`, ... are operands,
            fp32 values or constants; functions are those of `codegen/kernels/device_functions.py`.
    """

    formula: Formula | None = None
    triton: str | None = None


_SILU_BACKWARD = "{0} * sigmoid({1}) * (1.0 + {1} * (1.0 - sigmoid({1})))"
# Triton's own is in a library for each device.
_TANH = "tl.where(tl.abs({0}) < 1e-3, {0}, 2.0 * sigmoid(2.0 * {0}) - 1.0)"

POINTWISE: dict[Any, Meaning] = {
    # Arithmetic.
    aten.add.Tensor: Meaning(of_numbers(lambda a, b: a + b), "{0} + {1}"),
    aten.add.Scalar: Meaning(of_numbers(lambda a, b: a + b), "{0} + {1}"),
    aten.sub.Tensor: Meaning(of_numbers(lambda a, b: a - b), "{0} - {1}"),
    aten.sub.Scalar: Meaning(of_numbers(lambda a, b: a - b), "{0} - {1}"),
    aten.rsub.Scalar: Meaning(of_numbers(lambda a, b: b - a), "{1} - {0}"),
    aten.mul.Tensor: Meaning(of_numbers(lambda a, b: a * b), "{0} * {1}"),
    aten.mul.Scalar: Meaning(of_numbers(lambda a, b: a * b), "{0} * {1}"),
    aten.div.Tensor: Meaning(of_numbers(over), "{0} / {1}"),
    aten.div.Scalar: Meaning(of_numbers(over), "{0} / {1}"),
    aten.addcmul.default: Meaning(of_numbers(lambda a, b, c: a + b * c), "{0} + {1} * {2}"),
    aten.reciprocal.default: Meaning(of_numbers(lambda a: over(sympy.Integer(1), a)), "1.0 / {0}"),
    aten.neg.default: Meaning(of_numbers(lambda a: -a), "-{0}"),
    aten.abs.default: Meaning(of_numbers(Magnitude), "tl.abs({0})"),
    aten.sign.default: Meaning(of_numbers(Sign)),
    # Powers, exponentials and their like.
    aten.pow.Tensor_Scalar: Meaning(power),  # in Triton: `POWERS`
    aten.square.default: Meaning(of_numbers(lambda a: a**2), "{0} * {0}"),
    aten.sqrt.default: Meaning(of_numbers(lambda a: root(a, 1)), "tl.sqrt({0})"),
    aten.rsqrt.default: Meaning(of_numbers(lambda a: root(a, -1)), "tl.rsqrt({0})"),
    aten.exp.default: Meaning(of_numbers(sympy.exp), "exp2({0} * 1.4426950408889634)"),
    aten.exp2.default: Meaning(of_numbers(lambda a: sympy.exp(a * math.log(2))), "exp2({0})"),
    aten.pow.Scalar: Meaning(of_numbers(lambda b, a: sympy.Pow(b, a))),
    aten.sinh.default: Meaning(of_numbers(lambda a: (sympy.exp(a) - sympy.exp(-a)) / 2)),
    aten.cosh.default: Meaning(of_numbers(lambda a: (sympy.exp(a) + sympy.exp(-a)) / 2)),
    aten.expm1.default: Meaning(of_numbers(lambda a: sympy.exp(a) - 1)),
    aten.log.default: Meaning(of_numbers(logarithm), "tl.log({0})"),
    aten.log1p.default: Meaning(of_numbers(lambda a: logarithm(1 + a))),
    aten.sin.default: Meaning(None, "tl.sin({0})"),
    aten.cos.default: Meaning(None, "tl.cos({0})"),
    aten.erf.default: Meaning(of_numbers(sympy.erf), "tl.erf({0})"),
    # Activations, and their gradients.
    aten.sigmoid.default: Meaning(of_numbers(Sigmoid), "sigmoid({0})"),
    aten.tanh.default: Meaning(of_numbers(sympy.tanh), _TANH),
    aten.silu.default: Meaning(of_numbers(lambda a: a * Sigmoid(a)), "{0} * sigmoid({0})"),
    aten.relu.default: Meaning(
        of_numbers(lambda a: Magnitude(a) * UnitStep(a)), "largest({0}, 0.0)"
    ),
    aten.sigmoid_backward.default: Meaning(of_numbers(sigmoid_backward), "{0} * {1} * (1.0 - {1})"),
    aten.tanh_backward.default: Meaning(of_numbers(tanh_backward), "{0} * (1.0 - {1} * {1})"),
    aten.silu_backward.default: Meaning(of_numbers(silu_backward), _SILU_BACKWARD),
    aten.threshold_backward.default: Meaning(threshold_backward, "tl.where({1} <= {2}, 0.0, {0})"),
    aten.gelu_backward.default: Meaning(),
    aten.hardtanh_backward.default: Meaning(),
    aten.leaky_relu_backward.default: Meaning(),
    # Comparisons and choices.
    aten.gt.Scalar: Meaning(compared(1), "{0} > {1}"),
    aten.ge.Scalar: Meaning(compared(1, or_equal=True), "{0} >= {1}"),
    aten.lt.Scalar: Meaning(compared(-1), "{0} < {1}"),
    aten.le.Scalar: Meaning(compared(-1, or_equal=True), "{0} <= {1}"),
    aten.eq.Scalar: Meaning(None, "{0} == {1}"),
    aten.ne.Scalar: Meaning(None, "{0} != {1}"),
    aten.gt.Tensor: Meaning(compared(1), "{0} > {1}"),
    aten.ge.Tensor: Meaning(compared(1, or_equal=True), "{0} >= {1}"),
    aten.lt.Tensor: Meaning(compared(-1), "{0} < {1}"),
    aten.le.Tensor: Meaning(compared(-1, or_equal=True), "{0} <= {1}"),
    aten.logical_and.default: Meaning(of_numbers(lambda a, b: a * b)),
    aten.logical_or.default: Meaning(of_numbers(lambda a, b: a + b - a * b)),
    aten.logical_not.default: Meaning(of_numbers(lambda a: 1 - a)),
    aten.clamp_min.default: Meaning(clamped(1), "largest({0}, {1})"),
    aten.clamp_max.default: Meaning(clamped(-1), "smallest({0}, {1})"),
    aten.maximum.default: Meaning(clamped(1), "largest({0}, {1})"),
    aten.minimum.default: Meaning(clamped(-1), "smallest({0}, {1})"),
    aten.where.self: Meaning(where, "tl.where({0}, {1}, {2})"),
    # Casts and copies, through which the error rules and the readers of kernels look.
    prims.convert_element_type.default: Meaning(),
    aten._to_copy.default: Meaning(),
    aten.clone.default: Meaning(),
    aten.copy.default: Meaning(),
    aten.lift_fresh_copy.default: Meaning(),
    # Random numbers that are a function of a seed.
    **dict.fromkeys(compat.seeded_random_ops(), Meaning()),
}
if hasattr(prims, "fma"):  # not in every PyTorch
    POINTWISE[prims.fma.default] = Meaning(of_numbers(lambda a, b, c: a * b + c))

# Triton of `aten.pow.Tensor_Scalar`, by exponent.
POWERS: dict[float, str] = {
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}

# Triton of every operator that always has the same, by name.
TRITON: dict[str, str] = {str(op): row.triton for op, row in POINTWISE.items() if row.triton}


def triton_template(target: str, arguments: Sequence[Any]) -> str | None:
    """The Triton of a call to an operator, None where kernels cannot compute it.

    They compute only calls with as many arguments as the template takes, and without constants
    that are NaN: where all codes of a matrix are known to be equal, CUDA 13 packs half of them
    wrongly.
    """
    if any(x != x for x in arguments):
        return None
    if target == str(aten.pow.Tensor_Scalar):
        return POWERS.get(arguments[1])
    template = TRITON.get(target, "")
    takes_as_many = f"{{{len(arguments) - 1}}}" in template
    takes_more = f"{{{len(arguments)}}}" in template
    return template if takes_as_many and not takes_more else None
