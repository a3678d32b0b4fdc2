"""Create nodes, read the values of nodes, and copy graph modules."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fp8pass import compat

aten, prims = torch.ops.aten, torch.ops.prims

# The metadata that a new node inherits: its place in the user's code, and its checkpoint region.
_INHERITED_META = (
    "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "stack_trace", "seq_nr",
    "recompute", "ac_graph_id", "partitioner_tag", "custom",
)  # fmt: skip


def emit(
    g: fx.Graph,
    target: Callable[..., Any],
    *args: Any,
    like: fx.Node,
    fake: torch.Tensor | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Add a call to `target` at the graph's insertion point, and return the new node.

    The new node inherits its module, source line and checkpoint region from `like`. Its fake value
    is `fake`, or else is computed from the fake values of the arguments.
    """
    node = g.call_function(target, args, kwargs)
    node.meta = {key: like.meta[key] for key in _INHERITED_META if key in like.meta}
    if fake is None:
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        fake = target(*fake_args, **fake_kwargs)
    node.meta["val"] = fake
    return node


def value(node: fx.Node) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None if its value is not a single tensor."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def is_float(node: fx.Node) -> bool:
    """Whether the value of a node is a floating point tensor, which includes FP8 data."""
    val = value(node)
    return val is not None and val.is_floating_point()


def tensor(node: fx.Node) -> torch.Tensor:
    val = value(node)
    assert val is not None, f"{node} is not a tensor"
    return val


def is_non_tensor(node: fx.Node) -> bool:
    """Whether a value is a symbolic size or an opaque object. Saving it takes no GPU memory."""
    return compat.is_sym_node(node) or compat.is_opaque(node)


def nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's value. A symbolic size counts as its traced value."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return bytes_of(val)
    return 8 if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) else 0


def bytes_of(val: torch.Tensor) -> int:
    return numel(val) * val.element_size()


def numel(val: torch.Tensor) -> int:
    return math.prod(map(compat.size_hint, val.shape))


def stride_order(val: torch.Tensor) -> list[int]:
    """Return the dimensions by decreasing stride. Expanded dimensions (stride 0) come first."""
    strides = [compat.size_hint(stride) for stride in val.stride()]
    return sorted(range(val.ndim), key=lambda dim: -strides[dim] if strides[dim] else -math.inf)


def shape_text(val: torch.Tensor) -> str:
    """Format a shape, for example `2×16×s0`."""
    return "×".join(str(size) for size in val.shape) or "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_call(node: fx.Node, target: Callable[..., Any]) -> bool:
    return node.op == "call_function" and node.target is target


def output_node(g: fx.Graph) -> fx.Node:
    return next(iter(reversed(g.nodes)))


def outputs(g: fx.Graph) -> list[Any]:
    """Return the flat list of a graph's outputs. Some may be None."""
    return list(compat.arg_tree_leaves(*output_node(g).args))


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` selects one result of an operator with several results."""
    return is_call(node, operator.getitem)


def operator_of(node: fx.Node) -> fx.Node:
    """Return the operator that a getitem reads. Return other nodes unchanged."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]


def free_attribute(gm: fx.GraphModule, prefix: str) -> str:
    """Return `prefix`, followed by the smallest number that gives an unused attribute name."""
    return next(f"{prefix}{i}" for i in itertools.count() if not hasattr(gm, f"{prefix}{i}"))


def copy_module(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node] | None = None) -> fx.GraphModule:
    """Copy a graph module, and fill `copies` with the copy of each node. Parameters are shared."""
    copy = fx.Graph()
    output = copy.output(copy.graph_copy(gm.graph, {} if copies is None else copies))
    output.meta = dict(output_node(gm.graph).meta)
    return fx.GraphModule(gm, copy)
