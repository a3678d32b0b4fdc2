"""Read large matrices fewer times in the low-rank products of adapters.

    before   y₁ + c linear(linear(x, A₁), B₁);  y₂ + c linear(linear(x, A₂), B₂)
    after    h₁, h₂ = split(linear(x, [A₁; A₂]))
             y₁ + linear(c h₁, B₁);  y₂ + linear(c h₂, B₂)

`h` has as many columns as the rank of the adapter; `x` and `y` have as many as the layer. Layers
have the same `x` if they read the same tensor, such as q, k and v. `c` is LoRA's factor α / r. The
backward multiplies with the concatenated matrix, too, and does not need `c dy`.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fp8pass.graph.split_adapters import writes

# The largest rank of merged adapters together. Wider layers may run in FP8 (`MAX_NARROW_SIDE`).
MOST_RANK = 64
# A layer is at least this many times as wide as the adapter's rank.
LEAST_RATIO = 4
MULTIPLY = (operator.mul, torch.mul)


def merge_adapters(gm: fx.GraphModule) -> None:
    """Rewrite a Dynamo graph and its subgraphs in place."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            changed = [_merge(part.graph, group) for group in _groups(_linears(part.graph))]
            changed += [_scale_input(part.graph, node) for node in _linears(part.graph)]
            if any(changed):
                part.recompile()


def _linears(g: fx.Graph) -> list[fx.Node]:
    return list(g.find_nodes(op="call_function", target=functional.linear))


def _groups(linears: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    """Return the first GEMMs of adapters that read the same input."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for linear in linears:
        x, weight = _operands(linear)
        if x is None or weight.op != "placeholder" or not _starts_adapter(linear, weight):
            continue
        y = linear.meta["example_value"]
        # Equal dtypes of results also show that autocast is on for all of them, or for none.
        key = _identity(x), y.dtype, y.requires_grad
        groups.setdefault(key, []).append(linear)
    for group in groups.values():
        ranks = sum(_value(linear.args[1]).shape[0] for linear in group)
        if len(group) > 1 and ranks <= MOST_RANK and not _writes_between(group):
            yield group


def _starts_adapter(linear: fx.Node, weight: fx.Node) -> bool:
    """Whether only the second GEMM of an adapter reads the result. Routers, for example, do not."""
    user = next(iter(linear.users), linear)
    if len(linear.users) != 1 or user.target is not functional.linear or user.args[0] is not linear:
        return False
    return _is_low_rank(weight, rank=0) and isinstance(_value(user.args[1]), Tensor)


def _writes_between(linears: list[fx.Node]) -> bool:
    """Whether the graph changes a tensor in place between the first and the last GEMM."""
    node = linears[0]
    while node is not linears[-1]:
        node = node.next
        if writes(node):
            return True
    return False


def _merge(g: fx.Graph, linears: list[fx.Node]) -> bool:
    first = linears[0]
    weights = [linear.args[1] for linear in linears]
    with g.inserting_before(first):
        weight = g.call_function(torch.cat, (weights, 0))
        product = g.call_function(functional.linear, (first.args[0], weight, None))
        sizes = [_value(w).shape[0] for w in weights]
        parts = g.call_method("split", (product, sizes, -1))
        slices = [g.call_function(operator.getitem, (parts, i)) for i in range(len(linears))]
        # Without gradients PyTorch multiplies slices of three dimensions by batched GEMMs.
        results = [g.call_method("contiguous", (part,)) for part in slices]
    for node in (weight, product, parts, *slices, *results):
        node.meta = _place_of(first)
    for linear, result in zip(linears, results, strict=True):
        result.meta["example_value"] = _value(linear)
        linear.replace_all_uses_with(result)
        g.erase_node(linear)
    return True


def _scale_input(g: fx.Graph, linear: fx.Node) -> bool:
    """Replace `c linear(h, B)` by `linear(c h, B)`."""
    h, weight = _operands(linear)
    scaled = next(iter(linear.users), linear)
    if h is None or not _is_low_rank(weight, rank=1) or len(linear.users) != 1:
        return False
    if scaled.target not in MULTIPLY or scaled.kwargs or _value(h).dtype != _value(scaled).dtype:
        return False
    factor = next((x for x in scaled.args if isinstance(x, (int, float))), None)
    if factor is None:
        return False
    with g.inserting_before(linear):
        smaller = g.call_function(torch.mul, (h, factor))
    smaller.meta = _place_of(scaled)
    linear.replace_input_with(h, smaller)
    scaled.replace_all_uses_with(linear)
    g.erase_node(scaled)
    return True


def _operands(linear: fx.Node) -> tuple[fx.Node | None, Any]:
    """Return input and weight; (None, None) with a bias, or if an operand is changed in place."""
    x, weight, *bias = linear.args
    nodes = [n for n in (x, weight, linear) if isinstance(n, fx.Node)]
    known = len(nodes) == 3 and all(_is_plain(_value(n)) for n in nodes)
    if not known or any(b is not None for b in (*bias, *linear.kwargs.values())):
        return None, None
    if any(writes(user) for n in nodes for user in n.users):
        return None, None
    return nodes[0], weight


def _is_low_rank(weight: fx.Node, rank: int) -> bool:
    """Whether dimension `rank` of a weight is much smaller than its other dimension."""
    shape = _value(weight).shape
    return shape[rank] <= MOST_RANK and shape[rank] * LEAST_RATIO <= shape[1 - rank]


def _identity(x: fx.Node) -> Hashable:
    """Return a key that is equal for casts of one tensor to one dtype."""
    is_cast = x.op == "call_method" and x.target == "to"
    return ("to", x.args, tuple(x.kwargs.items())) if is_cast else x


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor, but no DTensor, which may not be concatenated with others."""
    return isinstance(value, Tensor) and not hasattr(value, "placements")


def _place_of(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key != "example_value"}


def _value(node: Any) -> Any:
    return node.meta.get("example_value")
