"""Store the sums of residual streams, and of their gradients, in buffers.

    before   s = add(x, y);  n = norm(s);  t = add(s, z)
    after    s = buffer(add(x, y));  n = norm(s);  t = add(s, z)

Otherwise Inductor inlines these sums into all kernels that use them. Each kernel would then read
the terms of all earlier blocks, and the terms of gradients would stay in FP32.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import store_in_buffer
from fp8pass.passes.context import Context


def buffer_residual_sums(gm: fx.GraphModule, ctx: Context) -> None:
    for node in list(gm.graph.nodes):
        if graph.is_float(node) and graph.is_residual_sum(node):
            store_in_buffer(node)
