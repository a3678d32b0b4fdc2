"""Reduce a sum over ranks once, instead of reducing each term.

    before   y = add(reduce_scatter(a, "sum"), reduce_scatter(b, "sum"))
    after    y = reduce_scatter(add(a, b), "sum")

With tensor parallelism, several linear layers read the same input, and DTensor reduces the gradient
from each of these layers. The pass leaves four of the seven reduce-scatters of a decoder layer. It
merges all-reduces in the same way. Afterwards `merge_dgrads` can compute `add(a, b)` in one GEMM.

Recipe `exact` skips the pass, which changes the order of sums.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.collectives import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    SPLITS,
    WAIT_TENSOR,
    remove_unused,
)
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.sums import Term, find_term, have_equal_shape_and_dtype, only_user
from fp8pass.passes.context import Context


@dataclass(frozen=True)
class Reduction:
    """A reduction over ranks whose result is a term of a sum."""

    node: fx.Node  # the collective
    term: Term
    # The summand of this rank. The collective's operand may be a concatenation of its parts.
    source: fx.Node
    parts: tuple[fx.Node, fx.Node] | None  # the split and the concatenation

    @property
    def key(self) -> Hashable:
        """Reductions with equal keys can be merged."""
        val = tensor(self.source)
        same = self.term.total, self.node.target, *self.node.args[1:], val.dtype, val.ndim
        split, cat = self.parts or (None, None)
        return (*same, _arguments(split), _arguments(cat))


def merge_reductions(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:
        return
    groups: dict[Hashable, list[Reduction]] = {}
    for node in gm.graph.nodes:
        if node.target in (ALL_REDUCE, REDUCE_SCATTER) and node.args[1] in ("sum", "avg"):
            found = _find_reduction(node)
            if found is not None:
                groups.setdefault(found.key, []).append(found)
    for first, *others in groups.values():
        equal = [x for x in others if have_equal_shape_and_dtype(first.source, x.source)]
        if equal:
            _merge([first, *equal])
    remove_unused(gm.graph)


def _find_reduction(node: fx.Node) -> Reduction | None:
    wait = only_user(node)
    if wait is None or wait.target is not WAIT_TENSOR:
        return None
    operand: Any = node.args[0]
    term, parts = find_term(wait), _find_parts(operand)
    source: Any = parts[0].args[0] if parts else operand
    return None if term is None else Reduction(node, term, source, parts)


def _find_parts(operand: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the split and the concatenation, if `operand` rearranges the parts of a tensor."""
    listed: Any = operand.args[0] if graph.is_call(operand, aten.cat.default) else []
    if not listed or not all(map(graph.is_getitem, listed)):
        return None
    split = listed[0].args[0]
    in_order = [part.args for part in listed] == [(split, i) for i in range(len(listed))]
    return (split, operand) if in_order and split.target in SPLITS else None


def _arguments(node: fx.Node | None) -> Hashable:
    return node and (node.target, str(node.args[1:]), str(node.kwargs))


def _merge(reductions: list[Reduction]) -> None:
    *others, last = reductions
    g = last.node.graph

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = emit(g, target, *args, like=last.node, **kwargs)
        compat.copy_region(last.node, node)
        return node

    with g.inserting_before(last.node):
        sources = [x.source for x in reductions]
        total = reduce(lambda a, b: add(aten.add.Tensor, a, b), sources)
        if last.parts:
            split, cat = last.parts
            divided = add(split.target, total, *split.args[1:], **split.kwargs)
            in_order = range(len(cat.args[0]))  # type: ignore[arg-type]
            listed = [add(operator.getitem, divided, i) for i in in_order]
            total = add(aten.cat.default, listed, *cat.args[1:], **cat.kwargs)
    last.node.update_arg(0, total)
    for other in others:
        other.term.remove()
