"""Fold rows of a plan that differ only in the number of the layer into one row with a count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fp8pass.plan import Linear, RuleSummary, SavedTensor


class FoldedRow(NamedTuple):
    """`count` equal items of a plan, which are in different modules."""

    module: str  # pattern of the modules' paths, such as `layers.*.mlp`
    count: int  # type: ignore[assignment]  # hides tuple.count
    item: Any  # the item of the first module
    source: str = ""  # line of the model's code; '' if unknown


def format_paths(paths: Iterable[str]) -> str:
    """List paths as text. Paths that differ only in a number become a pattern like `layers.*`."""
    rows = fold_rows((path, (), path) for path in paths)
    return ", ".join(row.module or "the top level" for row in rows)


def fold_rows(rows: Iterable[tuple[str, tuple[Any, ...], Any]]) -> list[FoldedRow]:
    """Fold (path, key, item) tuples if their keys are equal and paths differ only in numbers."""
    groups: dict[tuple[str, tuple[Any, ...]], list[tuple[str, Any]]] = {}
    for path, key, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", path), key), []).append((path, item))
    return [
        FoldedRow(pattern if len(members) > 1 else members[0][0], len(members), members[0][1])
        for (pattern, _), members in groups.items()
    ]


def sort_by_bytes(rows: Iterable[FoldedRow]) -> list[FoldedRow]:
    return sorted(rows, key=lambda row: row.count * row.item.bytes, reverse=True)


def fold_linears(linears: Iterable[Linear]) -> list[FoldedRow]:

    def key(y: Linear) -> tuple[Any, ...]:
        sizes = y.rows, y.experts, y.in_features, y.out_features
        return *sizes, y.fp8, y.fast, y.unfit, y.simulated, y.reason, y.slower

    def name(y: Linear) -> str:
        return f"{y.module} ({y.projection})" if y.projection else y.module

    return fold_rows((name(y), key(y), y) for y in linears)


def fold_saved(
    saved: Iterable[SavedTensor], sources: Mapping[str, str] | None = None
) -> list[FoldedRow]:
    """Leave out scalars, fold equal saved tensors, and sort the rows, the largest first.

    `sources` maps names of tensors to lines of code. Tensors with different lines are not folded.
    """
    lines = sources or {}

    def key(s: SavedTensor) -> tuple[Any, ...]:
        storage = s.saved_as, s.bytes, s.host_bytes, s.reason
        return s.op, s.shape, s.dtype, *storage, lines.get(s.name)

    rows = fold_rows((s.module, key(s), s) for s in saved if not s.is_scalar)
    return sort_by_bytes(row._replace(source=lines.get(row.item.name, "")) for row in rows)


def fold_rules(rules: Iterable[RuleSummary]) -> list[FoldedRow]:

    def key(r: RuleSummary) -> tuple[Any, ...]:
        return r.operators, round(r.case_1, 6), round(r.case_2, 6), r.reason, len(r.inputs)

    return fold_rows((r.module, key(r), r) for r in rules)
