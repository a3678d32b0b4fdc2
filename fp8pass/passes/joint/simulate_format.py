"""Simulate GEMMs in another format: round the operands and results of linear layers to the format.

See section 3.2 of the paper "FP8 and back". `q` is `mask_format` (`dialect/masking.py`), which
rounds a tensor to the format without changing its dtype. For `y = x Wᵀ`

    before   y  = mm(x, t(W))              after    y  = q(mm(q(x), t(q(W))))
             dx = mm(dY, W)                         dx = q(mm(q(dY), q(W)))
             dW = mm(t(dY), x)                      dW = q(mm(t(q(dY)), q(x)))

A bias is added before the result is rounded. Weights and activations are saved unrounded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Simulation
from fp8pass.dialect.formats import simulated_format
from fp8pass.dialect.masking import MASKED_DTYPES, is_identity
from fp8pass.graph.linear_layers import (
    GraphPart,
    emit_operand,
    first_factor_index,
    parts_with_layers,
)
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.tags import REPLACED_GEMM, ROLE
from fp8pass.passes.context import Context
from fp8pass.passes.quantizer import identity_of, why_not_at_all

fp8 = torch.ops.fp8pass


def simulate_format(gm: fx.GraphModule, ctx: Context) -> None:
    """Round operands and results of linear layers; record all linear layers in the plan.

    The option `simulate` has the format.
    """
    simulation = ctx.config.simulation
    if simulation is None:
        return
    ctx.plan.simulated = simulation.format
    for part in parts_with_layers(gm, ctx.facts, ctx.config.skip_patterns):
        _mask_layers(part, ctx, simulation)
        if part.gm is not gm:
            part.gm.recompile()


def _mask_layers(part: GraphPart, ctx: Context, simulation: Simulation) -> None:
    chosen: set[fx.Node] = set()
    for layer in part.layers:
        reason, roles = why_not_at_all(layer, ctx.config), dict[str, None]()
        for role, gemm in layer.gemms():
            gemm.meta[ROLE] = role
            if not reason.text and role in simulation.gemms:
                chosen.add(gemm)
                roles[role] = None
        entry = layer.entry(reason, part.times)
        ctx.plan.linears.append(replace(entry, simulated=tuple(roles)))
    masker = Masker(simulation)
    for node in list(part.gm.graph.nodes):  # the first reader of an operand rounds it for all GEMMs
        if node in chosen:
            masker.mask_gemm(node)


class Masker:
    def __init__(self, simulation: Simulation) -> None:
        self.format = simulated_format(simulation.format)
        self._options = self.format.name, simulation.inner_clamp, simulation.outer_clamp
        self._masked: dict[tuple[fx.Node, str], fx.Node] = {}

    def mask_gemm(self, gemm: fx.Node) -> None:
        first = first_factor_index(gemm)
        with gemm.graph.inserting_before(gemm):
            for position in (first, first + 1):
                matrix = gemm.args[position]
                assert isinstance(matrix, fx.Node)
                gemm.update_arg(position, self._mask_operand(matrix, gemm))
        if self._is_unmasked(gemm):
            return
        users = list(gemm.users)
        with gemm.graph.inserting_after(gemm):
            result = emit(gemm.graph, fp8.mask_format.default, gemm, *self._options, like=gemm)
        result.meta[REPLACED_GEMM] = gemm.name
        for user in users:
            user.replace_input_with(gemm, result)
        if compat.must_save(gemm):  # the rounded result has the tag instead
            del gemm.meta["recompute"]

    def _mask_operand(self, matrix: fx.Node, gemm: fx.Node) -> fx.Node:
        batch = tensor(matrix).ndim == 3
        base, flipped = (graph.skip_batched_transposes if batch else graph.skip_transposes)(matrix)
        if self._is_unmasked(base):
            return matrix
        key = identity_of(base)
        if key not in self._masked:
            masked = emit_operand(fp8.mask_format.default, base, *self._options, like=gemm)
            self._masked[key] = masked
        masked = self._masked[key]
        if not flipped:
            return masked
        order = [0, 2, 1] if batch else [1, 0]
        return emit_operand(aten.permute.default, masked, order, like=gemm)

    def _is_unmasked(self, node: fx.Node) -> bool:
        """Whether rounding to the format would not change a tensor, like E8M7 in bfloat16."""
        dtype = tensor(node).dtype
        return dtype not in MASKED_DTYPES or is_identity(self.format, dtype)
