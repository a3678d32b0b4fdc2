"""Operators that store a value in a separate buffer, or fix the order of kernels.

`fp8pass_codegen::buffer(x, order)` stores `x` in memory. `order` lists the dimensions of the buffer
from outermost to innermost. Inductor has a similar operator, but it takes strides, and it cannot
sort strides that are symbolic.

Inductor inlines a pointwise operator into every kernel that uses it, unless the expression becomes
too long. A residual stream is a long sum, which pointwise operators compute. Without buffers, each
block would recompute this sum from the terms of all earlier blocks, and these terms would stay in
memory. Gradients would stay in memory in fp32, because each reader would inline the cast to BF16.

`fp8pass_codegen::side_by_side(parts, dim)` returns the same as `cat`, but a separate kernel
computes each part and stores it at its place in the result.

`fp8pass_codegen::after(x, done)` copies `x` after all tensors in `done` are computed. The kernels
that compute `done` therefore run before the kernels that read the copy.
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


def emit_buffer(x: fx.Node, order: list[int]) -> fx.Node:
    """At the graph's insertion point, add and return a node that stores `x` in a buffer."""
    return graph.emit(x.graph, buffer, x, order, like=x)


def store_in_buffer(node: fx.Node, order: list[int] | None = None) -> fx.Node:
    """Store the value of a node in a buffer, and make all users of the node read the buffer.

    `order` lists the buffer's dimensions from outermost to innermost. The default is the order that
    the value had when the node was traced.
    """
    with node.graph.inserting_after(node):
        stored = emit_buffer(node, order or graph.stride_order(graph.tensor(node)))
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return stored


def is_buffer(node: fx.Node, order: list[int]) -> bool:
    """Whether a node stores its operand in a buffer with this order of dimensions."""
    return graph.is_call(node, buffer) and node.args[1] == order
