"""Multiply tokens with the adapters of experts, instead of adding adapters to the weights.

    before   y = grouped_mm(x, baddbmm(W, B, A, alpha=s)ᵀ)
    after    y = grouped_mm(x, Wᵀ) + s grouped_mm(grouped_mm(x, Aᵀ), Bᵀ)

Without this rewrite, forward and backward compute matrices as large as the weights of all experts.
With the rewrite, frozen weights `W` [E, N, K] stay in FP8. `B` [E, N, R] and `A` [E, R, K] are
LoRA's matrices of rank R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import compat

# PyTorch's grouped GEMMs need rows of a multiple of 16 bytes.
ALIGNMENT = 16
IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior", "setitem")
GROUPED: set[Any] = {torch.nn.functional.grouped_mm, compat.grouped_mm}


@dataclass(frozen=True)
class Use:
    """A grouped GEMM that multiplies with an adapted weight, or with its transpose."""

    gemm: fx.Node
    is_transposed: bool


def split_adapters(gm: fx.GraphModule) -> None:
    """Rewrite a Dynamo graph and its subgraphs in place.

    An adapted weight is not rewritten if operators other than grouped GEMMs read it.
    """
    for part in gm.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        # With several adapters, each sum is the first operand of the next sum. So split the last
        # sum first.
        adapted = reversed(part.graph.find_nodes(op="call_function", target=torch.baddbmm))
        split = [_split(part.graph, node) for node in adapted]
        if any(split):
            part.recompile()


def _split(g: fx.Graph, adapted: fx.Node) -> bool:
    uses = list(_find_uses(adapted))
    if None in uses or not uses or not _can_split(adapted):
        return False
    weight, left, right = adapted.args
    for use in uses:
        assert use is not None
        with g.inserting_before(use.gemm):
            _multiply_separately(g, use, weight, left, right, adapted.kwargs.get("alpha", 1))
    for unused in (*adapted.users, adapted):
        g.erase_node(unused)
    return True


def _multiply_separately(
    g: fx.Graph, use: Use, weight: Any, left: Any, right: Any, alpha: Any
) -> None:
    gemm = use.gemm
    # Grouped GEMMs do not support all strides, such as the strides of PEFT's factors.
    left, right = (g.call_method("contiguous", (x,)) for x in (left, right))
    if use.is_transposed:
        operands = weight, right, left
        weight, left, right = (g.call_method("transpose", (x, -2, -1)) for x in operands)

    def multiply(x: Any, y: fx.Node) -> fx.Node:
        return g.call_function(gemm.target, (x, y), {"offs": gemm.kwargs["offs"]})  # type: ignore[arg-type]

    exact = multiply(gemm.args[0], weight)
    low_rank = multiply(multiply(gemm.args[0], left), right)
    total = g.call_function(torch.add, (exact, low_rank), {"alpha": alpha})
    for node in (exact, low_rank, low_rank.args[0], total):
        node.meta = dict(gemm.meta)  # type: ignore[union-attr]
        node.meta.pop("example_value", None)  # type: ignore[union-attr]
    gemm.replace_all_uses_with(total)
    g.erase_node(gemm)


def _find_uses(adapted: fx.Node) -> Iterator[Use | None]:
    """Yield the uses of an adapted weight; None for a use that is not a grouped GEMM."""
    for user in adapted.users:
        if _is_gemm_of(user, adapted):
            yield Use(user, is_transposed=False)
        elif _transposes(user):
            yield from (Use(x, True) if _is_gemm_of(x, user) else None for x in user.users)
        else:
            yield None


def _is_gemm_of(node: fx.Node, weight: fx.Node) -> bool:
    return (
        node.target in GROUPED
        and node.args[1:] == (weight,)
        and {name for name, value in node.kwargs.items() if value is not None} == {"offs"}
    )


def _transposes(node: fx.Node) -> bool:
    """Whether the node exchanges the last two of three dimensions."""
    dimensions = {x % 3 for x in node.args[1:] if isinstance(x, int)}
    return node.target in ("transpose", torch.transpose) and dimensions == {1, 2}


def _can_split(adapted: fx.Node) -> bool:
    """Whether a node is `W + alpha left @ right`, and no operator overwrites its operands.

    The new GEMMs read these operands later than the node did.
    """
    if len(adapted.args) != 3 or not adapted.kwargs.keys() <= {"alpha", "beta"}:
        return False
    nodes = *adapted.all_input_nodes, adapted
    values = [x.meta["example_value"] for x in nodes if "example_value" in x.meta]
    if len(values) != 4:
        return False
    weight, left, right, result = values
    is_trained = any(x.requires_grad for x in (weight, left, right))
    return bool(
        adapted.kwargs.get("beta", 1) == 1
        and left.shape[-1] * left.itemsize % ALIGNMENT == 0
        and weight.shape == result.shape
        and {x.dtype for x in values} == {result.dtype}  # autocast would cast the operands
        and is_trained == result.requires_grad  # false under no_grad
        and not any(_writes(user) for x in adapted.all_input_nodes for user in x.users)
    )


def _writes(node: fx.Node) -> bool:
    """Whether an operator writes to its operands."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in IN_PLACE or "out" in node.kwargs or compat.is_mutable(node.target):
        return True
    # E.g. `relu(x, inplace=True)`. Any other argument that is True counts as a write, too.
    return any(x is True for x in (*node.args, *node.kwargs.values()))
