"""What keeping and recomputing values costs: in units for the cuts, in seconds for a budget.

Recomputing a byte costs one unit, keeping a byte `UNITS_PER_BYTE`: as much as recomputing 256. So
fused recomputation is nearly free, but the statistics of a row (4 bytes) are cheaper to keep than
to reduce again.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.graph.classify import AMAX_OPERATORS, Kind, kind
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR
from fp8pass.graph.flops import EXPENSIVE_KINDS, flops, is_fp8_gemm

UNITS_PER_BYTE = 256

RECOMPUTABLE = (
    Kind.VIEW,
    Kind.POINTWISE,
    Kind.REDUCTION,
    Kind.MOVEMENT,
    Kind.CREATION,
    Kind.QUANTIZE,
    Kind.SYMBOL,
)


def recompute_price(node: fx.Node) -> float:
    """The price of recomputing `node`, in units; infinite if it must not be recomputed."""
    if node.op == "get_attr":
        return 0  # a constant or a subgraph of the module, present in both halves
    if node.op != "call_function" or compat.must_save(node):
        return math.inf
    if graph.is_getitem(node):  # comes with its operator, or not at all
        return math.inf if math.isinf(recompute_price(graph.operator_of(node))) else 0
    kind_ = kind(node)
    if kind_ in (Kind.RANDOM, Kind.OTHER):
        return math.inf
    if kind_ is Kind.COLLECTIVE:
        return _price_of_collective(node)
    if compat.must_recompute(node):
        return 0
    if kind_ not in RECOMPUTABLE:
        return math.inf
    if kind_ in (Kind.VIEW, Kind.SYMBOL, Kind.CREATION) or node.target in graph.CASTS:
        return 0
    if kind_ is Kind.REDUCTION or node.target in AMAX_OPERATORS:
        return sum(graph.nbytes(n) for n in node.all_input_nodes)
    return graph.nbytes(node)


def _price_of_collective(node: fx.Node) -> float:
    """Gathers run again where `repeat_gathers` or a checkpointed region says so, sums never.

    No price is weighed against others: all ranks have to decide alike, whatever they keep.
    """
    collective: Any = node.args[0] if node.target is WAIT_TENSOR else node
    is_gather = collective.target is ALL_GATHER
    return 0 if is_gather and compat.must_recompute(node) else math.inf


def keep_price(node: fx.Node) -> float:
    """The price of keeping `node` exactly, in units; infinite if it cannot be kept."""
    if graph.is_non_tensor(node):
        return 0
    if graph.value(node) is None:
        return math.inf
    if compat.must_recompute(graph.operator_of(node)) and math.isfinite(recompute_price(node)):
        return math.inf
    kept = graph.nbytes(node) * UNITS_PER_BYTE
    # A view is copied, so that it does not keep its base alive: prefer a base of the same size.
    return kept + graph.nbytes(node) if kind(node) is Kind.VIEW else kept


# The share of a pointwise operator's memory traffic that is left when it is fused with its users.
FUSED_SHARE = 0.25


def can_run_again(node: fx.Node) -> bool:
    """Whether computing `node` twice gives the same result, whatever it costs."""
    if math.isfinite(recompute_price(node)):
        return True
    operator = graph.operator_of(node)
    if operator.op != "call_function" or compat.must_save(operator):
        return False
    return kind(operator) in EXPENSIVE_KINDS


def recompute_seconds(node: fx.Node) -> float:
    """Time to recompute `node`, by the roofline of its device."""
    if node.op != "call_function" or graph.is_getitem(node):
        return 0.0
    kind_ = kind(node)
    if kind_ in (Kind.VIEW, Kind.SYMBOL, Kind.CREATION):
        return 0.0
    if kind_ in EXPENSIVE_KINDS:
        return flops(node) / _peak_flops(node)
    moved = graph.nbytes(node)
    if kind_ is Kind.REDUCTION or node.target in AMAX_OPERATORS:
        moved += sum(graph.nbytes(n) for n in node.all_input_nodes)
    share = FUSED_SHARE if kind_ is Kind.POINTWISE else 1.0
    return share * moved / hardware.BANDWIDTH


def _peak_flops(node: fx.Node) -> float:
    """Floating point operations a second of the hardware that runs `node`."""
    if kind(node) is Kind.ATTENTION:
        return hardware.ATTENTION_FLOPS
    return hardware.FP8_FLOPS if is_fp8_gemm(node) else hardware.BF16_FLOPS
