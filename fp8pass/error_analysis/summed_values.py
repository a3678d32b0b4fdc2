"""Find values whose products with gradients are summed in scans or for small parameters.

*Scans*. A recurrence that is written with `cumsum` (gated linear attention, HGRN, minGRU)
multiplies values by exp(c), sums the products, and multiplies the sum by exp(-c). The smallest
elements of a row may become the largest, but a format would round them to zero.

*Small parameters*. The gradient of a small parameter consists of a few sums. In hyper-connections
these sums were 7 to 21% of the norm of their terms, so an error of 12% of each term changed the
sign of gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

import torch
from torch import fx

from fp8pass import graph
from fp8pass.error_analysis.differences import PRODUCTS, skip_copies
from fp8pass.error_analysis.regions import Region, is_movement
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten
from fp8pass.graph.order import ancestors, reach
from fp8pass.graph.patterns import SUM_OPERATORS

SCANS = (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
SCANNED = "its gradients are summed over positions, and the smallest terms may determine the sum"

SMALL = 32  # parameters with fewer elements are small
WIDE = 16  # rows with fewer elements are not stored in groups that share a scale
# Assumed ratio of the norm of a sum's terms to the sum. It is larger in 1 of 12 random sums.
CANCELLATION = 10.0


def find_scan_regions(regions: Iterable[Region], backward: Set[fx.Node]) -> list[set[Region]]:
    """Return, for each backward scan, the regions that views, movement or sums connect to it."""
    readers: dict[fx.Node, set[Region]] = {}
    for region in regions:
        for node in (*region.inputs, *region.nodes):
            readers.setdefault(node, set()).add(region)
    found = []
    for scan in (n for n in backward if n.target in SCANS):
        before = ancestors(scan.all_input_nodes, _passes_on)
        after = reach(scan.users, lambda n: n.users if _passes_on(n) else ())
        found.append({region for node in before | after for region in readers.get(node, ())})
    return found


def _passes_on(node: fx.Node) -> bool:
    return kind(node) is Kind.VIEW or is_movement(node) or node.target in SUM_OPERATORS


def find_factors_of_small_gradients(
    g: fx.Graph, backward: Collection[fx.Node], forward_outputs: int
) -> set[fx.Node]:
    gradients = graph.outputs(g)[forward_outputs:]
    waiting = [x for x in gradients if isinstance(x, fx.Node) and _is_small(x)]
    seen, found = set(waiting), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if kind(node) is Kind.GEMM or (node.target in PRODUCTS and _is_wide(node)):
            found.update(skip_copies(x) for x in node.all_input_nodes if x not in backward)
            continue
        operands = [x for x in node.all_input_nodes if x in backward and x not in seen]
        seen.update(operands)
        waiting += [x for x in operands if _may_lead_to_rows(x, node)]
    return {node for node in g.nodes if node not in backward and skip_copies(node) in found}


def _is_small(gradient: fx.Node) -> bool:
    value = graph.value(gradient)
    if not isinstance(value, torch.Tensor):
        return False
    count = value.numel()
    return isinstance(count, int) and count < SMALL


def _may_lead_to_rows(node: fx.Node, user: fx.Node) -> bool:
    """Whether the search continues at `node`. It ends between two tensors with wide rows."""
    is_tensor = isinstance(graph.value(node), torch.Tensor)
    return is_tensor and not (_is_wide(node) and _is_wide(user))


def _is_wide(node: fx.Node) -> bool:
    shape = graph.tensor(node).shape
    return bool(shape) and not (isinstance(shape[-1], int) and shape[-1] < WIDE)
