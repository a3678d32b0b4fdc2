"""Bytes kept for the backward, over the operators of one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fp8pass import graph
from fp8pass.compilation import CompiledGraph
from fp8pass.graph.classify import Kind, kind
from fp8pass.tools.report.picture import forward_nodes


@dataclass(frozen=True)
class TimelinePoint:
    """Bytes kept after an operator has run; `operator` is its number in the step."""

    operator: int
    module: str
    backward: bool
    bytes: int


def timeline(graphs: Iterable[CompiledGraph]) -> list[TimelinePoint]:
    """The operators that change the kept bytes: forwards in order, then backwards in reverse."""
    points = [TimelinePoint(0, "", False, 0)]
    runs = [_GraphRun(g) for g in graphs]
    changes = [change for run in runs for change in run.forward()]
    changes += [change for run in reversed(runs) for change in run.backward()]
    for count, (node, backward, change) in enumerate(changes, 1):
        if change:
            kept = points[-1].bytes + change
            points.append(TimelinePoint(count, graph.module_path(node), backward, kept))
    return points


class _GraphRun:
    """One graph's operators, and by how many bytes each changes those that are kept."""

    def __init__(self, compiled: CompiledGraph) -> None:
        forward = forward_nodes(compiled)
        calls = [n for n in compiled.gm.graph.nodes if n.op != "output"]
        self.before = [n for n in calls if n in forward]
        self.after = [n for n in calls if n not in forward]
        tensors = (t for s in compiled.plan.saved if s.bytes for t in s.tensors)
        sizes = {t.name: t.bytes for t in tensors if not t.on_host}
        self.kept = {n: sizes[n.name] for n in compiled.ctx.saved if n.name in sizes}

    def forward(self) -> Iterator[tuple[fx.Node, bool, int]]:
        """Operators of the forward, with the bytes that each adds to those kept."""
        for node in self.before:
            yield node, False, self.kept.get(node, 0)

    def backward(self) -> Iterator[tuple[fx.Node, bool, int]]:
        """Operators of the backward, with the bytes that each frees, negative."""
        order = {node: i for i, node in enumerate(self.after)}
        freed: dict[fx.Node, int] = {}
        for node, size in self.kept.items():
            last = max(_uses(node, order), key=order.__getitem__, default=None)
            if last is None:  # the backward returns it as it is
                last = self.after[-1]
            freed[last] = freed.get(last, 0) + size
        for node in self.after:
            yield node, True, -freed.get(node, 0)


def _uses(node: fx.Node, order: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """The operators of the backward that use a kept value, also through views of it."""
    for user in node.users:
        if user in order:
            yield user
            if kind(user) is Kind.VIEW:
                yield from _uses(user, order)
