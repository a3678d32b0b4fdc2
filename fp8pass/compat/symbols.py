"""Questions about tensors, sizes and operators that PyTorch answers."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only

__all__ = [
    "FakeTensor",
    "arg_tree_leaves",
    "fake_mode_of",
    "guards_of",
    "has_unbacked",
    "is_opaque",
    "is_operator",
    "is_sym_node",
    "real_tensors",
    "schema_of",
    "size_hint",
    "statically_known_true",
    "tree_leaves",
    "tree_map_only",
    "version_of",
    "weak_storage",
]

# Stands for a size that only the data decides.
_UNBACKED_HINT = 4096


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A key for the memory of `tensor`: no other storage gets the same while the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows whenever a tensor, or a view of it, is changed in place."""
    return tensor._version


def has_unbacked(value: object) -> bool:
    """Whether a tensor's sizes depend on data, so that nothing about them is known."""
    return bool(free_unbacked_symbols(value))


def size_hint(value: int | torch.SymInt) -> int:
    """The number behind a size: itself, or the one it was traced with, or a guess."""
    if isinstance(value, int):
        return value
    hint = None if has_unbacked(value) else value.node.hint
    return _UNBACKED_HINT if hint is None else int(hint)


def guards_of(graph: torch.fx.Graph) -> list[str]:
    """What compiled code asks of the sizes that vary, each with the place that asked for it.

    What is true of sizes of all kinds is left out: no other sizes compile once more for it.
    """
    sizes = (n.meta.get("val") for n in graph.nodes if is_sym_node(n))
    symbolic = next((s for s in sizes if isinstance(s, torch.SymInt)), None)
    if symbolic is None:
        return []
    guards = symbolic.node.shape_env.guards
    return [f"{g.expr} at {g.sloc}" for g in guards if not _holds_of_others(g.expr)]


def _holds_of_others(condition: Any) -> bool:
    """Whether a condition on sizes holds of a few that nobody chose, where it can be of them."""
    kinds = (dict.fromkeys(condition.free_symbols, size) for size in (17, 32, 48, 1001))
    return all(_evaluated(condition, sizes) is not False for sizes in kinds)


def _evaluated(condition: Any, sizes: dict[Any, int]) -> bool | None:
    """A condition on sizes for these; None if there are no such sizes."""
    try:
        return bool(condition.xreplace(sizes))
    except (AssertionError, TypeError):  # sizes below zero
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


def schema_of(operator: Any) -> Any:
    """Name, arguments and mutability of an operator."""
    return operator._schema
