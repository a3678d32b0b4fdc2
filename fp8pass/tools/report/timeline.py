"""Bytes saved for the backward at each operator of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fp8pass import graph
from fp8pass.compilation import CompiledGraph
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.names import short_operator_name
from fp8pass.tools.report.picture import find_forward_nodes

Change = tuple[fx.Node, int]  # an operator, and the saved bytes that it adds


@dataclass(frozen=True)
class TimelinePoint:
    # Number of the operator in the step. In the timeline of stock PyTorch, numbers are scaled so
    # that the step is as long as with fp8pass.
    position: float
    operator: str  # module and name
    backward: bool
    change: int  # negative if bytes are freed
    bytes: int


def trace_timeline(graphs: Iterable[CompiledGraph], stock: bool = False) -> list[TimelinePoint]:
    """Return a point for each change of the saved bytes in one step.

    The step runs the forwards of all graphs, then the backwards in reverse order. With `stock`,
    PyTorch's partitioner determines the saved tensors.
    """
    forwards: list[tuple[bool, int, list[Change]]] = []
    backwards: list[tuple[bool, int, list[Change]]] = []
    for compiled in graphs:
        in_forward, calls = find_forward_nodes(compiled), _list_calls(compiled.gm.graph)
        forward = [n for n in calls if n in in_forward]
        backward = [n for n in calls if n not in in_forward]
        lengths = len(forward), len(backward)
        tensors = (t for s in compiled.plan.saved if s.bytes for t in s.tensors)
        sizes = {t.name: t.bytes for t in tensors if not t.on_host}
        if stock and compiled.stock:
            forward, backward = (_list_calls(gm.graph) for gm in compiled.stock.halves)
            sizes = compiled.stock.saved
        adds, frees = _find_changes(forward, backward, sizes)
        forwards.append((False, lengths[0], adds))
        backwards.insert(0, (True, lengths[1], frees))
    points, start = [TimelinePoint(0, "", False, 0, 0)], 0
    for in_backward, length, changes in forwards + backwards:
        for number, (node, change) in enumerate(changes, 1):
            if change:
                position, total = start + length * number / len(changes), points[-1].bytes + change
                points.append(TimelinePoint(position, _name(node), in_backward, change, total))
        start += length
    return points


def _list_calls(g: fx.Graph) -> list[fx.Node]:
    return [n for n in g.nodes if n.op != "output"]


def _find_changes(
    forward: list[fx.Node], backward: list[fx.Node], sizes: dict[str, int]
) -> tuple[list[Change], list[Change]]:
    """Return each operator of the forward and of the backward, with the bytes that it adds.

    Saved tensors are nodes of the forward. If the backward is a separate graph, they are also its
    inputs.
    """
    order = {node: i for i, node in enumerate(backward)}
    freed: Counter[fx.Node] = Counter()
    for name, node in {n.name: n for n in (*forward, *backward)}.items():
        if name in sizes:
            last = max(_find_uses(node, order), key=order.__getitem__, default=None)
            freed[last or backward[-1]] += sizes[name]  # not used: the backward returns it
    return [(n, sizes.get(n.name, 0)) for n in forward], [(n, -freed[n]) for n in backward]


def _find_uses(node: fx.Node, order: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Yield the operators that read a node, directly or through views."""
    for user in node.users:
        if user in order:
            yield user
            if kind(user) is Kind.VIEW:
                yield from _find_uses(user, order)


def _name(node: fx.Node) -> str:
    """Name an operator, e.g. `layers.0.mlp, silu`."""
    path, operator = graph.module_path(node), short_operator_name(node)
    return f"{path}, {operator}" if path else operator
