"""Questions about tensors, sizes and operators that PyTorch answers."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher as sizes_that_vary
from torch._dynamo.source import TensorProperty
from torch._higher_order_ops import flex_attention, flex_attention_backward
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only

__all__ = [
    "FLEX_ATTENTION",
    "FakeTensor",
    "arg_tree_leaves",
    "fake_mode_of",
    "foreach_norm",
    "foreach_sub",
    "grouped_mm",
    "guard_count",
    "has_unbacked",
    "is_opaque",
    "is_operator",
    "is_sym_node",
    "real_tensors",
    "restrictions",
    "scaled_mm",
    "schema_of",
    "size_hint",
    "sizes_that_vary",
    "statically_known_true",
    "tree_leaves",
    "tree_map_only",
    "version_of",
    "weak_storage",
    "wrapper",
]

# The GEMM of experts, as code calls it that does not wait for `torch.nn.functional.grouped_mm`.
grouped_mm = torch._grouped_mm
# The FP8 GEMM of cuBLASLt and CUTLASS.
scaled_mm = torch._scaled_mm
# One launch for many tensors.
foreach_norm: Any = torch._foreach_norm
foreach_sub: Any = torch._foreach_sub

# Stands for a size that only the data decides, where nothing bounds it below the second number.
_UNBACKED_HINT = 4096
_LARGEST_BOUND = 1 << 40


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A key for the memory of `tensor`: no other storage gets the same while the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


def wrapper(cls: type[Any], like: torch.Tensor, dtype: torch.dtype) -> Any:
    """A tensor of a class that only holds others, with the sizes of one of them."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows whenever a tensor, or a view of it, is changed in place."""
    return tensor._version


def has_unbacked(value: object) -> bool:
    """Whether a tensor's sizes depend on data, so that nothing about them is known."""
    return bool(free_unbacked_symbols(value))


def size_hint(value: int | torch.SymInt) -> int:
    """The number behind a size: itself, or the one it was traced with, or a guess.

    The guess is the middle of the sizes that are possible: a mask selects half of its elements.
    """
    if isinstance(value, int):
        return value
    hint = None if has_unbacked(value) else value.node.hint
    return _middle_of_range(value) if hint is None else int(hint)


def _middle_of_range(size: torch.SymInt) -> int:
    possible = size.node.shape_env.bound_sympy(size.node.expr)
    if not (possible.lower >= 0 and possible.upper < _LARGEST_BOUND):
        return _UNBACKED_HINT
    return int(possible.lower + possible.upper) // 2


def guard_count(graph: torch.fx.Graph) -> int:
    """How many conditions compiled code asks of the sizes that vary."""
    return len(_guards(graph))


def restrictions(graph: torch.fx.Graph, known: int) -> list[str]:
    """The guards after the first `known`, each with the place that asked for it.

    Those that hold of all sizes for which the first do are left out: nothing compiles once more for
    them. A few sizes are tried. So are those about strides alone, which PyTorch compares to lay out
    the result of any pointwise operator.
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
    """Where a graph's sizes that vary are known, as sizes of tensors or as nodes; None without."""
    values = (n.meta.get("val") for n in graph.nodes)
    sizes = (s for x in values for s in (x.shape if isinstance(x, torch.Tensor) else (x,)))
    symbolic = next((s for s in sizes if isinstance(s, torch.SymInt)), None)
    return None if symbolic is None else symbolic.node.shape_env


def _is_stride(env: Any, symbol: Any) -> bool:
    sources = env.var_to_sources.get(symbol, ())
    return any(getattr(each, "prop", None) is TensorProperty.STRIDE for each in sources)


def _restricts(condition: Any, known: list[Any]) -> bool:
    """Whether a condition does not hold of some size that the known ones allow."""
    symbols = sorted(condition.free_symbols, key=str)
    about_these = [each for each in known if each.free_symbols <= condition.free_symbols]
    equal = [dict.fromkeys(symbols, size) for size in (*range(2, 130), 1001, 1 << 20)]
    unequal = [{s: size + 3 * i for i, s in enumerate(symbols)} for size in range(2, 130)]
    for sizes in equal + unequal:
        if _holds(condition, sizes) is False and all(_holds(x, sizes) for x in about_these):
            return True
    return False


def _holds(condition: Any, sizes: dict[Any, int]) -> bool | None:
    """Whether a condition holds of sizes; None if there are no such sizes."""
    try:
        return bool(condition.xreplace(sizes))
    except (AssertionError, TypeError, ZeroDivisionError):  # sizes below zero, or remainders by 0
        return None


def fake_mode_of(fake: torch.Tensor) -> Any:
    """The mode under which operators without tensor inputs give fake tensors, as a context."""
    assert isinstance(fake, FakeTensor)
    return fake.fake_mode


def is_opaque(node: torch.fx.Node) -> bool:
    """Whether a value is an object that graphs only hand on, such as the mesh of a DTensor."""
    return isinstance(node.meta.get("val"), (torch.ScriptObject, FakeScriptObject))


def is_operator(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a node's target is an operator with a schema, `aten.mul.Tensor` say."""
    return isinstance(target, torch._ops.OpOverload)


# FlexAttention, forward and backward: no operators with a schema, but functions of subgraphs.
FLEX_ATTENTION = flex_attention, flex_attention_backward


def calls_graphs(node: fx.Node) -> bool:
    """Whether an operator calls graphs that it gets, such as `torch.cond` and `scan`."""
    return isinstance(node.target, HigherOrderOperator) and node.target not in FLEX_ATTENTION


def schema_of(operator: Any) -> Any:
    """Name, arguments and mutability of an operator."""
    return operator._schema


def stream_of(device: torch.device) -> int:
    """A number for the current stream; PyTorch's object takes as long to make as a small kernel."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
