"""Count the floating-point operations of GEMMs, convolutions and attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fp8pass import compat, graph
from fp8pass.dialect.encoding import is_fp8
from fp8pass.dialect.expert_groups import rows_of_padded
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.classify import FLEX_ATTENTION, GROUPED_GEMMS, Kind, kind

fp8 = torch.ops.fp8pass

# Kinds of operators that the backward recomputes only if a memory budget requires it.
EXPENSIVE_KINDS = (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)


def total_flops(g: fx.Graph) -> tuple[float, float]:
    """Return the FLOPs of all expensive operators, and the FLOPs of FP8 GEMMs alone."""
    expensive = [n for n in g.nodes if is_expensive(n)]
    total, in_fp8 = sum(map(flops, expensive)), sum(map(flops, filter(is_fp8_gemm, expensive)))
    for chunks in chunks_of(g):
        chunk_total, chunk_fp8 = total_flops(chunks.body.graph)
        total, in_fp8 = total + chunks.count * chunk_total, in_fp8 + chunks.count * chunk_fp8
    return total, in_fp8


def is_expensive(node: fx.Node) -> bool:
    called = node.op == "call_function" and not graph.is_getitem(node)
    return called and kind(node) in EXPENSIVE_KINDS


def is_fp8_gemm(node: fx.Node) -> bool:
    if node.target not in OPERATORS or not OPERATORS[node.target].multiplies:
        return False
    return is_fp8(graph.tensor(node.args[0]).dtype)  # type: ignore[arg-type]


def flops(node: fx.Node) -> float:
    # Not `all_input_nodes`, which lists a tensor once even if it is both operands of a GEMM.
    nodes = [n for n in node.args if isinstance(n, fx.Node)]
    operands = [graph.tensor(n) for n in nodes if graph.value(n) is not None]
    if kind(node) is Kind.ATTENTION:
        backward = "backward" in str(node.target)
        # The first operand of an attention backward is a gradient, except in FlexAttention.
        first = 1 if backward and node.target not in FLEX_ATTENTION else 0
        return _attention_flops(operands[first:], backward=backward)
    if node.target in GROUPED_GEMMS:
        return _grouped_flops(*operands[:2])
    if node.target is fp8.scaled_grouped_outer.default:
        rows = rows_of_padded(compat.size_hint(operands[0].shape[-1]), operands[-1].shape[0])
        return 2.0 * rows * operands[0].shape[0] * operands[2].shape[0]
    if node.target in (fp8.scaled_mm.default, fp8.scaled_grouped_mm.default):
        return 2.0 * graph.numel(graph.tensor(node)) * compat.size_hint(operands[0].shape[-1])
    formula = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if formula is None:
        return float(graph.numel(graph.tensor(node)))
    values = fx.map_arg(node.args, lambda n: n.meta["val"])
    return float(formula(*_as_traced(values), out_val=_as_traced(node.meta["val"])))


def _grouped_flops(a: torch.Tensor, b: torch.Tensor) -> float:
    # If `a` is 3-D and `b` is 2-D, each expert's matrix multiplies only the columns of `b` that
    # belong to this expert.
    groups = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1
    return 2.0 * graph.numel(a) * compat.size_hint(b.shape[-1]) / groups


def _as_traced(values: Any) -> Any:
    """Replace symbolic sizes by their traced values, because arithmetic on symbols adds guards."""
    values = compat.tree_map_only(torch.SymInt, compat.size_hint, values)
    return compat.tree_map_only(
        torch.Tensor,
        lambda x: torch.empty([compat.size_hint(s) for s in x.shape], device="meta"),
        values,
    )


def _attention_flops(operands: list[torch.Tensor], *, backward: bool) -> float:
    """Count the FLOPs of attention: two GEMMs in the forward, or five GEMMs in the backward.

    Scores that a mask removes are counted, too. The first two `operands` are query and key, of
    shape [..., heads, length, dim].
    """
    query, key, *_ = operands
    *batch, queries, dim = (compat.size_hint(s) for s in query.shape)
    keys = compat.size_hint(key.shape[-2])
    return (10.0 if backward else 4.0) * math.prod(batch) * queries * keys * dim
