"""The gradient error that the rules expect at every point of a planned backward.

Errors are local: of what a region, GEMM or attention computes from exact incoming gradients, as
`diagnose` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.formats import FORMATS
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.context import Context
from fp8pass.passes.decision import Decision
from fp8pass.passes.derivation import Derivation
from fp8pass.passes.error_rules import Rules
from fp8pass.passes.expressions import Underivable
from fp8pass.passes.linear import STANDS_FOR
from fp8pass.passes.regions import Region

QUANTIZERS = (torch.ops.fp8pass.quantize.default,)
TRANSPOSITIONS = (torch.ops.fp8pass.transpose.default,)


@dataclass
class Prediction:
    """Expected relative RMS errors on a joint graph after planning, before its materialization.

    Attributes:
        forward: of forward values, as the backward gets them.
        backward: of gradients, by the name of the node in the graph before any pass; None where
            nothing could be derived.
    """

    forward: dict[fx.Node, float]
    backward: dict[str, float | None]


def predict(
    g: fx.Graph,
    ctx: Context,
    decisions: Mapping[fx.Node, Decision],
    data: Mapping[fx.Node, Tensor],
) -> Prediction:
    """What the decisions about forward values do to every gradient, to first order.

    `data` has the values of nodes on a batch: activations and gradients are distributed and
    correlated as they are there.
    """
    rules = Rules(g, ctx)
    region_of = {n: region for region in rules.regions for n in region.nodes}
    found, done = Prediction({}, {}), set[int]()
    for node in g.nodes:
        if node.op == "output":
            continue
        region = region_of.get(node)
        if region is not None:
            if id(region) not in done:  # when its first member comes, its forward inputs are known
                done.add(id(region))
                _predict_region(region, decisions, data, found)
        elif node in rules.backward:
            error = _of_operator(node, found, rules)
            if error and kind(node) is Kind.GEMM:
                error *= incoherence(node, data)
            found.backward[original_name(node)] = error
        else:
            found.forward[node] = _of_value(node, decisions, found)
    return found


def incoherence(gemm: fx.Node, data: Mapping[fx.Node, Tensor]) -> float:
    """How much of a GEMM's sums cancels: √(Σ |a_t|² |b_t|²) / ‖Σ a_t b_tᵀ‖.

    Rounding errors are independent and add up in squares. Where the terms do not, as in the weight
    gradient of a layer whose gradient is alike for all tokens, their share of the sum is smaller.
    """
    product = data.get(gemm)
    if gemm.target is torch.ops.aten.mm.default:
        first, second = (data.get(n) for n in gemm.all_input_nodes)
        operands = [first, None if second is None else second.t()]
    else:
        operands = [_matrix_of(n, data) for n in gemm.args[:3:2] if isinstance(n, fx.Node)]
    if product is None or len(operands) != 2 or any(x is None for x in operands):
        return 1.0
    a, b = (x.double().square() for x in operands if x is not None)
    if a.shape[-1] != b.shape[-1]:  # padded to a multiple of 16
        a, b = (x[:, : min(a.shape[-1], b.shape[-1])] for x in (a, b))
    norm = float(product.double().norm())
    return float((a.sum(0) * b.sum(0)).sum().sqrt()) / norm if norm else 1.0


def _matrix_of(operand: fx.Node, data: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The matrix that was quantized into an operand, contracted over its last dimension."""
    if operand.target in TRANSPOSITIONS:
        inner = _matrix_of(operand.args[0], data)  # type: ignore[arg-type]
        return None if inner is None else inner.t()
    if operand.target in QUANTIZERS:
        return data.get(operand.args[0])  # type: ignore[arg-type]
    return None


def original_name(node: fx.Node) -> str:
    """The name of a node, or of the GEMM that it replaced."""
    return str(node.meta.get(STANDS_FOR, node.name))


def _of_value(node: fx.Node, decisions: Mapping[fx.Node, Decision], found: Prediction) -> float:
    """Of a forward value outside of regions: as stored, or as its operands make it."""
    decision = decisions.get(node)
    if decision is None:
        return 0.0
    if decision.format is not None:
        return decision.format.relative_error if decision.low_bit else 0.0
    return max((found.forward.get(n, 0.0) for n in node.all_input_nodes), default=0.0)


def _predict_region(
    region: Region,
    decisions: Mapping[fx.Node, Decision],
    data: Mapping[fx.Node, Tensor],
    found: Prediction,
) -> None:
    kept = {
        n: d.format.relative_error if d.low_bit else 0.0
        for n in region.nodes
        if (d := decisions.get(n)) is not None and d.format is not None
    }
    try:
        with compat.real_tensors():
            errors = _region_errors(region, kept, data, found)
    except Underivable:
        exact = not any(kept.values()) and not any(found.forward.get(n) for n in region.values)
        found.backward.update((original_name(n), 0.0 if exact else None) for n in region.backward)
        return
    for node, error in errors.items():
        if node in region.backward:
            found.backward[original_name(node)] = error
        else:
            carried = decisions.get(node)
            found.forward[node] = kept.get(node, error if carried is not None else 0.0)


def _region_errors(
    region: Region,
    kept: Mapping[fx.Node, float],
    data: Mapping[fx.Node, Tensor],
    found: Prediction,
) -> dict[fx.Node, float]:
    derivation = Derivation(region, {})
    symbols = derivation.expressions.symbols
    derivation.samples.use({symbols[n]: data[n] for n in region.inputs if n in data})
    noise = {symbols[n]: found.forward.get(n, 0.0) for n in region.values}
    noise |= {symbols[n]: error for n, error in kept.items() if n in symbols}
    stored = {symbols[n] for n in kept if n in symbols}
    errors = derivation.samples.errors({s: e for s, e in noise.items() if e}, stored)
    return {n: errors[symbols[n]] for n in region.nodes if n in symbols}


def _of_operator(node: fx.Node, found: Prediction, rules: Rules) -> float | None:
    """Of a backward operator outside of regions, from the errors of what it reads."""
    errors = [_of_operand(n, found, rules) for n in node.all_input_nodes]
    if kind(node) is Kind.ATTENTION and not graph.is_getitem(node):
        return rules.expected_of_attention(node) * max(errors, default=0.0)
    if kind(node) in (Kind.GEMM, Kind.CONVOLUTION):
        return math.sqrt(sum(e**2 for e in errors))
    if graph.is_getitem(node):
        return found.backward.get(original_name(node.args[0]), 0.0)  # type: ignore[arg-type]
    return 0.0  # a junction or a movement of gradients, which are exact here


def _of_operand(node: fx.Node, found: Prediction, rules: Rules) -> float:
    """Of a GEMM's operand: of the value itself, and of rounding it to FP8."""
    if node.target in QUANTIZERS:
        source, format = node.args[0], FORMATS[str(node.args[2])]
        inherited = 0.0 if source in rules.backward else found.forward.get(source, 0.0)  # type: ignore[arg-type]
        return math.hypot(inherited, format.relative_error)
    if node.target in TRANSPOSITIONS:
        return _of_operand(node.args[0], found, rules)  # type: ignore[arg-type]
    if node in rules.backward:
        return 0.0
    val = graph.value(node)
    return found.forward.get(node, 0.0) if val is not None and val.ndim else 0.0
