"""Gradients that are summed over positions, one by one: the backward of recurrences.

The error rules take the errors of a row's elements to count by their size. A recurrence that is
written with `cumsum` (gated linear attention, HGRN, minGRU) multiplies by exp(c), sums, and
multiplies by exp(-c): what is smallest in a row before the sum is largest behind it. Groups with a
common scale would flush it to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
from torch import fx

from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.patterns import SUMS
from fp8pass.rules.regions import Region, is_movement

aten = torch.ops.aten

SCANS = frozenset((aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default))

SCANNED = "its gradients are summed over positions, where the smallest may count most"


def scanned(regions: Iterable[Region], backward: Set[fx.Node]) -> set[Region]:
    """The regions that compute what is summed over positions in `backward`, or with such sums."""
    scans = [n for n in backward if n.target in SCANS]
    beside = _moved(scans, lambda n: n.all_input_nodes) | _moved(scans, lambda n: n.users)
    return {region for region in regions if not beside.isdisjoint((*region.inputs, *region.nodes))}


def _moved(scans: Iterable[fx.Node], next_: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """What scans read or give, however it is moved, or added to something, in between."""
    found, ahead = set[fx.Node](), list(scans)
    while ahead:
        for node in next_(ahead.pop()):
            if node in found:
                continue
            found.add(node)
            if kind(node) is Kind.VIEW or is_movement(node) or node.target in SUMS:
                ahead.append(node)
    return found
