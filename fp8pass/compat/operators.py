"""Properties of tensors, sizes and operators."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher as enable_dynamic_shapes
from torch._dynamo.source import TensorProperty
from torch._higher_order_ops import flex_attention, flex_attention_backward
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import (
    arg_tree_leaves,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "FLEX_ATTENTION", "StorageWeakRef", "arg_tree_leaves", "calls_graphs", "coefficient",
    "enable_dynamic_shapes", "fake_mode_of", "foreach_copy", "foreach_norm", "foreach_sub",
    "grouped_mm", "guard_count", "has_unbacked", "is_mutable", "is_opaque", "is_operator",
    "is_sym_node", "real_tensors", "restrictions", "scaled_mm", "schema_of", "size_hint",
    "statically_known_true", "stream_of", "tensor_leaves", "tree_flatten", "tree_leaves",
    "tree_map_only", "tree_unflatten", "version_of", "weak_storage", "wrapper",
]  # fmt: skip

# Older models call this function instead of `torch.nn.functional.grouped_mm`.
grouped_mm = torch._grouped_mm
scaled_mm = torch._scaled_mm
# Each call handles many tensors in one launch.
foreach_copy: Any = torch._foreach_copy_
foreach_norm: Any = torch._foreach_norm
foreach_sub: Any = torch._foreach_sub

# The hint for a data-dependent size without an upper bound below `_LARGEST_BOUND`.
_UNBACKED_HINT = 4096
_LARGEST_BOUND = 1 << 40


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a key that is equal for tensors with the same storage.

    While the key exists, new storages get different keys, even at the same address.
    """
    return StorageWeakRef(tensor.untyped_storage())


def wrapper(
    cls: type[Any], like: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> Any:
    """Return a `cls` tensor without memory, with the sizes, strides and device of `like`."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=device or like.device
    )


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that every in-place change of a tensor or of its views increases."""
    return tensor._version


def has_unbacked(value: object) -> bool:
    """Whether a size, or a size of a tensor, depends on data."""
    return bool(free_unbacked_symbols(value))


def size_hint(value: int | torch.SymInt) -> int:
    """Return a dynamic size's traced value.

    For a data-dependent size, return the middle of its range. For example, the estimated number of
    true elements of a mask is half the number of its elements.
    """
    if isinstance(value, int):
        return value
    hint = None if has_unbacked(value) else value.node.hint
    return _middle_of_range(value) if hint is None else int(hint)


def coefficient(size: torch.SymInt) -> int:
    """Return the constant factor of a dynamic size, e.g. 8 for `8*s0`, and 1 for `s0`."""
    factor, _ = size.node.expr.as_coeff_Mul()
    return max(int(factor), 1)


def _middle_of_range(size: torch.SymInt) -> int:
    possible = size.node.shape_env.bound_sympy(size.node.expr)
    if not (possible.lower >= 0 and possible.upper < _LARGEST_BOUND):
        return _UNBACKED_HINT
    return int(possible.lower + possible.upper) // 2


def guard_count(graph: torch.fx.Graph) -> int:
    """Return the number of guards on dynamic shapes."""
    return len(_guards(graph))


def restrictions(graph: torch.fx.Graph, known: int) -> list[str]:
    """Describe the guards, except the first `known`, that can cause recompilations.

    A guard is left out if it holds for all tested sizes that the first guards allow. Guards on
    strides alone are left out, too, because every pointwise operator adds some.
    """
    guards, env = _guards(graph), _shape_env(graph)
    return [
        f"{guard.expr} at {guard.sloc}"
        for guard in guards[known:]
        if not all(_is_stride(env, symbol) for symbol in guard.expr.free_symbols)
        and _restricts(guard.expr, [g.expr for g in guards[:known]])
    ]


def _guards(graph: torch.fx.Graph) -> list[Any]:
    env = _shape_env(graph)
    return [] if env is None else env.guards


def _shape_env(graph: torch.fx.Graph) -> Any:
    values = (n.meta.get("val") for n in graph.nodes)
    sizes = (s for x in values for s in (x.shape if isinstance(x, torch.Tensor) else (x,)))
    symbolic = next((s for s in sizes if isinstance(s, torch.SymInt)), None)
    return None if symbolic is None else symbolic.node.shape_env


def _is_stride(env: Any, symbol: Any) -> bool:
    sources = env.var_to_sources.get(symbol, ())
    return any(getattr(each, "prop", None) is TensorProperty.STRIDE for each in sources)


def _restricts(condition: Any, known: list[Any]) -> bool:
    """Whether tested sizes satisfy the known conditions, but not `condition`."""
    symbols = sorted(condition.free_symbols, key=str)
    about_these = [each for each in known if each.free_symbols <= condition.free_symbols]
    equal = [dict.fromkeys(symbols, size) for size in (*range(2, 130), 1001, 1 << 20)]
    unequal = [{s: size + 3 * i for i, s in enumerate(symbols)} for size in range(2, 130)]
    for sizes in equal + unequal:
        if _holds(condition, sizes) is False and all(_holds(x, sizes) for x in about_these):
            return True
    return False


def _holds(condition: Any, sizes: dict[Any, int]) -> bool | None:
    try:
        return bool(condition.xreplace(sizes))
    except (AssertionError, TypeError, ZeroDivisionError):  # a negative size, or a division by 0
        return None


def fake_mode_of(fake: torch.Tensor) -> Any:
    """Return a context in which new tensors are fake."""
    assert isinstance(fake, FakeTensor)
    return fake.fake_mode


def is_opaque(node: torch.fx.Node) -> bool:
    """Whether a value is an object that operators only pass on, such as a DTensor's mesh."""
    return isinstance(node.meta.get("val"), (torch.ScriptObject, FakeScriptObject))


def is_operator(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether `target` has a schema, such as `aten.mul.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


# Higher-order operators without a schema.
FLEX_ATTENTION = flex_attention, flex_attention_backward


def calls_graphs(node: fx.Node) -> bool:
    """Whether an operator runs subgraphs, like `torch.cond` and `scan`."""
    return isinstance(node.target, HigherOrderOperator) and node.target not in FLEX_ATTENTION


def tensor_leaves(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers and in outputs of Hugging Face models."""
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def is_mutable(target: Any) -> bool:
    """Whether an operator, or an overload of it, writes to its arguments."""
    is_packet = isinstance(target, torch._ops.OpOverloadPacket)
    overloads = [getattr(target, name) for name in target.overloads()] if is_packet else [target]
    found = (x for x in overloads if isinstance(x, torch._ops.OpOverload))
    return any(schema_of(x).is_mutable for x in found)


def schema_of(operator: Any) -> Any:
    """Return the schema: name, arguments, and which arguments the operator writes to."""
    return operator._schema


def stream_of(device: torch.device) -> int:
    """Return the handle of the current CUDA stream; 0 on a CPU.

    PyTorch's stream object takes as long to create as a small kernel takes to run.
    """
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
