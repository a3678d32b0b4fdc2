"""Decide which values of a backward are multiples of the incoming gradient.

A multiple doubles if the incoming gradient doubles. Most values of a backward are multiples, but a
hook may clamp gradients, and an `autograd.Function` may add any tensor (DeepSeek's auxiliary loss).
A value is a multiple only if every operator between the gradient and the value is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.nodes import aten, prims
from fp8pass.graph.patterns import filled_with

# Operators that are linear in the first operand. Other operands must not depend on the gradient.
LINEAR_IN_FIRST = {
    *VIEWS, *graph.CASTS, aten.clone.default, aten.neg.default, aten.sum.default,
    aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.gather.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.threshold_backward.default,
}  # fmt: skip
# Operators that are linear in each operand. Only one operand may depend on the gradient.
BILINEAR = {aten.mul.Tensor, aten.mm.default}
# Operators that are jointly linear in the operands at these positions. Each of these operands must
# be a multiple of the gradient, or zero.
JOINTLY_LINEAR: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.where.self: (1, 2),
    aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1),
    aten.scatter_add.default: (0, 3),
    aten.scatter.src: (0, 3),
}


def is_multiple_of_gradient(node: fx.Node, depends: Callable[[Any], bool]) -> bool:
    """Whether an operator maps multiples of the gradient to a multiple of the gradient.

    `depends` returns whether an argument depends on the gradient. Arguments that depend on the
    gradient are assumed to be multiples of the gradient.
    """
    target, args = node.target, node.args
    depending = {i for i, arg in enumerate(args) if depends(arg)}
    if len(depending) < len([n for n in node.all_input_nodes if depends(n)]):
        return False  # a list or a keyword argument depends on the gradient
    if target in LINEAR_IN_FIRST:
        return depending == {0}
    if target in BILINEAR:
        return len(depending) == 1
    if target is aten.constant_pad_nd.default:
        return depending == {0} and not any(args[2:])
    if target is prims.fma.default:  # a * b + c
        return len({0, 1} & depending) == 1 and (depends(args[2]) or _is_zero(args[2]))
    if target not in JOINTLY_LINEAR:
        return False
    positions = JOINTLY_LINEAR[target]
    is_linear = all(depends(args[i]) or _is_zero(args[i]) for i in positions)
    return is_linear and depending <= set(positions)


def _is_zero(operand: Any) -> bool:
    while isinstance(operand, fx.Node) and operand.target in VIEWS | graph.CASTS:
        operand = operand.args[0]
    if isinstance(operand, fx.Node):
        return filled_with(operand) == 0
    return isinstance(operand, (int, float)) and operand == 0
