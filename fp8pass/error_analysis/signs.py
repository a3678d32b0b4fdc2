"""Infer which values of a graph are nonnegative or nonpositive in all elements.

A cumulative decay may have any magnitude. But its exponential is at most 1 if all terms are
nonpositive, such as -exp(a) · softplus(b) in Mamba, or a `logsigmoid`.

This module does not use `torch.utils._sympy.value_ranges`, which does not support views,
reductions, scans and padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Flag
from functools import reduce
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.nodes import aten, prims
from fp8pass.graph.patterns import ZEROS


class KnownSign(Flag):
    """The sign that all elements of a value have, as far as it is known."""

    UNKNOWN = 0
    NONNEGATIVE = 1
    NONPOSITIVE = 2
    ZERO = NONNEGATIVE | NONPOSITIVE

    @classmethod
    def of(cls, number: float) -> KnownSign:
        nonnegative = cls.NONNEGATIVE if number >= 0 else cls.UNKNOWN
        return nonnegative | (cls.NONPOSITIVE if number <= 0 else cls.UNKNOWN)

    def __neg__(self) -> KnownSign:
        one = self in (KnownSign.NONNEGATIVE, KnownSign.NONPOSITIVE)
        return KnownSign.ZERO ^ self if one else self

    def __mul__(self, other: KnownSign) -> KnownSign:
        nonnegative = KnownSign.NONNEGATIVE if self & other else KnownSign.UNKNOWN
        return nonnegative | (KnownSign.NONPOSITIVE if self & -other else KnownSign.UNKNOWN)


POSITIVE = KnownSign.of(1)


def infer_signs(g: fx.Graph) -> dict[fx.Node, KnownSign]:
    known: dict[fx.Node, KnownSign] = {}

    def sign_of(x: Any) -> KnownSign:
        if isinstance(x, fx.Node):
            return known.get(x, KnownSign.UNKNOWN)
        if isinstance(x, (list, tuple)):
            return reduce(operator.and_, map(sign_of, x), KnownSign.ZERO)
        return KnownSign.of(x) if isinstance(x, (bool, int, float)) else KnownSign.UNKNOWN

    for node in g.nodes:
        if rule := _RULES.get(node.target):
            signs = [sign_of(x) for x in node.args]
            if "alpha" in node.kwargs:
                signs.append(sign_of(node.kwargs["alpha"]))
            if sign := rule(node, *signs):
                known[node] = sign
    return known


Rule = Callable[..., KnownSign]  # takes a node and the signs of its arguments


def _add(node: fx.Node, a: KnownSign, b: KnownSign, alpha: KnownSign = POSITIVE) -> KnownSign:
    return a & b * alpha


def _subtract(node: fx.Node, a: KnownSign, b: KnownSign, alpha: KnownSign = POSITIVE) -> KnownSign:
    return b if _is_rest_of_scan(node) else a & -(b * alpha)


def _is_rest_of_scan(difference: fx.Node) -> bool:
    """Whether a node is `c[..., -1:] - c` for a cumulative sum c."""
    last, scan = difference.args[:2]
    if not (isinstance(last, fx.Node) and isinstance(scan, fx.Node)) or difference.kwargs:
        return False
    if scan.target is not aten.cumsum.default or last.target is not aten.slice.Tensor:
        return False
    along, rank = scan.args[1], graph.tensor(scan).ndim
    of, dim, start = (*last.args, 0, 0)[:3]
    same = of is scan and dim % rank == along % rank  # type: ignore[operator]
    return bool(same and start == -1)


def _multiply(node: fx.Node, a: KnownSign, b: KnownSign) -> KnownSign:
    return KnownSign.NONNEGATIVE if node.args[0] is node.args[1] else a * b


def _divide(node: fx.Node, a: KnownSign, b: KnownSign) -> KnownSign:
    """Return the sign of a quotient. A tensor divisor may contain zeros of either sign."""
    return a * b if isinstance(node.args[1], (int, float)) else KnownSign.UNKNOWN


def _power(node: fx.Node, base: KnownSign, _: KnownSign) -> KnownSign:
    exponent = node.args[1]
    if not isinstance(exponent, (int, float)):  # a symbolic size
        return KnownSign.UNKNOWN
    if exponent % 2 == 0:
        return KnownSign.NONNEGATIVE
    return base & KnownSign.NONNEGATIVE if exponent > 0 else KnownSign.UNKNOWN


def _where(node: fx.Node, _: KnownSign, a: KnownSign, b: KnownSign) -> KnownSign:
    condition: Any = node.args[0]
    if condition.target in (aten.gt.Scalar, aten.ge.Scalar):
        compared, number = condition.args
        # `x > 0` implies a nonnegative `x`, as in softplus.
        if compared is node.args[1] and isinstance(number, (int, float)) and number >= 0:
            a |= KnownSign.NONNEGATIVE
    return a & b


def _maximum(node: fx.Node, a: KnownSign, b: KnownSign) -> KnownSign:
    return (a | b) & KnownSign.NONNEGATIVE | a & b & KnownSign.NONPOSITIVE


def _minimum(node: fx.Node, a: KnownSign, b: KnownSign) -> KnownSign:
    return -_maximum(node, -a, -b)


def _clamp(node: fx.Node, x: KnownSign, *bounds: KnownSign) -> KnownSign:
    for combine, bound, value in zip((_maximum, _minimum), bounds, node.args[1:], strict=False):
        x = x if value is None else combine(node, x, bound)
    return x


# The result has the sign of the operand: these operators move, repeat or add up elements, or are
# increasing functions with f(0) = 0.
KEEP = (
    *(VIEWS - {aten.as_strided.default}), *graph.CASTS, operator.getitem, aten.clone.default,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
    aten.amax.default, aten.amin.default, aten.flip.default, prims.rev.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.index.Tensor,
    aten.gather.default, aten.log1p.default, aten.expm1.default, aten.tanh.default,
    aten.scalar_tensor.default, aten.cat.default, aten.stack.default,
)  # fmt: skip

NONNEGATIVE = (
    aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.abs.default,
    aten.sqrt.default, aten.rsqrt.default, aten.relu.default, aten.ones.default,
    aten.ones_like.default,
)  # fmt: skip

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(KEEP, lambda _, x, *rest: x),
    **dict.fromkeys(NONNEGATIVE, lambda *_: KnownSign.NONNEGATIVE),
    **dict.fromkeys((*ZEROS, aten.new_zeros.default), lambda *_: KnownSign.ZERO),
    **dict.fromkeys((aten.full.default, aten.full_like.default), lambda _, size, x, *rest: x),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _subtract),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _multiply),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _divide),
    **dict.fromkeys((aten.maximum.default, aten.clamp_min.default), _maximum),
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.default), _minimum),
    aten.constant_pad_nd.default: lambda _, x, sizes, value=KnownSign.ZERO: x & value,
    aten.neg.default: lambda _, x: -x,
    aten.pow.Tensor_Scalar: _power,
    aten.where.self: _where,
    aten.clamp.default: _clamp,
}
