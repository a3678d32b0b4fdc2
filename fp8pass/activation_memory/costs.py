"""Estimate the costs of saving and recomputing values, in units and in seconds.

Saving a byte costs `UNITS_PER_BYTE` units, and recomputing a byte costs one unit. So recomputing an
elementwise result is nearly free, but the statistics of a row (4 bytes) are cheaper to save than to
recompute from the row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.dialect.quantization import parse
from fp8pass.graph.classify import AMAX_OPERATORS, Kind, kind
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR
from fp8pass.graph.flops import EXPENSIVE_KINDS, flops, is_fp8_gemm
from fp8pass.graph.traffic import FUSABLE

UNITS_PER_BYTE = 256

# A recomputed pointwise operator is fused with its users, so only this share of its memory traffic
# remains.
FUSED_SHARE = 0.25

WITHOUT_KERNEL = (Kind.VIEW, Kind.SYMBOL, Kind.CREATION)


def recompute_price(node: fx.Node) -> float:
    if node.op == "get_attr":
        return 0  # a constant or a subgraph, which the forward and the backward graph both have
    if node.op != "call_function" or compat.must_save(node):
        return math.inf
    if graph.is_getitem(node):  # recomputed together with its operator, or not at all
        return math.inf if math.isinf(recompute_price(graph.operator_of(node))) else 0
    kind_ = kind(node)
    if kind_ is Kind.COLLECTIVE:
        return _price_of_collective(node)
    if kind_ in (Kind.RANDOM, Kind.OTHER):
        return math.inf
    if compat.must_recompute(node):
        return 0
    if kind_ in WITHOUT_KERNEL or node.target in graph.CASTS:
        return 0
    if kind_ not in FUSABLE:
        return math.inf
    return _operand_bytes(node) if _reduces(node) else graph.nbytes(node)


def _price_of_collective(node: fx.Node) -> float:
    """Return 0 for gathers that `repeat_gathers` or checkpointing recomputes, else infinity.

    A price between 0 and infinity could lead to different decisions, and so different collectives,
    on different ranks.
    """
    collective: Any = node.args[0] if node.target is WAIT_TENSOR else node
    is_gather = collective.target is ALL_GATHER
    return 0 if is_gather and compat.must_recompute(node) else math.inf


def save_price(node: fx.Node) -> float:
    if graph.is_non_tensor(node):
        return 0
    if graph.value(node) is None:
        return math.inf
    if compat.must_recompute(graph.operator_of(node)) and math.isfinite(recompute_price(node)):
        return math.inf
    price = graph.nbytes(node) * UNITS_PER_BYTE
    # A view must be copied, because otherwise it would keep the whole base alive.
    return price + graph.nbytes(node) if kind(node) is Kind.VIEW else price


def can_run_again(node: fx.Node) -> bool:
    """Whether computing `node` twice gives the same result, regardless of the cost."""
    if math.isfinite(recompute_price(node)):
        return True
    operator = graph.operator_of(node)
    if operator.op != "call_function" or compat.must_save(operator):
        return False
    return kind(operator) in EXPENSIVE_KINDS


def recompute_seconds(node: fx.Node) -> float:
    if node.op != "call_function" or graph.is_getitem(node):
        return 0.0
    kind_ = kind(node)
    if kind_ in WITHOUT_KERNEL:
        return 0.0
    if kind_ in EXPENSIVE_KINDS:
        return flops(node) / _peak_flops(node)
    moved = graph.nbytes(node) + (_operand_bytes(node) if _reduces(node) else 0)
    share = FUSED_SHARE if kind_ is Kind.POINTWISE else 1.0
    return share * moved / hardware.BANDWIDTH


def _reduces(node: fx.Node) -> bool:
    return kind(node) is Kind.REDUCTION or node.target in AMAX_OPERATORS


def _operand_bytes(node: fx.Node) -> int:
    return sum(graph.nbytes(n) for n in node.all_input_nodes)


def _peak_flops(node: fx.Node) -> float:
    if kind(node) is Kind.ATTENTION:
        return hardware.ATTENTION_FLOPS
    return hardware.FP8_FLOPS if runs_in_fp8(node) else hardware.BF16_FLOPS


def runs_in_fp8(node: fx.Node) -> bool:
    """Whether tensor cores multiply FP8 data in a node."""
    if node.target is not torch.ops.fp8pass.scaled_mm.default or not is_fp8_gemm(node):
        return is_fp8_gemm(node)
    scales = parse(str(node.args[-1])).scales
    return hardware.why_emulated(graph.tensor(node).device, scales) is None
