"""Store the sums of residual streams, and of their gradients, in buffers.

    before   s = add(x, y);  n = norm(s);  t = add(s, z)
    after    s = buffer(add(x, y));  n = norm(s);  t = add(s, z)

Inductor inlines short expressions of pointwise operators, such as sums of a residual stream, into
all kernels that use them. Without buffers, each kernel would recompute a sum from the terms that
all earlier blocks added, so all these terms would stay in memory. Terms of gradients would even
stay in FP32, because their casts to 16 bits would be inlined, too.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import store_in_buffer
from fp8pass.passes.context import Context


def buffer_residual_sums(gm: fx.GraphModule, ctx: Context) -> None:
    """Emit a buffer for each floating-point residual sum."""
    for node in list(gm.graph.nodes):
        if graph.is_float(node) and graph.is_residual_sum(node):
            store_in_buffer(node)
