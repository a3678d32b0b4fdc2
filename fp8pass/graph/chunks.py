"""Subgraphs that run on one chunk of rows at a time, so that large tensors never exist as a whole.

    losses, dx, dw = in_chunks(body, 4, rows=[x, y, g], shared=[w], sums=1)

This calls the submodule `body` 4 times. Each call gets a chunk of every tensor in `rows`, and every
tensor in `shared` as a whole. The last `sums` results of `body` (here `dw`) are sums over the rows
of a chunk, and `in_chunks` adds them up. It concatenates the other results along the rows. If the
rows cannot be divided evenly, the last chunk is longer. For passes, `in_chunks` is a single
operator. Before Inductor compiles the graph, `unroll_chunks` replaces the operator by the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import graph
from fp8pass.graph.joint_facts import JointFacts


def in_chunks(
    body: Any, count: int, rows: list[Tensor], shared: list[Tensor], sums: int
) -> tuple[Tensor, ...]:
    bounds = chunk_bounds(len(rows[0]), count)
    results = [body(*(x[start:end] for x in rows), *shared) for start, end in bounds]
    parts = list(zip(*results, strict=True))
    split = len(parts) - sums
    whole = [torch.cat(part) for part in parts[:split]]
    totals = [functools.reduce(torch.add, part) for part in parts[split:]]
    return (*whole, *totals)


def chunk_bounds(rows: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield `(start, end)` for each chunk, which has the rows `start:end`."""
    length = rows // count
    for i in range(count):
        yield i * length, (rows if i == count - 1 else (i + 1) * length)


@dataclass(frozen=True)
class Chunks:
    """A node that calls `in_chunks`, and its arguments."""

    node: fx.Node
    body: fx.GraphModule
    count: int
    rows: Sequence[fx.Node]  # the operands that are split by rows
    shared: Sequence[fx.Node]  # the operands that every chunk reads as a whole
    sums: int  # the number of results, at the end of the list, that are sums over rows

    @classmethod
    def of(cls, node: fx.Node) -> Chunks:
        arguments: Any = node.args
        reference, *rest = arguments
        return cls(node, getattr(node.graph.owning_module, reference.target), *rest)

    def inputs(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield each placeholder of the body, and the operand that is passed to it."""
        placeholders = self.body.graph.find_nodes(op="placeholder")
        return zip(placeholders, [*self.rows, *self.shared], strict=True)

    def facts(self, facts: JointFacts) -> JointFacts:
        """Return facts about the body's inputs: which of them are parameters.

        `facts` is about the inputs of the graph that contains `node`.
        """
        pairs = ((n, graph.skip_views_and_casts(operand)) for n, operand in self.inputs())
        return facts.map_to_subgraph(pairs)


def chunks_of(g: fx.Graph) -> list[Chunks]:
    return [Chunks.of(n) for n in g.find_nodes(op="call_function", target=in_chunks)]
