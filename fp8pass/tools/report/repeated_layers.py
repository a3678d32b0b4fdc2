"""Draw repeated layers once: the first of several equal consecutive layers represents all of them.

before   layers.0   layers.1   layers.2   …   layers.31
after    layers.0   layers.1 (30 equal, to layers.30)   layers.31
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fp8pass.tools.report.picture import DrawnLayer, DrawnOperator, Edge, Picture

# The path of the outermost layer with a number, e.g. `model.layers.3` in `model.layers.3.mlp`.
_NUMBERED = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")

# Details that may differ between equal layers.
_OWN_DETAILS = ("source", "saves", "in keep_exact")


@dataclass(frozen=True)
class Span:
    """A numbered layer: its columns and operators."""

    path: str
    columns: range
    operators: list[DrawnOperator]

    @property
    def pattern(self) -> str:
        """The path with `*` for the layer's number, e.g. `layers.*`."""
        return re.sub(r"\d+$", "*", self.path)

    def signature(self) -> tuple[object, ...]:
        """Return a key that is equal for equal layers."""
        return (self.pattern, *(self._make_signature(y) for y in self.operators))

    def _make_signature(self, operator: DrawnOperator) -> tuple[object, ...]:
        details = tuple(x for x in operator.details.items() if x[0] not in _OWN_DETAILS)
        module = operator.module.replace(self.path, self.pattern, 1)
        position = operator.column - self.columns.start
        return operator.label, operator.kind, module, position, operator.backward, details


def find_layer(module: str) -> str:
    """Return the path of the numbered layer that a module is in, e.g. `model.layers.3`, or ''."""
    match = _NUMBERED.match(module)
    return match[0] if match else ""


def fold(picture: Picture) -> Picture:
    groups = [list(g) for _, g in itertools.groupby(find_spans(picture), key=Span.signature)]
    stands_for: dict[str, str] = {}
    instance: dict[str, tuple[str, str]] = {}
    for first, *others in groups:
        for span in (first, *others):
            for operator, drawn in zip(span.operators, first.operators, strict=True):
                stands_for[operator.id] = drawn.id
                instance[operator.id] = first.path, span.path
    folded = {c for _, *others in groups for span in others for c in span.columns}
    kept = [c for c in range(len(picture.columns)) if c not in folded]
    number = {column: i for i, column in enumerate(kept)}
    return Picture(
        columns=[picture.columns[c] for c in kept],
        operators=[
            replace(y, column=number[y.column]) for y in picture.operators if y.column in number
        ],
        edges=_merge_edges(picture.edges, stands_for, instance),
        layers=[
            DrawnLayer(g[0].path, g[-1].path, len(g), tuple(number[c] for c in g[0].columns))
            for g in groups
        ],
    )


def find_spans(picture: Picture) -> list[Span]:
    """Return the numbered layers, each with all columns from its first to its last."""
    columns: dict[str, list[int]] = {}
    for column, module in enumerate(picture.columns):
        if path := find_layer(module):
            columns.setdefault(path, []).append(column)
    operators: dict[int, list[DrawnOperator]] = {}
    for operator in picture.operators:
        operators.setdefault(operator.column, []).append(operator)
    found, end = [], 0
    for path, own in columns.items():
        if own[0] < end:  # layers that run in turns: their columns overlap
            continue
        end = own[-1] + 1
        span = range(own[0], end)
        found.append(Span(path, span, [y for c in span for y in operators.get(c, ())]))
    return found


def _merge_edges(
    edges: Iterable[Edge], stands_for: dict[str, str], instance: dict[str, tuple[str, str]]
) -> list[Edge]:
    """Let edges start and end at operators that are drawn.

    If an edge connects two layers that are drawn as one, drop it, unless its tensor is saved.
    """
    merged: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        tail, head = instance.get(edge.source), instance.get(edge.target)
        between_folded = tail and head and tail[0] == head[0] and tail != head
        if between_folded and not edge.bytes:
            continue
        source = stands_for.get(edge.source, edge.source)
        target = stands_for.get(edge.target, edge.target)
        merged.setdefault((source, target), replace(edge, source=source, target=target))
    return list(merged.values())
