"""Multiply tokens with the adapters of experts, instead of adding adapters to the weights.

    before   y = grouped_mm(x, baddbmm(W, B, A, alpha=s)ᵀ)
    after    y = grouped_mm(x, Wᵀ) + s grouped_mm(grouped_mm(x, Aᵀ), Bᵀ)

Before, forward and backward compute matrices of the size of all experts. After, frozen weights `W`
[E, N, K] stay in FP8. `B` [E, N, R] and `A` [E, R, K] are LoRA's matrices of rank R.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# PyTorch's grouped GEMMs need rows of a multiple of 16 bytes.
ALIGNMENT = 16
GROUPED: set[Any] = {torch.nn.functional.grouped_mm, torch._grouped_mm}


@dataclass(frozen=True)
class Use:
    """A grouped GEMM that multiplies with an adapted weight, or with its transpose."""

    gemm: fx.Node
    is_transposed: bool


def split_adapters(gm: fx.GraphModule) -> None:
    """Rewrite a Dynamo graph in place. Adapted weights with other uses stay."""
    # With several adapters, a sum is the first operand of the next sum.
    adapted = reversed(gm.graph.find_nodes(op="call_function", target=torch.baddbmm))
    split = [_split(gm.graph, node) for node in adapted]
    if any(split):
        gm.recompile()


def _split(g: fx.Graph, adapted: fx.Node) -> bool:
    uses = list(_find_uses(adapted))
    if None in uses or not uses or not _is_aligned(adapted):
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
    # Grouped GEMMs do not support all strides, such as those of PEFT's factors.
    left, right = (g.call_method("contiguous", (x,)) for x in (left, right))
    if use.is_transposed:
        weight, left, right = (_transpose(g, x) for x in (weight, right, left))

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


def _transpose(g: fx.Graph, x: Any) -> fx.Node:
    return g.call_method("transpose", (x, -2, -1))


def _find_uses(adapted: fx.Node) -> Iterator[Use | None]:
    """Yield the uses of an adapted weight; None for a use that is no grouped GEMM."""
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


def _is_aligned(adapted: fx.Node) -> bool:
    """Whether the rank allows grouped GEMMs, and the sum is `W + alpha left @ right`."""
    left = adapted.args[1].meta.get("example_value") if len(adapted.args) == 3 else None  # type: ignore[union-attr]
    if left is None or adapted.kwargs.get("beta", 1) != 1:
        return False
    return left.shape[-1] * left.itemsize % ALIGNMENT == 0
