"""Rows of a plan that differ only in the layer's number, folded into one with a count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fp8pass.plan import Collective, HostCopy, Linear, RuleSummary, SavedTensor


def path_pattern(paths: Iterable[str]) -> str:
    """Module paths as text, those that differ only in the layer's number as one, `layers.*`."""
    rows = folded((path, (), path) for path in paths)
    return ", ".join(pattern or "the top level" for pattern, _, _ in rows)


def folded(rows: Iterable[tuple[str, tuple[Any, ...], Any]]) -> list[tuple[str, int, Any]]:
    """Rows (path, key, item) that differ only in the layer's number, as (path, count, item)."""
    groups: dict[tuple[str, tuple[Any, ...]], list[tuple[str, Any]]] = {}
    for path, key, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", path), key), []).append((path, item))
    return [
        (pattern if len(members) > 1 else members[0][0], len(members), members[0][1])
        for (pattern, _), members in groups.items()
    ]


def folded_linears(linears: Iterable[Linear]) -> list[tuple[str, int, Linear]]:
    """Linear layers, equal ones folded."""

    def key(y: Linear) -> tuple[Any, ...]:
        sizes = y.rows, y.experts, y.in_features, y.out_features
        return *sizes, y.fp8, y.fast, y.simulated, y.reason

    return folded((y.module, key(y), y) for y in linears)


def folded_collectives(sent: Iterable[Collective]) -> list[tuple[str, int, Collective]]:
    """Collectives, equal ones folded."""
    return folded((c.module, (c.op, c.half, c.shape, c.dtype, c.reason), c) for c in sent)


def folded_copies(copies: Iterable[HostCopy]) -> list[tuple[str, int, HostCopy]]:
    """Tensors on the host, those of equal layers folded; the first one's times stand for all."""
    return folded((c.module, (c.shape, c.dtype), c) for c in copies)


def folded_saved(
    saved: Iterable[SavedTensor], sources: Mapping[str, str] | None = None
) -> list[tuple[str, int, SavedTensor]]:
    """Kept tensors without scalars, equal ones folded; `sources`, by name, must be equal, too."""
    sources = sources or {}

    def key(s: SavedTensor) -> tuple[Any, ...]:
        kept = s.kept_as, s.bytes, s.host_bytes, s.reason
        return s.op, s.shape, s.dtype, *kept, sources.get(s.name)

    return folded((s.module, key(s), s) for s in saved if not s.is_scalar)


def folded_rules(rules: Iterable[RuleSummary]) -> list[tuple[str, int, RuleSummary]]:
    """Error rules, those of equal regions folded."""

    def key(r: RuleSummary) -> tuple[Any, ...]:
        return r.operators, round(r.case_1, 6), round(r.case_2, 6), r.reason, len(r.inputs)

    return folded((r.module, key(r), r) for r in rules)
