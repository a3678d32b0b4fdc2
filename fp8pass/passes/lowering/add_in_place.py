"""Let the `addmm` of `use_addmm` add a narrow product to the result of another GEMM in place.

    before   z = _scaled_mm(x, W);  y = addmm(z, h, B)
    after    z = _scaled_mm(x, W);  add_product(z, h, B);  y = z

Inductor's `addmm` would read `z` and write `y`, or would leave the sum to the kernels that read it.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.add_product import add_product
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.tags import ADDS_IN_PLACE
from fp8pass.passes.context import Context

GEMMS = {aten.mm.default, aten._scaled_mm.default}  # after `lower_dialect`


def add_in_place(gm: fx.GraphModule, ctx: Context) -> None:
    for addmm in gm.graph.find_nodes(op="call_function", target=aten.addmm.default):
        total = addmm.args[0]
        if not addmm.meta.get(ADDS_IN_PLACE) or total.target not in GEMMS:
            continue
        if tensor(total).is_contiguous():
            with gm.graph.inserting_before(addmm):
                graph.emit(gm.graph, add_product, *addmm.args, like=addmm)
            addmm.replace_all_uses_with(total)
            gm.graph.erase_node(addmm)
