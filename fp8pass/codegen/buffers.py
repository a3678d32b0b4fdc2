"""Operators that store a value in a buffer of its own, or delay its computation.

`fp8pass_codegen::buffer(x, order)` stores `x` in memory; `order` lists its dimensions from
outermost to innermost. Inductor's own operator expects strides, and cannot sort symbolic strides.

Inductor inlines a pointwise operator into every kernel that uses it, unless the expression becomes
too long. A residual stream is a sum of pointwise operators. Without buffers, each block would
recompute this sum from the terms of all earlier blocks, which would stay in memory until then.
Gradients would stay in fp32, because their casts would be inlined, too.

`fp8pass_codegen::side_by_side(parts, dim)` returns the same as `cat`, but a separate kernel
computes each part and stores it at its place in the result.

`fp8pass_codegen::after(x, done)` copies `x` after all tensors in `done` are computed. Inductor
therefore cannot delay the kernels that compute `done` until after the kernels that read the copy.
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
# Without a fake kernel, fake tensors run `_buffer` itself, which makes dynamic sizes of CUDA
# tensors static.
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
    """Add a node that stores `x` in a buffer, at the insertion point."""
    return graph.emit(x.graph, buffer, x, order, like=x)


def store_in_buffer(node: fx.Node, order: list[int] | None = None) -> fx.Node:
    """Store the value of a node in a buffer, and make all users of the node read the buffer.

    `order` is the buffer's order of dimensions; by default, the node's order when it was traced.
    """
    with node.graph.inserting_after(node):
        stored = emit_buffer(node, order or graph.stride_order(graph.tensor(node)))
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return stored


def is_buffer(node: fx.Node, order: list[int]) -> bool:
    """Whether a node stores its operand in a buffer with this layout."""
    return graph.is_call(node, buffer) and node.args[1] == order
