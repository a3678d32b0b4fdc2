"""Bytes kept for the backward, over the operators of one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fp8pass import graph
from fp8pass.compilation import CompiledGraph
from fp8pass.graph.classify import Kind, kind
from fp8pass.inspect.report.picture import forward_nodes


@dataclass(frozen=True)
class Moment:
    """What is kept once an operator has run; `operator` counts those of the step."""

    operator: int
    module: str
    backward: bool
    bytes: int


def timeline(graphs: Iterable[CompiledGraph]) -> list[Moment]:
    """Every moment at which what is kept changes: forwards in order, then backwards in reverse."""
    moments = [Moment(0, "", False, 0)]
    steps = [_Step(g) for g in graphs]
    changes = [change for step in steps for change in step.forward()]
    changes += [change for step in reversed(steps) for change in step.backward()]
    for count, (node, backward, change) in enumerate(changes, 1):
        if change:
            kept = moments[-1].bytes + change
            moments.append(Moment(count, graph.module_path(node), backward, kept))
    return moments


class _Step:
    """One graph's operators, and what each does to what is kept."""

    def __init__(self, compiled: CompiledGraph) -> None:
        forward = forward_nodes(compiled)
        calls = [n for n in compiled.gm.graph.nodes if n.op != "output"]
        self.before = [n for n in calls if n in forward]
        self.after = [n for n in calls if n not in forward]
        tensors = (t for s in compiled.plan.saved if s.bytes for t in s.tensors)
        sizes = {t.name: t.bytes for t in tensors}
        self.kept = {n: sizes[n.name] for n in compiled.ctx.saved if n.name in sizes}

    def forward(self) -> Iterator[tuple[fx.Node, bool, int]]:
        """Operators of the forward, with the bytes that are kept from then on."""
        for node in self.before:
            yield node, False, self.kept.get(node, 0)

    def backward(self) -> Iterator[tuple[fx.Node, bool, int]]:
        """Operators of the backward, with the bytes that nobody needs after them, negative."""
        order = {node: i for i, node in enumerate(self.after)}
        freed: dict[fx.Node, int] = {}
        for node, size in self.kept.items():
            last = max(_uses(node, order), key=order.__getitem__, default=None)
            if last is None:  # returned as it is
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
