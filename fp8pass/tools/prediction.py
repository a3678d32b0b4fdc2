"""Use the error rules to predict the error of every gradient in a planned backward.

Predicted errors are local: the error that one non-linear region, GEMM or attention adds to exact
gradients. Rounding is idealized (`samples.rounding`): values below the normal range of a format get
the relative error of the normal range, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.activation_memory.decision import Decision
from fp8pass.dialect.accumulation import accumulate
from fp8pass.dialect.encoding import encode, is_fp8
from fp8pass.dialect.formats import E4M3, FORMATS, Format
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dialect.scaling import operand_scale
from fp8pass.error_analysis.derivation import Derivation
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.regions import Region
from fp8pass.error_analysis.samples import relative_change, rounding
from fp8pass.graph.classify import Kind, argument_of, kind
from fp8pass.graph.patterns import quantization_of
from fp8pass.graph.symbols import Underivable
from fp8pass.graph.tags import original_name

fp8 = torch.ops.fp8pass


# Errors of GEMMs are estimated on at most this many rows and columns.
SAMPLED_ROWS = 512
# Fast accumulation is emulated on at most this many rows and columns, because emulation is slow.
LARGEST_EMULATED = 32


@dataclass
class Predictor:
    """Predicts relative RMS errors on a joint graph that is planned but not yet rewritten."""

    rules: Rules
    decisions: Mapping[fx.Node, Decision]
    values: Mapping[fx.Node, Any]  # exact values of a batch, by node
    # Error of each forward value that the backward reads.
    forward: dict[fx.Node, float] = field(default_factory=dict)
    # Error of each gradient, by the node's name before any pass; None if no rule could be derived.
    backward: dict[str, float | None] = field(default_factory=dict)

    def run(self, g: fx.Graph) -> None:
        """Predict all errors. Visit nodes in graph order, and each region after its last input."""
        members = {n for region in self.rules.regions for n in region.nodes}
        ready = self.rules.by_last_input()
        for node in g.nodes:
            if node.op != "output" and node not in members:
                self._predict_node(node)
            for region in ready.get(node, ()):
                self._predict_region(region)

    def _predict_node(self, node: fx.Node) -> None:
        if node not in self.rules.backward:
            self.forward[node] = self._predict_value(node)
        elif node.target is fp8.scaled_mm.default:
            self.backward[original_name(node)] = self._predict_scaled_mm(node)
        elif node.target in OPERATORS and OPERATORS[node.target].multiplies:
            self.backward[original_name(node)] = self._predict_experts(node)
        elif kind(graph.operator_of(node)) in (Kind.GEMM, Kind.CONVOLUTION, Kind.ATTENTION):
            self._rerun(node)
        # All other operators only add or move gradients, without an error.

    def _predict_value(self, node: fx.Node) -> float:
        decision = self.decisions.get(node)
        if decision is None:
            return 0.0
        if decision.format is not None:
            return decision.format.relative_error if decision.low_bit else 0.0
        return max((self.forward.get(n, 0.0) for n in node.all_input_nodes), default=0.0)

    def _rerun(self, node: fx.Node) -> None:
        """Predict the error of an operator by running it on rounded operands."""
        if graph.is_getitem(node) or not any(self.forward.get(n) for n in node.all_input_nodes):
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._round)
        with compat.real_tensors():
            results = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(results, Tensor):
            self.backward[original_name(node)] = relative_change(self.values[node], results)
            return
        for user in node.users:
            if graph.is_getitem(user) and isinstance(result := results[user.args[1]], Tensor):
                self.backward[original_name(user)] = relative_change(self.values[user], result)

    def _round(self, node: fx.Node) -> Any:
        """Return the exact value of a node, with its error added."""
        value, error = self.values[node], self.forward.get(node, 0.0)
        if not error:
            return value
        decision = self.decisions.get(node)
        mean = value.mean(-2, keepdim=True) if decision is not None and decision.centred else 0.0
        rounded = (value - mean) * rounding(value - mean, error)
        return (rounded + mean).to(value.dtype)

    def _predict_scaled_mm(self, gemm: fx.Node) -> float:
        """Return the error that the operands' errors and FP8 accumulation cause."""
        exact, rounded = [], []
        for operand in (gemm.args[0], gemm.args[2]):
            matrix, error = self._find_operand(operand)  # type: ignore[arg-type]
            some = _sample_rows(matrix, SAMPLED_ROWS).double()
            exact.append(some)
            rounded.append(some * rounding(some, error) if error else some)
        change = relative_change(exact[0] @ exact[1].T, rounded[0] @ rounded[1].T)
        fast = gemm.args[6] and is_fp8(graph.tensor(gemm.args[0]).dtype)  # type: ignore[arg-type]
        return math.hypot(change, estimate_accumulation_error(*exact) if fast else 0.0)

    def _predict_experts(self, gemm: fx.Node) -> float:
        """Predict the error from the formats alone: group sizes are known only at run time."""
        operands = [_find_quantize(gemm.args[0]), _find_quantize(gemm.args[2])]
        formats = map(_find_format, operands)
        errors = [
            math.hypot(self.forward.get(x.args[0], 0.0), f.relative_error)  # type: ignore[arg-type]
            for x, f in zip(operands, formats, strict=True)
        ]
        if gemm.args[6]:
            a, b = map(self._find_experts_matrix, operands)
            length = min(a.shape[1], b.shape[1])
            errors.append(estimate_accumulation_error(a[:, :length], b[:, :length]))
        return math.hypot(*errors)

    def _find_experts_matrix(self, node: fx.Node) -> Tensor:
        """Return the matrix that `node` quantized, with the contracted dimension last.

        If the GEMM sums over tokens, the matrix is cut to the tokens of an average expert.
        """
        matrix = self.values[node.args[0]]  # type: ignore[index]
        if node.target is fp8.quantize.default:
            return matrix
        if (row_scales := argument_of(node, "row_scales")) is not None:
            matrix = matrix.float() * self.values[row_scales]
        experts = graph.tensor(node.args[2]).shape[0]  # type: ignore[arg-type]
        return matrix[: max(len(matrix) // experts, 1)].t()

    def _find_operand(self, node: fx.Node) -> tuple[Tensor, float]:
        """Return an operand's matrix before quantization, and the operand's relative error.

        The contracted dimension of the matrix is last.
        """
        if graph.is_call(node, fp8.transpose.default):
            matrix, error = self._find_operand(node.args[0])  # type: ignore[arg-type]
            return matrix.t(), error
        if graph.is_call(node, fp8.as_codes.default):  # FP8 data from a gather
            return self.values[node], FORMATS[str(node.args[1])].relative_error
        source, format = node.args[0], _find_format(node)
        inherited = self.forward.get(source, 0.0)  # type: ignore[arg-type]
        return self.values[source], math.hypot(inherited, format.relative_error)  # type: ignore[index]

    def _predict_region(self, region: Region) -> None:
        stored = {
            n: d.format.relative_error if d.low_bit else 0.0
            for n in region.nodes
            if (d := self.decisions.get(n)) is not None and d.format is not None
        }
        try:
            if reason := self.rules.reason_of(region):
                raise Underivable(reason)
            with compat.real_tensors():
                errors = self._compute_region_errors(region, stored)
        except Underivable:
            exact = not any(stored.values()) and not any(self.forward.get(n) for n in region.values)
            unknown = 0.0 if exact else None
            self.backward.update((original_name(n), unknown) for n in region.backward)
            return
        for node, error in errors.items():
            if node in region.backward:
                self.backward[original_name(node)] = error
            else:
                known = error if node in self.decisions else 0.0
                self.forward[node] = stored.get(node, known)

    def _compute_region_errors(
        self, region: Region, stored: Mapping[fx.Node, float]
    ) -> dict[fx.Node, float]:
        """Return the error of each node of a region. `stored` has the errors of stored values."""
        derivation = Derivation(region)
        symbols = derivation.expressions.symbols
        derivation.samples.use(
            {
                symbols[n]: x
                for n in region.inputs
                if isinstance(x := self.values.get(n), Tensor) and x.is_floating_point()
            }
        )
        noise = {symbols[n]: self.forward.get(n, 0.0) for n in region.values}
        noise |= {symbols[n]: error for n, error in stored.items() if n in symbols}
        stored_symbols = {symbols[n] for n in stored if n in symbols}
        errors = derivation.samples.errors({s: e for s, e in noise.items() if e}, stored_symbols)
        return {n: errors[symbols[n]] for n in region.nodes if n in symbols}


def _find_quantize(node: Any) -> fx.Node:
    while node.target not in (fp8.quantize.default, fp8.transpose_segments.default):
        node = node.args[0]
    return node


def _sample_rows(matrix: Tensor, most: int) -> Tensor:
    rows = torch.linspace(0, len(matrix) - 1, min(len(matrix), most), dtype=torch.float64)
    return matrix[rows.long().to(matrix.device)]


def estimate_accumulation_error(a: Tensor, b: Tensor) -> float:
    """Estimate the error of fast accumulation in the GEMM a @ b.T, from a few rows of each."""
    operands = []
    for x in (a, b):
        some = _sample_rows(x, LARGEST_EMULATED).float()
        operands.append(encode(some / operand_scale(some.abs().amax(), E4M3), E4M3))
    exact = operands[0].double() @ operands[1].double().T
    return relative_change(exact, accumulate(*operands, fast=True).double())


def _find_format(quantized: fx.Node) -> Format:
    if quantized.target is fp8.quantize.default:
        return quantization_of(quantized).format
    return FORMATS[str(quantized.args[3])]
