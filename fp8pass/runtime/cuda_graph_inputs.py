"""Weights that are elsewhere in every step, beside CUDA graphs, which read where they once read.

FSDP2 gathers weights into memory that the allocator picks each time. Inductor takes a parameter for
an input that stays where it is, and records a graph anew when it does not: in every step, all of
them. As an input that moves it is copied to where the graph reads it, before each replay.

Such a copy is a graph's own until the next one runs. What the backward reads FSDP2 gathers again:
the forward hands on the weight that it was given, not the copy, which would stay until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from fp8pass import compat


def moving_weights(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> frozenset[int]:
    """The inputs of a Dynamo graph that are parameters which FSDP2 gathers, by index."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    pairs = zip(placeholders, example_inputs, strict=True)
    return frozenset(
        i
        for i, (node, value) in enumerate(pairs)
        if isinstance(value, nn.Parameter) and compat.is_of_fsdp(node)
    )


def compile_for_moving(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    moving: frozenset[int],
    **kwargs: Any,
) -> Any:
    """A half compiled by Inductor, whose graphs find weights wherever they are.

    Args:
        gm: the half, changed by it.
        inputs: examples of its inputs.
        moving: the weights, as indices of the Dynamo graph's inputs.
        kwargs: what Inductor's inner compile is told of the half.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    moved = {n: i for i, n in enumerate(placeholders) if compat.input_index(n) in moving}
    results = next(iter(reversed(gm.graph.nodes))).args[0]
    handed_on = [(i, moved[x]) for i, x in enumerate(results) if x in moved]
    static = compat.static_inputs(kwargs) - set(moved.values())
    compiled = compat.compile_fx_inner(
        gm, inputs, **{**kwargs, "static_input_idxs": sorted(static)}
    )
    return handing_on(compiled, handed_on) if handed_on else compiled


def handing_on(compiled: Callable[..., Any], pairs: Sequence[tuple[int, int]]) -> Any:
    """A compiled half that returns some inputs as they are: pairs of a result and an input."""

    def run(arguments: list[Any]) -> list[Any]:
        given = [arguments[i] for _, i in pairs]  # the half empties the list
        results = list(compiled(arguments))
        for (i, _), value in zip(pairs, given, strict=True):
            results[i] = value
        return results

    return compat.box(run)
