"""Compute the sum of a GEMM and of an adapter's product in one GEMM.

    before   y = add(view(scaled_mm(x, W)), view(mm(h, B)))
    after    y = view(addmm(scaled_mm(x, W), h, B))

Otherwise each kernel that reads `y` reads both terms, and stores `y` if the backward needs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.graph.linear_layers import projects_up
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.patterns import RESHAPES, is_same_shape_addition
from fp8pass.graph.sums import have_equal_shape_and_dtype, only_user
from fp8pass.graph.tags import ADDS_IN_PLACE
from fp8pass.passes.context import Context

GEMMS = {aten.mm.default, torch.ops.fp8pass.scaled_mm.default}  # before `lower_dialect`


def use_addmm(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # recipe `exact` must round as PyTorch does
        return
    for add in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if is_same_shape_addition(add) and not add.kwargs:
            terms = [_find_views(term) for term in add.args]
            product, total = sorted(terms, key=lambda views: not projects_up(views[0]))
            if _can_merge(product[0], total[0]):
                _merge(add, product, total)


def _find_views(term: Any) -> list[fx.Node]:
    """Return the value that a term views, and the views in order; `term` is the last one.

    Nothing but the term reads the views before it.
    """
    views = [term]
    while views[0].target in RESHAPES and only_user(views[0]):
        views.insert(0, views[0].args[0])
    return views


def _can_merge(product: fx.Node, total: fx.Node) -> bool:
    if not projects_up(product) or projects_up(total) or total.target not in GEMMS:
        return False
    if not only_user(product) or not only_user(total):
        return False
    dtypes = {tensor(x).dtype for x in product.all_input_nodes}
    return dtypes == {tensor(total).dtype} and have_equal_shape_and_dtype(product, total)


def _merge(add: fx.Node, product: list[fx.Node], total: list[fx.Node]) -> None:
    with add.graph.inserting_before(add):
        merged = graph.emit(
            add.graph, aten.addmm.default, total[0], *product[0].args, like=product[0]
        )
    merged.meta[ADDS_IN_PLACE] = True
    view = merged
    for node in total[1:]:
        add.prepend(node)
        node.replace_input_with(node.all_input_nodes[0], view)
        view = node
    add.replace_all_uses_with(view)
    for unused in (add, *reversed(product)):
        add.graph.erase_node(unused)
