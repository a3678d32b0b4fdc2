"""Which values of a graph are nowhere positive: the logarithms of decays, however they are summed.

A sign analysis, one pass over the nodes: what an operator makes of operands of known signs. A
cumulative decay may be of any size, but its exponential is at most one if the graph says that what
is summed is -exp(a) · softplus(b), as in Mamba and in gated delta rules, or a `logsigmoid`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Flag
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.nodes import aten, prims


class KnownSign(Flag):
    """What is known of all elements: both of it of zeros."""

    UNKNOWN = 0
    NONNEGATIVE = 1
    NONPOSITIVE = 2
    ZERO = NONNEGATIVE | NONPOSITIVE


SignOf = Callable[[Any], KnownSign]
Rule = Callable[[fx.Node, SignOf], KnownSign]


def signs(g: fx.Graph) -> dict[fx.Node, KnownSign]:
    """The signs of the nodes of which something is known."""
    known: dict[fx.Node, KnownSign] = {}

    def sign_of(x: Any) -> KnownSign:
        if isinstance(x, fx.Node):
            return known.get(x, KnownSign.UNKNOWN)
        return of_number(x) if isinstance(x, (bool, int, float)) else KnownSign.UNKNOWN

    for node in g.nodes:
        if (rule := _RULES.get(node.target)) and (sign := rule(node, sign_of)):
            known[node] = sign
    return known


def scaled(sign: KnownSign, factor: float) -> KnownSign:
    """The sign of a value times a number."""
    return _product(sign, of_number(factor))


def of_number(x: float) -> KnownSign:
    """The sign of a number."""
    nonnegative = KnownSign.NONNEGATIVE if x >= 0 else KnownSign.UNKNOWN
    return nonnegative | (KnownSign.NONPOSITIVE if x <= 0 else KnownSign.UNKNOWN)


def _negated(sign: KnownSign) -> KnownSign:
    return KnownSign.ZERO ^ sign if sign in (KnownSign.NONNEGATIVE, KnownSign.NONPOSITIVE) else sign


def _product(a: KnownSign, b: KnownSign) -> KnownSign:
    nonnegative = KnownSign.NONNEGATIVE if a & b else KnownSign.UNKNOWN
    return nonnegative | (KnownSign.NONPOSITIVE if a & _negated(b) else KnownSign.UNKNOWN)


def _larger(a: KnownSign, b: KnownSign) -> KnownSign:
    return (a | b) & KnownSign.NONNEGATIVE | a & b & KnownSign.NONPOSITIVE


def _smaller(a: KnownSign, b: KnownSign) -> KnownSign:
    return _negated(_larger(_negated(a), _negated(b)))


def _kept(node: fx.Node, sign_of: SignOf) -> KnownSign:
    """Of what moves, repeats or adds up elements, or maps zero to zero and rises."""
    return sign_of(node.args[0])


def _in_common(node: fx.Node, sign_of: SignOf) -> KnownSign:
    found = KnownSign.ZERO
    for operand in node.all_input_nodes:
        found &= sign_of(operand)
    return found


def _padded(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return sign_of(node.args[0]) & sign_of((*node.args, 0.0)[2])


def _never_negative(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return KnownSign.NONNEGATIVE


def _sum(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return sign_of(node.args[0]) & _second_summand(node, sign_of)


def _difference(node: fx.Node, sign_of: SignOf) -> KnownSign:
    if (scan := _subtracted_from_its_last(node)) is not None:
        return sign_of(scan.args[0])  # the sum of what comes after each position
    return sign_of(node.args[0]) & _negated(_second_summand(node, sign_of))


def _second_summand(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return _product(sign_of(node.args[1]), sign_of(node.kwargs.get("alpha", 1)))


def _subtracted_from_its_last(difference: fx.Node) -> fx.Node | None:
    """The cumulative sum `c` of `c[..., -1:] - c`; None for other differences."""
    last, scan = difference.args[:2]
    if not (isinstance(last, fx.Node) and isinstance(scan, fx.Node)) or difference.kwargs:
        return None
    if scan.target is not aten.cumsum.default or last.target is not aten.slice.Tensor:
        return None
    along, rank = scan.args[1], graph.tensor(scan).ndim
    of, dim, start = (*last.args, 0, 0)[:3]
    same = of is scan and dim % rank == along % rank  # type: ignore[operator]
    return scan if same and start == -1 else None


def _multiplied(node: fx.Node, sign_of: SignOf) -> KnownSign:
    a, b = node.args[:2]
    return KnownSign.NONNEGATIVE if a is b else _product(sign_of(a), sign_of(b))


def _divided(node: fx.Node, sign_of: SignOf) -> KnownSign:
    """By a number: what a tensor divides by may be a zero of either sign."""
    x, divisor = node.args[:2]
    return (
        _product(sign_of(x), of_number(divisor))
        if isinstance(divisor, (int, float))
        else KnownSign.UNKNOWN
    )


def _power(node: fx.Node, sign_of: SignOf) -> KnownSign:
    exponent = node.args[1]
    if not isinstance(exponent, (int, float)):  # a size that varies
        return KnownSign.UNKNOWN
    if exponent % 2 == 0:
        return KnownSign.NONNEGATIVE
    return sign_of(node.args[0]) & KnownSign.NONNEGATIVE if exponent > 0 else KnownSign.UNKNOWN


def _chosen(node: fx.Node, sign_of: SignOf) -> KnownSign:
    condition, then, other = node.args
    return (sign_of(then) | _where_it_holds(condition, then, sign_of)) & sign_of(other)


def _where_it_holds(condition: Any, x: Any, sign_of: SignOf) -> KnownSign:
    """What `x > number` says of `x`: softplus is `x` where that is large."""
    if condition.target not in (aten.gt.Scalar, aten.ge.Scalar) or condition.args[0] is not x:
        return KnownSign.UNKNOWN
    return sign_of(condition.args[1]) & KnownSign.NONNEGATIVE


def _largest(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return _larger(sign_of(node.args[0]), sign_of(node.args[1]))


def _smallest(node: fx.Node, sign_of: SignOf) -> KnownSign:
    return _smaller(sign_of(node.args[0]), sign_of(node.args[1]))


def _clamped(node: fx.Node, sign_of: SignOf) -> KnownSign:
    x, low, high = (*node.args, None, None)[:3]
    found = sign_of(x) if low is None else _larger(sign_of(x), sign_of(low))
    return found if high is None else _smaller(found, sign_of(high))


KEEP = (
    *(VIEWS - {aten.as_strided.default}), *graph.CASTS, operator.getitem, aten.clone.default,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
    aten.amax.default, aten.amin.default, aten.flip.default, prims.rev.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.index.Tensor,
    aten.gather.default, aten.log1p.default, aten.expm1.default, aten.tanh.default,
    aten.scalar_tensor.default,
)  # fmt: skip

NEVER_NEGATIVE = (
    aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.abs.default,
    aten.sqrt.default, aten.rsqrt.default, aten.relu.default, aten.ones.default,
    aten.ones_like.default,
)  # fmt: skip

ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(KEEP, _kept),
    **dict.fromkeys(NEVER_NEGATIVE, _never_negative),
    **dict.fromkeys(ZEROS, lambda *_: KnownSign.ZERO),
    **dict.fromkeys((aten.full.default, aten.full_like.default), lambda n, of: of(n.args[1])),
    **dict.fromkeys((aten.cat.default, aten.stack.default), _in_common),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _difference),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _multiplied),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _divided),
    **dict.fromkeys((aten.maximum.default, aten.clamp_min.default), _largest),
    **dict.fromkeys((aten.minimum.default, aten.clamp_max.default), _smallest),
    aten.constant_pad_nd.default: _padded,
    aten.neg.default: lambda node, sign_of: _negated(sign_of(node.args[0])),
    aten.pow.Tensor_Scalar: _power,
    aten.where.self: _chosen,
    aten.clamp.default: _clamped,
}
