"""Helpers to read and extend FX graphs: one way to create a node, one way to look through views."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fp8pass import compat

aten, prims = torch.ops.aten, torch.ops.prims

# Where a node comes from, and what the user asked for there: inherited by what replaces it.
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

# Set on what replaces an operator: the operator's name, by which values are named.
REPLACED = "fp8pass_replaced"

# Views that keep the order of the elements, so that two of one tensor hold the same matrix.
RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}


def emit(
    graph: fx.Graph,
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
    node = graph.call_function(target, args, kwargs)
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


def is_call(node: fx.Node, target: Callable[..., Any]) -> bool:
    """Whether `node` calls exactly `target`."""
    return node.op == "call_function" and node.target is target


def root(node: fx.Node) -> fx.Node:
    """The node whose elements `node` holds, in the same order."""
    while node.target in RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """A matrix and whether `node` is its transpose, looking through swaps of two dimensions."""
    flipped = False
    while _is_swap(node):
        node, flipped = node.args[0], not flipped  # type: ignore[assignment]
    return node, flipped


def source(node: fx.Node) -> fx.Node:
    """The node that `node` is a view, transpose, cast or plain copy of."""
    while node.target in RESHAPES | CASTS or _is_swap(node) or is_call(node, aten.clone.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_swap(node: fx.Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    if is_call(node, aten.permute.default):
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return is_call(node, aten.transpose.int) and len(tensor(node).shape) == 2


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes`, and all that they are computed from."""
    found = set(nodes)
    pending = list(found)
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                pending.append(operand)
    return found


def tangent_dependent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that need a gradient from outside: what can only run in the backward."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if compat.is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's output."""
    return next(iter(reversed(graph.nodes)))


def outputs(graph: fx.Graph) -> list[Any]:
    """The flat list of a graph's outputs, None among them."""
    return list(torch.utils._pytree.arg_tree_leaves(*output_node(graph).args))


def value_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Names of tensors by module, operator and a number.

    They are the same whatever batch a model is traced with, whether its sizes vary or not, and
    whatever runs in FP8.
    """
    counts: dict[str, int] = {}
    names = {}
    for node in graph.nodes:
        if value(node) is None:
            continue
        name = node.meta.get(REPLACED) or getattr(node.target, "__name__", node.target)
        prefix = f"{module_path(node)}:{node.op if node.op == 'placeholder' else name}"
        counts[prefix] = counts.get(prefix, -1) + 1
        names[node] = f"{prefix}:{counts[prefix]}"
    return names


def module_path(node: fx.Node) -> str:
    """The path of the module that `node` comes from, as `model.layers.0.mlp`; '' at the top."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entries = list(stack.values())
    return clean_path(entries[-1][0]) if entries else ""


def clean_path(path: str) -> str:
    """A module path as the user wrote it, out of Dynamo's `L['self']._modules['a'].b[0]`."""
    path = re.sub(r"_modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]", r".\1\2\3.", path)
    parts = [p for p in path.split(".") if p]
    if parts and parts[0] in ("L", "G"):
        parts = parts[1:]
        if parts and parts[0] in ("self", "fn", "mod", "model_"):
            parts = parts[1:]
    return ".".join(p for p in parts if p not in ("_orig_mod", "_modules"))


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` takes one result out of several."""
    return is_call(node, operator.getitem)


def operator_of(node: fx.Node) -> fx.Node:
    """The operator that `node` is one of several results of, or itself."""
    return node.args[0] if is_getitem(node) else node  # type: ignore[return-value]
