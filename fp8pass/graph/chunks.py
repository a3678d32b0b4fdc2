"""Parts of a graph that run on some rows after others, so that no value of all rows exists.

    losses, dx, dw = in_chunks(body, 4, rows=[x, y, g], shared=[w], sums=1)

`body` is a graph of its own, a submodule: it takes some rows of `rows`, all of `shared`, and
returns values that have rows, which are put together, and `sums` over its rows, which are added up.
The last chunk takes the rows that are left over. Passes see one operator; `unroll_chunks` writes
the chunks out before Inductor compiles them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import graph
from fp8pass.graph.joint import JointFacts


def in_chunks(
    body: Any, count: int, rows: list[Tensor], shared: list[Tensor], sums: int
) -> tuple[Tensor, ...]:
    """Run `body` on `count` chunks of `rows`; what unrolled chunks compute, op by op."""
    results = [
        body(*(x[start:end] for x in rows), *shared)
        for start, end in chunk_bounds(len(rows[0]), count)
    ]
    parts = list(zip(*results, strict=True))
    split = len(parts) - sums
    together = [torch.cat(part) for part in parts[:split]]
    totals = [_total(part) for part in parts[split:]]
    return (*together, *totals)


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def chunk_bounds(rows: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """The first row of each chunk, and the one behind its last."""
    length = rows // count
    for i in range(count):
        yield i * length, (rows if i == count - 1 else (i + 1) * length)


@dataclass(frozen=True)
class Chunks:
    """A node that calls `in_chunks`."""

    node: fx.Node

    @property
    def body(self) -> fx.GraphModule:
        """The graph that runs on each chunk."""
        module, reference = self.node.graph.owning_module, self.node.args[0]
        assert module is not None
        assert isinstance(reference, fx.Node)
        body = getattr(module, str(reference.target))
        assert isinstance(body, fx.GraphModule)
        return body

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.node.args[1]  # type: ignore[return-value]

    @property
    def rows(self) -> list[fx.Node]:
        """The values that have rows."""
        return list(self.node.args[2])  # type: ignore[arg-type]

    @property
    def shared(self) -> list[fx.Node]:
        """The values that all rows share."""
        return list(self.node.args[3])  # type: ignore[arg-type]

    @property
    def sums(self) -> int:
        """How many of the last results are sums."""
        return self.node.args[4]  # type: ignore[return-value]

    def inputs(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The body's inputs, each with the value that it stands for."""
        given = [*self.rows, *self.shared]
        taken = [n for n in self.body.graph.nodes if n.op == "placeholder"]
        return zip(taken, given, strict=True)

    def facts(self, facts: JointFacts) -> JointFacts:
        """What is known of the body's inputs, by what is known of the graph's."""
        sources = {taken: graph.skip_views_and_casts(given) for taken, given in self.inputs()}
        return JointFacts(
            parameters=frozenset(n for n, source in sources.items() if source in facts.parameters),
            weights=frozenset(n for n, source in sources.items() if source in facts.weights),
        )


def chunks_of(g: fx.Graph) -> list[Chunks]:
    """All parts of a graph that run in chunks."""
    return [Chunks(n) for n in g.nodes if graph.is_call(n, in_chunks)]
