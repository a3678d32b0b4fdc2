"""Ancestors and dependences of nodes; topological order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import pairwise

from torch import fx

from fp8pass import compat


def ancestors(
    nodes: Iterable[fx.Node], passes: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Return `nodes` and every node that they are computed from.

    The search does not continue to the operands of a node for which `passes` is false.
    """
    found = set(nodes)
    pending = list(found)
    while pending:
        node = pending.pop()
        if passes(node):
            pending += [operand for operand in node.all_input_nodes if operand not in found]
            found.update(node.all_input_nodes)
    return found


def insertion_point_after(node: fx.Node) -> fx.Node:
    """Return the node before which users of `node` can be inserted."""
    following = node.next
    while following.op == "placeholder" or (
        following.target is operator.getitem and following.args[0] is node.args[0]
    ):
        following = following.next
    return following


def tangent_dependent(g: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on an incoming gradient. They can only run in the backward."""
    found: set[fx.Node] = set()
    for node in g.nodes:
        if compat.is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def depends_on(reads: Iterable[fx.Node], stored: Iterable[fx.Node]) -> bool:
    """Whether a node of `reads` depends on a node of `stored`. The graph must be sorted."""
    targets, seen = set(reads), set(stored)
    if not targets:
        return False
    last, pending = max(targets), list(seen)
    while pending:
        for user in pending.pop().users:
            if user in targets:
                return True
            if user not in seen and user < last:
                seen.add(user)
                pending.append(user)
    return False


def sort_around(kernel: fx.Node) -> None:
    """Move `kernel` after its operands, and users of its results after `kernel`."""
    last = max(kernel.all_input_nodes, default=kernel)
    if kernel < last:
        last.append(kernel)
    early, pending = set[fx.Node](), [kernel]
    while pending:
        found = {user for user in pending.pop().users if user < kernel} - early
        early |= found
        pending += found
    for node in sorted(early, reverse=True):
        kernel.append(node)


def sort_topologically(g: fx.Graph) -> None:
    """Move each node after its operands, but no further than necessary. Inputs come first."""
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for node in sorted(g.nodes, key=lambda node: node.op != "placeholder"):
        pending = [node]
        while pending:
            current = pending.pop()
            missing = next((n for n in current.all_input_nodes if n not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(current)
                continue
            order.append(current)
            placed.add(current)
            pending += reversed(waiting.pop(current, []))
    assert len(order) == len(g.nodes), "a kernel needs its own result"
    for previous, node in pairwise(order):
        if previous.next is not node:
            previous.append(node)


def sort_and_prune(g: fx.Graph) -> None:
    sort_topologically(g)
    g.eliminate_dead_code()
