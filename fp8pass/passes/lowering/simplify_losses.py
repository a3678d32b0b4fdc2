"""Simplify the gradient of a cross entropy: no sums of one-hot rows, and values of a row only once.

    before   w = where(ne(y, -100), div(1, n), 0)
             g = mul(where(eq(y, iota), -1, 0), w)
             s = sum(g, [1]);  d = sub(g, mul(softmax, s))
    after    w = buffer(where(ne(y, -100), div(1, n), 0))
             g = mul(where(eq(buffer(y), iota), -1, 0), w)
             s = mul(w, -1);  d = sub(g, mul(softmax, s))

`g` is the gradient of the log-probabilities, [tokens, classes]. A row of `g` has at most one
element that is not zero: the weight times -1, at the label. The weight of an ignored token is 0. So
the sum of a row is the weight times -1. Inductor would compute the sum in a loop over the classes,
and would compute `w` and `y` for each element. On an H200, the kernel for 2,048 tokens and 151,936
classes takes 0.93 instead of 1.55 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.buffers import buffer, store_in_buffer
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, emit, prims, tensor
from fp8pass.graph.patterns import CASTS, counts_columns, filled_with
from fp8pass.passes.context import Context


@dataclass
class OneHot:
    """`weights * where(labels == classes, value, 0)`; labels and weights are [tokens, 1]."""

    labels: fx.Node
    weights: fx.Node
    value: float


def simplify_losses(gm: fx.GraphModule, ctx: Context) -> None:
    for total in gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        one_hot = _find_one_hot(total)
        if one_hot is None:
            continue
        with gm.graph.inserting_before(total):
            element = emit(gm.graph, aten.mul.Tensor, one_hot.weights, one_hot.value, like=total)
            if tensor(element).dtype != tensor(total).dtype:
                cast = prims.convert_element_type.default
                element = emit(gm.graph, cast, element, tensor(total).dtype, like=total)
        total.replace_all_uses_with(element)
        gm.graph.erase_node(total)
        _compute_once(one_hot.labels)
        _compute_once(one_hot.weights)


def _find_one_hot(total: fx.Node) -> OneHot | None:
    """Return the rows that `total` sums, if each has at most one element that is not zero."""
    gradient = _skip_casts(total.args[0])
    if total.args[1:] not in (([1], True), ([-1], True)) or total.kwargs:
        return None
    if not graph.is_call(gradient, aten.mul.Tensor):
        return None
    one_hot, weights = _skip_casts(gradient.args[0]), gradient.args[1]
    if not isinstance(one_hot, fx.Node) or not graph.is_call(one_hot, aten.where.self):
        return None
    is_label: Any
    value: Any
    zero: Any
    is_label, value, zero = one_hot.args
    if filled_with(zero) != 0 or not graph.is_call(is_label, aten.eq.Tensor):
        return None
    labels: Any
    labels, classes = is_label.args
    if graph.is_call(labels, aten.expand.default):
        labels = labels.args[0]
    factor = filled_with(value)
    if factor is None or not counts_columns(classes, tensor(gradient).shape[1]):
        return None
    columns = all(_is_column(x, tensor(gradient)) for x in (labels, weights))
    is_loss = columns and _computes_loss(labels)
    return OneHot(labels, weights, factor) if is_loss else None


def _skip_casts(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in CASTS:
        node = node.args[0]
    return node


def _is_column(node: Any, matrix: torch.Tensor) -> bool:
    """Whether a value has one element for each row of `matrix`."""
    if not isinstance(node, fx.Node) or matrix.ndim != 2 or tensor(node).ndim != 2:
        return False
    rows, columns = tensor(node).shape
    is_column = isinstance(columns, int) and columns == 1
    return is_column and compat.statically_known_true(rows == matrix.shape[0])


def _computes_loss(labels: fx.Node) -> bool:
    """Whether PyTorch's own loss computed the labels. Then they are classes, or have weight 0."""
    source = _stored_value(labels)
    operator = source.meta.get("original_aten")  # may be a copy, so not compared as an object
    return str(operator) == str(aten.nll_loss_backward.default)


def _compute_once(rows: fx.Node) -> None:
    """Store the tensor that `rows` is a view of, if generated code would compute it."""
    source = _stored_value(rows)
    if kind(source) is Kind.POINTWISE and not any(graph.is_call(u, buffer) for u in source.users):
        store_in_buffer(source)


def _stored_value(node: fx.Node) -> fx.Node:
    """Skip views and buffers."""
    while kind(node) is Kind.VIEW or graph.is_call(node, buffer):
        node = node.args[0]  # type: ignore[assignment]
    return node
