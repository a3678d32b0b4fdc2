"""Operators that store a value in a separate buffer, or fix the order of kernels.

`buffer(x, order)` stores `x` in memory; `order` has the dimensions from outermost to innermost.
Inductor's similar operator cannot sort symbolic strides. Without buffers, Inductor inlines sums of
the residual stream into each block (`buffer_residual_sums.py`).

`side_by_side(parts, dim)` is a `cat` whose parts are computed and stored by separate kernels.

`after(x, done)` copies `x` after all tensors in `done` are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fp8pass import compat, graph

library = torch.library.Library("fp8pass_codegen", "DEF")
library.define("buffer(Tensor x, int[] order) -> Tensor")


def _buffer(x: Tensor, order: list[int]) -> Tensor:
    inverse = [order.index(dim) for dim in range(x.ndim)]
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


library.impl("buffer", _buffer, "CompositeExplicitAutograd")
# Without this registration, the dynamic sizes of fake CUDA tensors would become static.
torch.library.register_fake("fp8pass_codegen::buffer", _buffer, lib=library)
buffer = torch.ops.fp8pass_codegen.buffer.default
compat.lower_to_buffer(buffer)


library.define("side_by_side(Tensor[] parts, int dim) -> Tensor")
library.impl("side_by_side", torch.cat, "CompositeExplicitAutograd")
side_by_side = torch.ops.fp8pass_codegen.side_by_side.default
compat.lower_to_parts(side_by_side)


library.define("after(Tensor x, Tensor[] done) -> Tensor")


def _after(x: Tensor, done: list[Tensor]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


library.impl("after", _after, "CompositeExplicitAutograd")
after = torch.ops.fp8pass_codegen.after.default


def store_in_buffer(node: fx.Node, order: list[int] | None = None) -> fx.Node:
    """Make all users of a node read a buffer. `order` defaults to the stride order of the node."""
    with node.graph.inserting_after(node):
        order = order or graph.stride_order(graph.tensor(node))
        stored = graph.emit(node.graph, buffer, node, order, like=node)
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return stored


def is_buffer(node: fx.Node, order: list[int]) -> bool:
    return graph.is_call(node, buffer) and node.args[1] == order
