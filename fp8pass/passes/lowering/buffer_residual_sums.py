"""Have the sums of residual streams, and of their gradients, stored.

    before   s = add(x, y);  n = norm(s);  t = add(s, z)
    after    s = buffer(add(x, y));  n = norm(s);  t = add(s, z)

Inductor inlines a pointwise operator into all kernels that use it until its expression is long. A
residual stream is such an operator. Its sums would be added up again from their terms, one more a
block. All terms would be held meanwhile, gradients in fp32 because their cast is inlined, too.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import store_in_buffer
from fp8pass.passes.context import Context


def buffer_residual_sums(gm: fx.GraphModule, ctx: Context) -> None:
    """Give the sums of residual streams, and of their gradients, buffers."""
    for node in list(gm.graph.nodes):
        val = graph.value(node)
        if val is None or not val.is_floating_point() or not graph.is_residual_sum(node):
            continue
        store_in_buffer(node)
