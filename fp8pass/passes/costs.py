"""What keeping and recomputing values costs: in units for the cuts, in seconds for a budget.

A kept byte is `UNITS_PER_BYTE` units; one unit is what computing a byte again costs. A kept byte is
so worth the time of recomputing 256: fused recomputation is nearly free, and the statistics of a
row (4 bytes) are still cheaper to keep than to reduce again.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fp8pass import compat, graph, hardware
from fp8pass.ops import is_fp8
from fp8pass.passes.classify import STATISTICS, Kind, kind

fp8 = torch.ops.fp8pass

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
    """What computing `node` again costs, in units; infinite where it must not happen."""
    if node.op == "get_attr":
        return 0  # a constant or a subgraph of the module, present in both halves
    if node.op != "call_function" or compat.must_save(node):
        return math.inf
    if graph.is_getitem(node):  # comes with its operator, or not at all
        return math.inf if math.isinf(recompute_price(graph.operator_of(node))) else 0
    kind_ = kind(node)
    if kind_ in (Kind.RANDOM, Kind.COLLECTIVE, Kind.OTHER):
        return math.inf
    if compat.must_recompute(node):
        return 0
    if kind_ not in RECOMPUTABLE:
        return math.inf
    if kind_ in (Kind.VIEW, Kind.SYMBOL, Kind.CREATION) or node.target in graph.CASTS:
        return 0
    if kind_ is Kind.REDUCTION or node.target in STATISTICS:
        return sum(graph.nbytes(n) for n in node.all_input_nodes)
    return graph.nbytes(node)


def bytes_to_store(node: fx.Node) -> float:
    """Bytes of `node` kept exactly, in units; infinite where it cannot be kept."""
    if compat.is_sym_node(node):
        return 0
    if graph.value(node) is None:
        return math.inf
    if compat.must_recompute(graph.operator_of(node)) and math.isfinite(recompute_price(node)):
        return math.inf
    stored = graph.nbytes(node) * UNITS_PER_BYTE
    # A view has to be copied, so that it does not hold its base: rather keep a base of that size.
    return stored + graph.nbytes(node) if kind(node) is Kind.VIEW else stored


# What a memory budget may buy besides.
EXPENSIVE = (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)

# Pointwise operators are computed where they are used: of their own traffic this share is left.
FUSED_SHARE = 0.25


def can_run_again(node: fx.Node) -> bool:
    """Whether computing `node` twice gives the same, whatever it costs."""
    if math.isfinite(recompute_price(node)):
        return True
    operator = graph.operator_of(node)
    if operator.op != "call_function" or compat.must_save(operator):
        return False
    return kind(operator) in EXPENSIVE


def seconds(node: fx.Node) -> float:
    """Time to compute `node` again, by the roofline of its device."""
    if node.op != "call_function" or graph.is_getitem(node):
        return 0.0
    kind_ = kind(node)
    if kind_ in (Kind.VIEW, Kind.SYMBOL, Kind.CREATION):
        return 0.0
    if kind_ in EXPENSIVE:
        return flops(node) / _rate(node)
    moved = graph.nbytes(node)
    if kind_ is Kind.REDUCTION or node.target in STATISTICS:
        moved += sum(graph.nbytes(n) for n in node.all_input_nodes)
    share = FUSED_SHARE if kind_ is Kind.POINTWISE else 1.0
    return share * moved / hardware.BANDWIDTH


def _rate(node: fx.Node) -> float:
    if kind(node) is Kind.ATTENTION:
        return hardware.ATTENTION_FLOPS
    return hardware.FP8_FLOPS if node.target is fp8.scaled_mm.default else hardware.BF16_FLOPS


def total_flops(g: fx.Graph) -> tuple[float, float]:
    """Floating point operations of all GEMMs, convolutions and attention, and those in FP8."""
    expensive = [n for n in g.nodes if is_expensive(n)]
    in_fp8 = sum(flops(n) for n in expensive if is_fp8_gemm(n))
    return sum(map(flops, expensive)), in_fp8


def is_expensive(node: fx.Node) -> bool:
    """Whether `node` is a GEMM, a convolution or attention."""
    called = node.op == "call_function" and not graph.is_getitem(node)
    return called and kind(node) in EXPENSIVE


def is_fp8_gemm(node: fx.Node) -> bool:
    """Whether `node` multiplies FP8 codes."""
    if node.target is not fp8.scaled_mm.default:
        return False
    return is_fp8(graph.tensor(node.args[0]).dtype)  # type: ignore[arg-type]


def flops(node: fx.Node) -> float:
    """Floating point operations of a GEMM, convolution or attention."""
    given = [n for n in node.args if isinstance(n, fx.Node)]  # one tensor may be two operands
    operands = [graph.tensor(n) for n in given if graph.value(n) is not None]
    if kind(node) is Kind.ATTENTION:
        return _attention_flops(operands, backward="backward" in str(node.target))
    if node.target is fp8.scaled_mm.default:
        return 2.0 * graph.numel(graph.tensor(node)) * compat.size_hint(operands[0].shape[-1])
    formula = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if formula is None:
        return float(graph.numel(graph.tensor(node)))
    values = fx.map_arg(node.args, lambda n: n.meta["val"])
    return float(formula(*values, out_val=node.meta["val"]))


def _attention_flops(operands: list[torch.Tensor], *, backward: bool) -> float:
    """Two products of scores and values; five in the backward, whose first operand is a gradient.

    Operands are [..., heads, length, dim]; a causal mask is not counted as less.
    """
    query, key = operands[1:3] if backward else operands[:2]
    *batch, queries, dim = (compat.size_hint(s) for s in query.shape)
    keys = compat.size_hint(key.shape[-2])
    return (10.0 if backward else 4.0) * math.prod(batch) * queries * keys * dim
