"""Which sums of a residual stream the backward may compute again.

A sum may be computed again from the sum before it and its branch. Under autocast that keeps less:
the stream is in FP32, its branches are in 16 bits. But where all sums are computed again, each
needs those before it. The backward, which starts at the last one, would add up all branches at once
and hold all sums until it gets to their layers: more than they were to save. So of two sums of
which one is computed from the other, one is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import fx

from fp8pass.activation_memory.costs import keep_price
from fp8pass.graph.patterns import is_same_shape_addition


def chained_sums(
    values: Sequence[fx.Node],
    recomputed: Collection[fx.Node],
    junctions: Collection[fx.Node],
    is_free: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Every second of the sums that would be recomputed from one another, to be kept instead.

    `values` are in order. Norms and casts may lie between two sums, as in post-norm layers. A sum
    whose branch is computed from the sum before, too, or from what is alive anyway, costs nothing
    but time, and is left as it is.
    """
    to_keep: set[fx.Node] = set()
    after_a_sum: set[fx.Node] = set()
    holds_nothing: set[fx.Node] = set()
    for value in values:
        operands = value.all_input_nodes
        holds_nothing.update(n for n in (value, *operands) if is_free(n))
        if value not in recomputed:
            continue
        if operands and holds_nothing.issuperset(operands):
            holds_nothing.add(value)
        following = after_a_sum.intersection(operands)
        is_sum = value in junctions and is_stream_sum(value)
        has_branch = not (following | holds_nothing).issuperset(operands)
        if following and has_branch and is_sum and math.isfinite(keep_price(value)):
            to_keep.add(value)
        elif following or is_sum:
            after_a_sum.add(value)
    return to_keep


def is_stream_sum(node: fx.Node) -> bool:
    """Whether `node` may be a sum of a residual stream, which a norm and the next sum read."""
    return is_same_shape_addition(node) and len(node.users) > 1
