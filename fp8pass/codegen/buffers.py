"""Values that get a buffer of their own, where Inductor would compute them in every kernel.

Inductor inlines a pointwise operator into all kernels that use it until its expression is long.
A residual stream is such an operator: its sums would be added up again from their terms, one more
a block, which are all held meanwhile, gradients in fp32 because their cast is inlined, too.
"""

from __future__ import annotations

from torch import fx

from fp8pass import compat, graph
from fp8pass.passes.regions import is_residual_sum


def buffer_residual_sums(gm: fx.GraphModule) -> None:
    """Give the sums of residual streams, and of their gradients, buffers."""
    changed = False
    for node in list(gm.graph.nodes):
        if is_residual_sum(node):
            _buffer(node)
            changed = True
    if changed:
        gm.recompile()


def _buffer(node: fx.Node) -> None:
    val = graph.value(node)
    if val is None or val.ndim == 0 or not val.is_floating_point():
        return
    # Only the order of the strides matters, and sizes may vary: ranks stand in for strides.
    order = graph.stride_order(val)
    ranks = [val.ndim - order.index(dim) for dim in range(val.ndim)]
    with node.graph.inserting_after(node):
        buffered = graph.emit(
            node.graph, compat.force_stride_order, node, ranks, like=node, fake=val
        )
    node.replace_all_uses_with(buffered, delete_user_cb=lambda user: user is not buffered)
