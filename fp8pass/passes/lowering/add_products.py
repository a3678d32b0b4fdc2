"""Add the product of an adapter to the result of another GEMM in place.

    before   y = add(view(_scaled_mm(x, W)), view(mm(h, B)))
    after    z = _scaled_mm(x, W);  add_product(z, h, B);  y = view(z)

Otherwise each kernel that reads `y` reads both terms, and stores `y` if the backward needs it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.codegen.add_product import add_product
from fp8pass.graph.linear_layers import projects_up
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.patterns import RESHAPES, is_same_shape_addition
from fp8pass.graph.sums import have_equal_shape_and_dtype, only_user
from fp8pass.passes.context import Context

GEMMS = {aten.mm.default, aten._scaled_mm.default}


def add_products(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # recipe `exact` must round as PyTorch does
        return
    for add in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if is_same_shape_addition(add) and not add.kwargs:
            terms = [_find_views(term) for term in add.args]
            product, total = sorted(terms, key=lambda views: not projects_up(views[0]))
            if _can_add(product[0], total[0]):
                _add_in_place(add, product, total)


def _find_views(term: Any) -> list[fx.Node]:
    """Return a node and its views; `term` is the last view. Nothing else reads these nodes."""
    views = [term]
    while views[0].target in RESHAPES and only_user(views[0]):
        views.insert(0, views[0].args[0])
    return views


def _can_add(product: fx.Node, total: fx.Node) -> bool:
    if not projects_up(product) or projects_up(total) or total.target not in GEMMS:
        return False
    if not only_user(product) or not only_user(total):
        return False
    dtypes = {tensor(x).dtype for x in product.all_input_nodes}
    is_same = dtypes == {tensor(total).dtype} and have_equal_shape_and_dtype(product, total)
    return is_same and tensor(total).is_contiguous()


def _add_in_place(add: fx.Node, product: list[fx.Node], total: list[fx.Node]) -> None:
    with add.graph.inserting_before(add):
        graph.emit(add.graph, add_product, total[0], *product[0].args, like=add)
    for view in total[1:]:
        add.prepend(view)  # reads the sum
    add.replace_all_uses_with(total[-1])
    for unused in (add, *reversed(product)):
        add.graph.erase_node(unused)
