"""Sums of tensors: find the terms of a sum, and remove terms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fp8pass import compat
from fp8pass.graph.nodes import aten, is_call, tensor, value
from fp8pass.graph.patterns import RESHAPES


@dataclass(frozen=True)
class Term:
    """An operand of a chain of additions. Only the chain reads the operand and the partial sums."""

    top: fx.Node  # the operand
    total: fx.Node  # the last addition

    def remove(self) -> None:
        """Take the term out of its sum. At least one other term must remain."""
        (add,) = self.top.users
        add.replace_all_uses_with(next(x for x in add.all_input_nodes if x is not self.top))
        add.graph.erase_node(add)


def find_term(node: fx.Node) -> Term | None:
    """Return `node`, or a view of `node`, as a term of a sum; None if it is not a term."""
    top = node
    while (user := only_user(top)) is not None and user.target in RESHAPES:
        top = user
    total = top
    while (user := only_user(total)) is not None and _is_sum_of_two(user):
        total = user
    return Term(top, total) if total is not top else None


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum_of_two(node: fx.Node) -> bool:
    if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return all(
        value(x) is not None and have_equal_shape_and_dtype(x, node) for x in node.all_input_nodes
    )


def have_equal_shape_and_dtype(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have the same shape and dtype. Adds no guard on symbolic sizes."""
    x, y = tensor(a), tensor(b)
    if x.dtype != y.dtype or x.ndim != y.ndim:
        return False
    return all(compat.statically_known_true(m == n) for m, n in zip(x.shape, y.shape, strict=True))
