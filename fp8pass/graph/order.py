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
    return reach(nodes, lambda node: node.all_input_nodes if passes(node) else ())


def reach(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return `nodes` and all nodes that repeated calls of `step` reach from them."""
    found = set(nodes)
    pending = list(found)
    while pending:
        new = set(step(pending.pop())) - found
        found |= new
        pending += new
    return found


def insertion_point_after(node: fx.Node) -> fx.Node:
    """Return the first node before which users of `node` can be inserted."""
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
    targets = set(reads)
    if not targets:
        return False
    last = max(targets)
    computed = reach(stored, lambda node: (user for user in node.users if user < last))
    return any(not computed.isdisjoint(node.all_input_nodes) for node in targets)


def sort_around(kernel: fx.Node) -> None:
    """Move `kernel` after its operands, and users of its results after `kernel`."""
    last = max(kernel.all_input_nodes, default=kernel)
    if kernel < last:
        last.append(kernel)
    early = reach([kernel], lambda node: (user for user in node.users if user < kernel))
    for node in sorted(early - {kernel}, reverse=True):
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
    assert len(order) == len(g.nodes), "the graph has a cycle: a kernel needs its own result"
    for previous, node in pairwise(order):
        if previous.next is not node:
            previous.append(node)


def sort_and_prune(g: fx.Graph) -> None:
    sort_topologically(g)
    g.eliminate_dead_code()
