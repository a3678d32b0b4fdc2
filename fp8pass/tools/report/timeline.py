"""Bytes saved for the backward, over the operators of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fp8pass import graph
from fp8pass.compilation import CompiledGraph
from fp8pass.graph.classify import Kind, kind
from fp8pass.tools.report.picture import find_forward_nodes

Change = tuple[fx.Node, bool, int]  # operator, whether in the backward, saved bytes it adds


@dataclass(frozen=True)
class TimelinePoint:
    """Saved bytes after an operator; `operator` is its number in the step."""

    operator: int
    module: str
    backward: bool
    bytes: int


def trace_timeline(graphs: Iterable[CompiledGraph]) -> list[TimelinePoint]:
    """Return the operators that change the saved bytes: forwards, then backwards in reverse."""
    points = [TimelinePoint(0, "", False, 0)]
    forwards: list[Change] = []
    backwards: list[Change] = []
    for compiled in graphs:
        forward, backward = _find_changes(compiled)
        forwards += forward
        backwards = backward + backwards
    for count, (node, in_backward, change) in enumerate(forwards + backwards, 1):
        if change:
            saved = points[-1].bytes + change
            points.append(TimelinePoint(count, graph.module_path(node), in_backward, saved))
    return points


def _find_changes(compiled: CompiledGraph) -> tuple[list[Change], list[Change]]:
    """Return the operators of the forward and of the backward, with the bytes that each adds."""
    forward = find_forward_nodes(compiled)
    calls = [n for n in compiled.gm.graph.nodes if n.op != "output"]
    after = [n for n in calls if n not in forward]
    order = {node: i for i, node in enumerate(after)}
    tensors = (t for s in compiled.plan.saved if s.bytes for t in s.tensors)
    sizes = {t.name: t.bytes for t in tensors if not t.on_host}
    saved = {n: sizes[n.name] for n in compiled.ctx.saved if n.name in sizes}
    freed: Counter[fx.Node] = Counter()
    for node, size in saved.items():
        last = max(_find_uses(node, order), key=order.__getitem__, default=None)
        freed[last or after[-1]] += size  # a backward may return a saved tensor unchanged
    adds: list[Change] = [(n, False, saved.get(n, 0)) for n in calls if n in forward]
    return adds, [(n, True, -freed[n]) for n in after]


def _find_uses(node: fx.Node, order: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the operators of the backward that use a saved tensor, also through views."""
    for user in node.users:
        if user in order:
            yield user
            if kind(user) is Kind.VIEW:
                yield from _find_uses(user, order)
