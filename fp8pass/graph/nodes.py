"""Create a node, read its value, copy a graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fp8pass import compat

aten, prims = torch.ops.aten, torch.ops.prims

# The origin of a node and the user's wishes there; the node that replaces it inherits them.
_INHERITED_META = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "stack_trace",
    "seq_nr",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "custom",
)


def emit(
    g: fx.Graph,
    target: Callable[..., Any],
    *args: Any,
    like: fx.Node,
    fake: torch.Tensor | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Add a call to `target` at the graph's insertion point, with its fake value.

    The new node inherits where it comes from (module, source line, checkpoint region) from `like`.
    Its value is computed from those of its arguments unless `fake` is given.
    """
    node = g.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _INHERITED_META if key in like.meta}
    if fake is None:
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        fake = target(*fake_args, **fake_kwargs)
    node.meta["val"] = fake
    return node


def value(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node, None if its value is not a single tensor."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_non_tensor(node: fx.Node) -> bool:
    """Whether a value is a size or an object: it costs nothing to hand to the backward."""
    return compat.is_sym_node(node) or compat.is_opaque(node)


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that is known to have one."""
    val = value(node)
    assert val is not None, f"{node} is not a tensor"
    return val


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's value; sizes that vary count as they were when traced."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return bytes_of(val)
    return 8 if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) else 0


def bytes_of(val: torch.Tensor) -> int:
    """Bytes of a fake tensor; sizes that vary count as they were when traced."""
    return numel(val) * val.element_size()


def numel(val: torch.Tensor) -> int:
    """Elements of a fake tensor; sizes that vary count as they were when traced."""
    total = 1
    for size in val.shape:
        total *= compat.size_hint(size)
    return total


def stride_order(val: torch.Tensor) -> list[int]:
    """Dimensions from the outermost to the innermost; expanded ones, of stride 0, are outermost."""
    strides = [compat.size_hint(stride) for stride in val.stride()]
    return sorted(range(val.ndim), key=lambda dim: -strides[dim] if strides[dim] else -math.inf)


def shape_text(val: torch.Tensor) -> str:
    """A shape as `2×16×s0`."""
    return "×".join(str(size) for size in val.shape) or "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def is_call(node: fx.Node, target: Callable[..., Any]) -> bool:
    """Whether `node` calls exactly `target`."""
    return node.op == "call_function" and node.target is target


def output_node(g: fx.Graph) -> fx.Node:
    """The graph's output."""
    return next(iter(reversed(g.nodes)))


def outputs(g: fx.Graph) -> list[Any]:
    """The flat list of a graph's outputs, None among them."""
    return list(compat.arg_tree_leaves(*output_node(g).args))


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` takes one result out of several."""
    return is_call(node, operator.getitem)


def operator_of(node: fx.Node) -> fx.Node:
    """The operator that `node` is one of several results of, or itself."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]


def copy_module(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node] | None = None) -> fx.GraphModule:
    """A module of its own graph that shares everything else with `gm`.

    `copies` is filled with the copy of every node.
    """
    copy = fx.Graph()
    output = copy.output(copy.graph_copy(gm.graph, {} if copies is None else copies))
    output.meta = dict(output_node(gm.graph).meta)
    return fx.GraphModule(gm, copy)
