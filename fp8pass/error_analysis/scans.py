"""Gradients that are summed over positions, one by one: the backward of recurrences.

The error rules take the errors of a row's elements to count by their size. A recurrence that is
written with `cumsum` (gated linear attention, HGRN, minGRU) multiplies by exp(c), sums, and
multiplies by exp(-c): what is smallest in a row before the sum is largest behind it. Groups with a
common scale would flush it to zero. Where all exponentials beside the sum are of nothing positive,
as in Mamba2 and gated delta rules, what is small stays small: formats of a wide range will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
from torch import fx

from fp8pass.error_analysis.regions import Region, is_movement
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.patterns import ADDITIONS

aten = torch.ops.aten

SCANS = frozenset((aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default))

SCANNED = "its gradients are summed over positions, where the smallest may count most"


def scanned(regions: Iterable[Region], backward: Set[fx.Node]) -> list[set[Region]]:
    """For each sum over positions in `backward`, the regions that compute it or read it."""
    readers: dict[fx.Node, set[Region]] = {}
    for region in regions:
        for node in (*region.inputs, *region.nodes):
            readers.setdefault(node, set()).add(region)
    found = []
    for scan in (n for n in backward if n.target in SCANS):
        beside = _moved(scan, lambda n: n.all_input_nodes) | _moved(scan, lambda n: n.users)
        found.append({region for node in beside for region in readers.get(node, ())})
    return found


def _moved(scan: fx.Node, next_: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """What a scan reads or gives, however it is moved, or added to something, in between."""
    found, ahead = set[fx.Node](), [scan]
    while ahead:
        for node in next_(ahead.pop()):
            if node in found:
                continue
            found.add(node)
            if kind(node) is Kind.VIEW or is_movement(node) or node.target in ADDITIONS:
                ahead.append(node)
    return found
