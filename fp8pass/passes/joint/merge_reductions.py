"""Reduce the sum of several tensors over ranks once, instead of reducing each summand.

    before   y = add(reduce_scatter(a, "sum"), reduce_scatter(b, "sum"))
    after    y = reduce_scatter(add(a, b), "sum")

With tensor parallelism, several linear layers read the same tensor. If each layer has its own entry
in the plan of `parallelize_module`, DTensor reduces the gradient of each layer separately. With
this pass, a decoder layer has four reduce-scatters instead of seven. All-reduces are merged in the
same way. Then `merge_dgrads` can compute `add(a, b)` in one GEMM.

Recipe `exact` skips the pass, which changes the order of sums. FP16 sums are not merged, because
`add(a, b)` may overflow where the sum over ranks does not. Means are not merged: they are gradients
of parameters, and the first term would wait in memory, unreduced, for the last one.

All ranks must run the same collectives. If ranks have parts of different sizes, DTensor pads the
operand on all ranks, but slices the result on some ranks only. So padded operands are not merged.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.graph.collectives import ALL_REDUCE, REDUCE_SCATTER, SPLITS, WAIT_TENSOR
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.sums import Term, find_term, only_user
from fp8pass.passes.context import Context


@dataclass(frozen=True)
class Reduction:
    """An all-reduce or reduce-scatter; its result is a summand of another sum."""

    node: fx.Node  # the collective
    term: Term

    # The properties read the graph, because a merge may replace the operand of another reduction.

    @property
    def split(self) -> fx.Node | None:
        """The split, if the operand of the collective concatenates its parts."""
        return _find_split(self.node.args[0])

    @property
    def source(self) -> fx.Node:
        """This rank's summand: the operand of the collective, or the tensor that is split."""
        return (self.split or self.node).args[0]  # type: ignore[return-value]

    def key(self, backward: Set[fx.Node]) -> Hashable:
        """Return a value that is equal for reductions that can be merged."""
        val, split = tensor(self.source), self.split
        kind = self.node.target, *self.node.args[1:], val.dtype, *map(str, val.shape)
        place = self.term.total, self.node in backward, self.node.meta.get("recompute")
        if split is None:
            return *place, *kind
        cat: Any = self.node.args[0]
        arguments = split.args[1:], split.kwargs, cat.args[1:], cat.kwargs
        return *place, *kind, split.target, *map(str, arguments)


def merge_reductions(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:
        return
    backward = graph.tangent_dependent(gm.graph)
    while groups := _find_groups(gm.graph, backward):
        for reductions in groups:
            _merge(reductions)  # the sum may be the operand of a reduction: search again


def _find_groups(g: fx.Graph, backward: Set[fx.Node]) -> list[list[Reduction]]:
    groups: dict[Hashable, list[Reduction]] = {}
    for target in (ALL_REDUCE, REDUCE_SCATTER):
        for node in g.find_nodes(op="call_function", target=target):
            found = _find_reduction(node)
            if found is not None:
                groups.setdefault(found.key(backward), []).append(found)
    return [group for group in groups.values() if len(group) > 1]


def _find_reduction(node: fx.Node) -> Reduction | None:
    operand: Any = node.args[0]
    wait = only_user(node)
    is_sum = node.args[1] == "sum" and tensor(operand).dtype in (torch.bfloat16, torch.float32)
    if not is_sum or wait is None or wait.target is not WAIT_TENSOR:
        return None
    term = find_term(wait)
    return None if term is None or _may_be_padded(operand) else Reduction(node, term)


def _may_be_padded(operand: fx.Node) -> bool:
    is_cat = operand.target is aten.cat.default
    return operand.target is aten.constant_pad_nd.default or (is_cat and not _find_split(operand))


def _find_split(cat: Any) -> fx.Node | None:
    """Return the split, if `cat` concatenates the results of one split in order."""
    parts: Any = cat.args[0] if graph.is_call(cat, aten.cat.default) else []
    split = parts[0].args[0] if parts and graph.is_getitem(parts[0]) else None
    if split is None or split.target not in SPLITS:
        return None
    in_order = all(
        graph.is_getitem(part) and part.args == (split, i) for i, part in enumerate(parts)
    )
    return split if in_order else None


def _merge(reductions: list[Reduction]) -> None:
    first, *rest = reductions
    node, split = reductions[-1].node, reductions[-1].split
    g = node.graph
    add: Any = partial(emit, g, like=node)
    total = first.source
    for source in [x.source for x in rest]:  # add each as early as possible, to free its memory
        with g.inserting_before(graph.insertion_point_after(max(total, source))):
            total = add(aten.add.Tensor, total, source)
    if split is not None:
        cat: Any = node.args[0]
        with g.inserting_before(node):
            divided = add(split.target, total, *split.args[1:], **split.kwargs)
            parts = [add(operator.getitem, divided, i) for i in range(len(cat.args[0]))]
            total = add(aten.cat.default, parts, *cat.args[1:], **cat.kwargs)
    node.update_arg(0, total)
    for other in reductions[:-1]:
        other.term.remove()
        _erase_unused(other.term.top)


def _erase_unused(node: fx.Node) -> None:
    """Erase a node without users, and operands that have no other user."""
    if not node.users and node.op == "call_function":
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        for operand in operands:
            _erase_unused(operand)
