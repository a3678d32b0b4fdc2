"""Find forward values whose products with a gradient sum up to the gradient of a small parameter.

    out = sum(weights(scale)[..., None] * streams, -2)     hyper-connections, gates of whole layers
    grad scale = sum over tokens of f(token) * <grad out, streams>

Such a gradient is a few numbers. In hyper-connections the sums were 7 to 21% of the norm of their
terms, so that an error of 12% of each term made gradients of another sign. Adam divides by the size
of the gradient: a small gradient counts as much as a large one. The gradient of a matrix has
thousands of such sums, and few of them cancel.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from fp8pass import graph
from fp8pass.error_analysis.differences import COPIES, PRODUCTS
from fp8pass.graph.classify import Kind, kind

SMALL = 32  # parameters of fewer elements
WIDE = 16  # elements of a row that is summed up; the smallest group that shares a scale
CANCELLATION = 10.0  # norm of the terms over their sum; more in one of twelve random sums


def factors_of_small_gradients(
    g: fx.Graph, backward: Collection[fx.Node], forward_outputs: int
) -> set[fx.Node]:
    """Return the forward values whose low bits would show in gradients of small parameters.

    Args:
        g: a joint graph.
        backward: its nodes that depend on a gradient.
        forward_outputs: how many of its outputs belong to the forward.
    """
    gradients = graph.outputs(g)[forward_outputs:]
    waiting = [x for x in gradients if isinstance(x, fx.Node) and _is_small(x)]
    seen, found = set(waiting), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if kind(node) is Kind.GEMM or _is_product_of_rows(node):
            found.update(_copied(x) for x in node.all_input_nodes if x not in backward)
            continue
        operands = [x for x in node.all_input_nodes if x in backward and x not in seen]
        seen.update(operands)
        waiting += [x for x in operands if _may_lead_to_rows(x, node)]
    if not found:
        return found
    return {node for node in g.nodes if node not in backward and _copied(node) in found}


def _is_small(gradient: fx.Node) -> bool:
    value = graph.value(gradient)
    if not isinstance(value, torch.Tensor):
        return False
    count = value.numel()
    return isinstance(count, int) and count < SMALL


def _may_lead_to_rows(node: fx.Node, user: fx.Node) -> bool:
    """Whether to go on from `user` to its operand: through narrow values, and to one wide value.

    Operators with several results end the search.
    """
    is_tensor = isinstance(graph.value(node), torch.Tensor)
    return is_tensor and not (_is_wide(node) and _is_wide(user))


def _is_product_of_rows(node: fx.Node) -> bool:
    return node.target in PRODUCTS and _is_wide(node)


def _is_wide(node: fx.Node) -> bool:
    shape = graph.tensor(node).shape
    return bool(shape) and not (isinstance(shape[-1], int) and shape[-1] < WIDE)


def _copied(node: fx.Node) -> fx.Node:
    """The node that `node` is a view, cast or copy of."""
    while node.target in COPIES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
