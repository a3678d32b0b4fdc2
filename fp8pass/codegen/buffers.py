"""Values that get a buffer of their own, in a layout of their own.

`fp8pass_codegen::buffer(x, order)` is `x` in memory; `order` lists its dimensions from outermost to
innermost. Inductor's own operator for this takes strides instead. It cannot order strides of
varying size, and ranks given in their place would pass for the strides of a value that is saved.

Inductor inlines a pointwise operator into all kernels that use it until its expression is long. A
residual stream consists of such operators: each block would add up its sum again from all terms
before it, which would all be held in memory until then, gradients in fp32 because their casts would
be inlined, too.

`fp8pass_codegen::side_by_side(parts, dim)` is `cat`, with each part computed for itself and stored
in its place.

`fp8pass_codegen::after(x, done)` is a copy of `x` that is made when there is all of `done`: no
kernel that reads it runs earlier, and none that computes one of `done` can wait for later ones.
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
    """Add a buffer for `x` at the insertion point."""
    return graph.emit(x.graph, buffer, x, order, like=x)


def hold(node: fx.Node, order: list[int] | None = None) -> fx.Node:
    """Have all users of a node read it from a buffer; as it was traced, unless `order` is given."""
    with node.graph.inserting_after(node):
        held = emit_buffer(node, order or graph.stride_order(graph.tensor(node)))
    node.replace_all_uses_with(held, delete_user_cb=lambda user: user is not held)
    return held


def is_buffer(node: fx.Node, order: list[int]) -> bool:
    """Whether a node is the buffer of its operand in a layout."""
    return graph.is_call(node, buffer) and node.args[1] == order
