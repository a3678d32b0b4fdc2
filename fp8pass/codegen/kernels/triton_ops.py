"""Programs in Triton: what every operator is."""

from __future__ import annotations

import math

from torch import fx

from fp8pass.codegen.program.ir import Load, Program, Step
from fp8pass.dialect.formats import FORMATS
from fp8pass.dialect.scaling import SMALLEST_SCALE

# Triton for each operator; operands are fp32 values or constants.
EXPRESSIONS: dict[str, str] = {
    "aten.add.Tensor": "{0} + {1}",
    "aten.add.Scalar": "{0} + {1}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.sub.Scalar": "{0} - {1}",
    "aten.rsub.Scalar": "{1} - {0}",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.mul.Scalar": "{0} * {1}",
    "aten.div.Tensor": "{0} / {1}",
    "aten.div.Scalar": "{0} / {1}",
    "aten.reciprocal.default": "1.0 / {0}",
    "aten.neg.default": "-{0}",
    "aten.abs.default": "tl.abs({0})",
    "aten.square.default": "{0} * {0}",
    "aten.sqrt.default": "tl.sqrt({0})",
    "aten.rsqrt.default": "tl.rsqrt({0})",
    "aten.exp.default": "exp2({0} * 1.4426950408889634)",
    "aten.log.default": "tl.log({0})",
    "aten.sin.default": "tl.sin({0})",
    "aten.cos.default": "tl.cos({0})",
    "aten.erf.default": "tl.erf({0})",
    "aten.sigmoid.default": "sigmoid({0})",
    # Triton's own is in a library for each device.
    "aten.tanh.default": "tl.where(tl.abs({0}) < 1e-3, {0}, 2.0 * sigmoid(2.0 * {0}) - 1.0)",
    "aten.silu.default": "{0} * sigmoid({0})",
    "aten.relu.default": "largest({0}, 0.0)",
    "aten.clamp_min.default": "largest({0}, {1})",
    "aten.clamp_max.default": "smallest({0}, {1})",
    "aten.maximum.default": "largest({0}, {1})",
    "aten.minimum.default": "smallest({0}, {1})",
    "aten.addcmul.default": "{0} + {1} * {2}",
    "aten.where.self": "tl.where({0}, {1}, {2})",
    "aten.gt.Scalar": "{0} > {1}",
    "aten.ge.Scalar": "{0} >= {1}",
    "aten.lt.Scalar": "{0} < {1}",
    "aten.le.Scalar": "{0} <= {1}",
    "aten.eq.Scalar": "{0} == {1}",
    "aten.ne.Scalar": "{0} != {1}",
    "aten.gt.Tensor": "{0} > {1}",
    "aten.ge.Tensor": "{0} >= {1}",
    "aten.lt.Tensor": "{0} < {1}",
    "aten.le.Tensor": "{0} <= {1}",
    "aten.sigmoid_backward.default": "{0} * {1} * (1.0 - {1})",
    "aten.tanh_backward.default": "{0} * (1.0 - {1} * {1})",
    "aten.silu_backward.default": "{0} * sigmoid({1}) * (1.0 + {1} * (1.0 - sigmoid({1})))",
    "aten.threshold_backward.default": "tl.where({1} <= {2}, 0.0, {0})",
}
# Exponents of `aten.pow.Tensor_Scalar`.
POWERS = {
    -1.0: "1.0 / {0}",
    -0.5: "tl.rsqrt({0})",
    0.5: "tl.sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
}


CODE_TYPES = {"e4m3": "tl.float8e4nv"}


def expression(step: Step) -> str | None:
    """What computes a step that is no reduction, None if nothing here does.

    Such as NaN for all of a matrix: of codes known to be equal, CUDA 13 packs half wrongly.
    """
    if any(x != x for x in step.args):
        return None
    if step.target == "scale":
        amax, format = step.args
        return f"scale_of({amax}, {1 / FORMATS[format].max!r}, {SMALLEST_SCALE!r})"
    if step.target == "aten.pow.Tensor_Scalar":
        template = POWERS.get(float(step.args[1]))
    else:
        template = EXPRESSIONS.get(step.target)
        if template is None or f"{{{len(step.args) - 1}}}" not in template:
            return None  # a default is not the default
    return template and template.format(*map(_literal, step.args))


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node is a pointwise operator that kernels have."""
    if node.kwargs or not all(isinstance(x, (fx.Node, int, float)) for x in node.args):
        return False
    placeholders = tuple("" if isinstance(x, fx.Node) else x for x in node.args)
    return expression(Step("", str(node.target), placeholders)) is not None


def _literal(argument: str | float) -> str:
    """A value's name, or a number."""
    if isinstance(argument, str):
        return argument
    return f"({argument!r})" if math.isfinite(argument) else f"float('{argument}')"


def kernel_name(kind: str, program: Program) -> str:
    """What a profiler shows: the kind of kernel, and the operators it computes."""
    targets = [step.target.split(".")[1] for step in program.steps if "." in step.target]
    words = [kind, *dict.fromkeys(targets)]
    if program.takes_amaxes:
        words.append("amax")
    elif not targets:
        words.append("scale" if program.finishes_amax else "cast")
    return "_".join(words)[:80]


def coded(value: str, scale: str) -> str:
    """Codes of a value, as fp32 that converts to them: conversions saturate, and keep NaN."""
    return f"({value} * tl.div_rn(1.0, {scale}))"


def pointers(program: Program) -> dict[Load, list[str]]:
    """The parameters that hold each operand."""
    found, number = {}, 0
    for load in program.loads:
        count = 2 if load.operand == "groups" else 1
        found[load] = [f"in{number + i}" for i in range(count)]
        number += count
    return found
