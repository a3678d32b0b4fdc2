"""Which values of a backward are multiples of the gradient that it starts from.

A backward mostly is linear in its incoming gradient; but a hook may clamp gradients, and an
`autograd.Function` may add what it likes (an auxiliary loss, DeepSeek's say). Each operator between
has to be known to be linear in what is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.nodes import aten, prims

# Multiples if their first operand is; the others do not depend on it.
OF_FIRST = {
    *VIEWS,
    *graph.CASTS,
    aten.clone.default,
    aten.neg.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.gather.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
}
# Multiples if one operand is, and the other one does not depend on it.
PRODUCTS = {aten.mul.Tensor, aten.mm.default}
# Multiples if these operands are, or are zero, by their places.
SUMMED_OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.add.Tensor: (0, 1),
    aten.sub.Tensor: (0, 1),
    aten.where.self: (1, 2),
    aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1),
    aten.scatter_add.default: (0, 3),
    aten.scatter.src: (0, 3),
}


def is_multiple_of_gradient(node: fx.Node, of: Callable[[Any], bool]) -> bool:
    """Whether a node is a multiple of a gradient, by those of its operands that are `of` it.

    All other operands must not depend on that gradient; `node` is known to.
    """
    target, args = node.target, node.args
    depending = [i for i, arg in enumerate(args) if of(arg)]
    if len(depending) < len([n for n in node.all_input_nodes if of(n)]):
        return False  # in a list, or by name
    if target in OF_FIRST:
        return depending == [0]
    if target in PRODUCTS:
        return len(depending) == 1
    if target is aten.constant_pad_nd.default:
        return depending == [0] and not any(args[2:])
    if target is prims.fma.default:  # a * b + c
        return len({0, 1} & set(depending)) == 1 and (of(args[2]) or is_zero(args[2]))
    if target not in SUMMED_OPERANDS:
        return False
    places = SUMMED_OPERANDS[target]
    return set(depending) <= set(places) and all(of(args[i]) or is_zero(args[i]) for i in places)


def is_zero(value: Any) -> bool:
    """Whether a value is a constant of zeros."""
    while isinstance(value, fx.Node) and value.target in VIEWS | graph.CASTS:
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    if value.target in (aten.full.default, aten.full_like.default):
        return bool(value.args[1] == 0)
    if value.target is aten.scalar_tensor.default:
        return bool(value.args[0] == 0)
    return value.target in (aten.zeros.default, aten.zeros_like.default)
