"""Run linear layers in FP8: `mm`, `addmm` of a parameter -> quantize + scaled_mm.

For `y = x Wᵀ` the joint graph holds three GEMMs, forward `x Wᵀ`, dgrad `dY W` and wgrad `dYᵀ x`.
Each GEMM becomes a `scaled_mm`, which contracts the last dimension of both operands:

    before   y  = mm(x, t(W))
             dx = mm(dY, W)
             dW = mm(t(dY), x)
    after    y  = scaled_mm(q(x),   q(W))       q(·)  = quantize(·, scale)
             dx = scaled_mm(q(dY),  qᵀ(W))      qᵀ(·) = transpose(q(·))
             dW = scaled_mm(qᵀ(dY), qᵀ(x))      scale = scale(amax(·))

Scales are computed from the values of the current step (papers COAT, section 5.2, and LLMQ, section
3). Each operand of the backward has one scale for the tensor, because its data is used in two
layouts, and scales must not vary along the contracted dimension. Operands of the forward are used
in one layout, so each row of `x` and `W` can have a scale (torchao's rowwise scaling). A kernel
that holds a whole row then computes the row's scale and quantizes the row in one pass. A tensor
that several GEMMs read is quantized once for each layout and quantization. A tensor that Inductor
padded for one of the GEMMs counts as a separate tensor.

`einsum` computes a linear layer by a `bmm` with a batch of one. The pass first replaces this `bmm`
by an `mm`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.dialect.quantization import TALL, TENSOR, Quantization, parse
from fp8pass.graph.linear_layers import (
    GraphPart,
    Layer,
    Reason,
    gemm_operands,
    is_multiple_of_16,
    is_narrow,
    layers_in_called_graphs,
    parts_with_layers,
    why_unsuitable_size,
)
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.tags import IS_TRANSPOSED, ROLE
from fp8pass.passes.context import Context
from fp8pass.passes.gemm_choice import Casts, why_emulated
from fp8pass.passes.quantizer import (
    EXACT_FORMATS,
    Quantizer,
    accumulates_fast,
    describe_layer,
    replace_gemm,
    stored_blocks,
    why_not_at_all,
)

fp8 = torch.ops.fp8pass

# Padding a weight for FP8 GEMMs gains nothing if one of its sizes is smaller than this, e.g. for an
# adapter of rank 8 or a head with 10 classes.
WORTH_PADDING = 64


def quantize_linears(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite every eligible linear layer, and record all linear layers in the plan."""
    if ctx.config.simulate is not None:  # `simulate_format` runs instead
        ctx.spare_seconds = math.inf
        return
    for part in parts_with_layers(gm, ctx.facts, ctx.config.skip_patterns):
        _quantize_layers(part, ctx)
        if part.gm is not gm:
            part.gm.recompile()
    for operator, layer in layers_in_called_graphs(gm, ctx.facts):
        chosen = why_not_at_all(layer, ctx.config)
        called = Reason(f"in a subgraph of {operator}, which fp8pass does not rewrite")
        ctx.plan.linears.append(layer.entry(chosen if chosen.text else called, ""))


def _quantize_layers(part: GraphPart, ctx: Context) -> None:
    g, config = part.gm.graph, ctx.config
    # `quantize_experts` rewrites layers of experts.
    reasons = [(layer, why_not(layer, config)) for layer in part.layers if not layer.experts]
    rewriter = LinearRewriter(g, config)
    choice = rewriter.choose(reasons, ctx)
    for layer, reason in reasons:
        entry = describe_layer(layer, reason, config, choice, part.times)
        unfit = {
            role: why
            for role, gemm in layer.gemms()
            if role in entry.fp8 and (why := rewriter.why_unfit(gemm, layer))
        }
        ctx.plan.linears.append(replace(entry, unfit=tuple(unfit.items())))
    first = next((layer for layer, reason in reasons if not reason.text), None)
    if first and config.quantizes_linears:
        ctx.plan.emulated = why_emulated(tensor(first.forward).device, config)
    rewriter.rewrite_chosen(reasons, choice)


def why_not(layer: Layer, config: Config) -> Reason:
    """Return why a layer cannot or should not run in FP8; an empty reason if it runs in FP8."""
    if (reason := why_not_at_all(layer, config)).text:
        return reason
    gemm, weight = layer.forward, (layer.out_features, layer.in_features)
    if _is_batch_of_one(gemm) and not config.quantizes_linears:
        return EXACT_FORMATS
    is_product = gemm.target in (aten.mm.default, aten.addmm.default) and not gemm.kwargs
    if not (is_product or _is_batch_of_one(gemm)):
        name = graph.operator_name(gemm)
        return Reason(f"the operator {name} computes it: only GEMMs of two matrices run in FP8")
    is_biased = gemm.target is aten.addmm.default
    if is_biased and tensor(gemm.args[0]).ndim != 1:  # type: ignore[arg-type]
        return Reason("its bias is not a vector")
    if why := why_unsuitable_size(*weight):
        small = any(compat.size_hint(size) < WORTH_PADDING for size in weight)
        return Reason(why, routine=small or is_narrow(*weight))
    if is_biased and not _has_columns_for_tensor_cores(gemm):
        return Reason(
            "its bias has an element for each token, but the number of tokens is not a multiple of "
            "16"
        )
    if any(compat.statically_known_true(size == 0) for size in weight):
        return Reason("empty weight", routine=True)
    if any(map(compat.has_unbacked, layer.rows)):
        return Reason("the number of rows depends on data")
    if any(compat.statically_known_true(size == 0) for size in layer.rows):
        return Reason("empty input", routine=True)
    if config.quantizes_linears and (lacking := hardware.why_no_fp8_gemm(tensor(gemm).device)):
        return Reason(lacking)
    return Reason()


def _is_batch_of_one(gemm: fx.Node) -> bool:
    size = tensor(gemm).shape[0]
    return gemm.target is aten.bmm.default and isinstance(size, int) and size == 1


def _why_no_rows(gemm: fx.Node) -> str | None:
    """Return why operands of a GEMM cannot have a scale for each row.

    Data with row scales can be neither transposed nor padded to a length that tensor cores take.
    Besides, cuBLASLt multiplies such data only if the result is BF16.
    """
    operands = gemm_operands(gemm)
    if not is_multiple_of_16(tensor(operands[0]).shape[-1]):
        return "the contraction is not a multiple of 16"
    if tensor(gemm).dtype is not torch.bfloat16:
        return f"its result is {graph.dtype_text(tensor(gemm).dtype)}"
    a_is_transposed, b_is_transposed = (graph.skip_transposes(x)[1] for x in operands)
    if a_is_transposed or not b_is_transposed:
        return "it contracts rows"
    return hardware.why_no_row_scales(tensor(gemm).device)


def _why_unfit(how: Quantization, gemm: fx.Node, operand: int) -> str | None:
    """Return why a GEMM's first or second operand cannot have the quantization `how`.

    Blocks must divide the rows of the operand and the contraction, whose sizes must be static.
    """
    if not how.is_in_groups:
        return None if how.block == TENSOR else _why_no_rows(gemm)
    sizes = tensor(gemm).shape[-2 + operand], tensor(gemm_operands(gemm)[0]).shape[-1]
    for side, size in zip(how.block, sizes, strict=True):
        if side > 1 and not (isinstance(size, int) and size % side == 0):
            return f"{size} is not a multiple of {side}"
    return None


def _has_columns_for_tensor_cores(gemm: fx.Node) -> bool:
    """Whether the number of columns of the result is known to suit FP8 tensor cores."""
    return is_multiple_of_16(tensor(gemm).shape[1])


class LinearRewriter(Quantizer):
    """Replaces the GEMMs of linear layers by FP8 GEMMs."""

    def casts_of(self, gemm: fx.Node, layer: Layer) -> Casts:
        self.gemm, self.layer = gemm, layer
        (a, how_a), (b, how_b) = self._choose_quantizations()
        return {
            **self.casts_of_operand(a, how_a, contract_rows=False),
            **self.casts_of_operand(b, how_b, contract_rows=True),
        }

    def rewrite(self, gemm: fx.Node, layer: Layer) -> None:
        self.gemm, self.layer = gemm, layer
        if _is_batch_of_one(gemm):
            self.gemm = gemm = self._remove_batch(gemm)
        (a, how_a), (b, how_b) = self._choose_quantizations()
        bias = gemm.args[0] if gemm.target is aten.addmm.default else None
        with gemm.graph.inserting_before(gemm):
            sides = [
                (*self.quantize(a, how_a, contract_rows=False), how_a),
                (*self.quantize(b, how_b, contract_rows=True), how_b),
            ]
            # FP8 tensor cores compute results with any number of rows, but the number of columns
            # must be a multiple of 16. If tokens are columns, as in gradients of transposed inputs,
            # the transposed result is computed.
            is_turned = self.config.quantizes_linears and not _has_columns_for_tensor_cores(gemm)
            (x, x_scale, x_how), (y, y_scale, y_how) = reversed(sides) if is_turned else sides
            options = tensor(gemm).dtype, accumulates_fast(gemm, layer, self.config)
            args = x, x_scale, y, y_scale, bias, *options, str(x_how), str(y_how)
            product = emit(gemm.graph, fp8.scaled_mm.default, *args, like=gemm)
            result = _turn(product, gemm) if is_turned else product
        self._replace(gemm, product, result)

    def _replace(self, gemm: fx.Node, product: fx.Node, result: fx.Node) -> None:
        product.meta[ROLE] = gemm.meta[ROLE]
        if gemm in self.backward:
            self.backward |= {product, *product.users, result}
        replace_gemm(gemm, product, result)

    def why_unfit(self, gemm: fx.Node, layer: Layer) -> str:
        """Return why a GEMM cannot have the configured scales, or ''."""
        self.gemm, self.layer = gemm, layer
        reasons = (_why_unfit(how, gemm, i) for i, how in enumerate(self._configured()))
        return next((why for why in reasons if why), "")

    def _choose_quantizations(self) -> list[tuple[fx.Node, Quantization]]:
        """Return both operands with their quantizations: those configured, else tensor scales."""
        chosen = self._configured()
        if self.why_unfit(self.gemm, self.layer):
            chosen = [Quantization(how.format, TENSOR) for how in chosen]
        return list(zip(gemm_operands(self.gemm), chosen, strict=True))

    def _configured(self) -> list[Quantization]:
        """Return the configured quantizations, or block quantizations if the weight has blocks."""
        role, operands = self.gemm.meta[ROLE], gemm_operands(self.gemm)
        chosen = [parse(self.config.quantizations[role, self.name_operand(x)]) for x in operands]
        stored = stored_blocks(self.gemm)
        if not any(stored) or not self.config.quantizes_linears:
            return chosen
        pairs = zip(stored, chosen, strict=True)
        return [found or Quantization(how.format, TALL, "fp32") for found, how in pairs]

    def _remove_batch(self, gemm: fx.Node) -> fx.Node:
        """Replace a `bmm` with a batch of one by an `mm`, and return the `mm`."""
        with gemm.graph.inserting_before(gemm):
            operands = [self._squeeze(x) for x in gemm_operands(gemm)]
            product = emit(gemm.graph, aten.mm.default, *operands, like=gemm)
            batch = self.emit(aten.unsqueeze.default, product, 0)
        self._replace(gemm, product, batch)
        return product

    def _squeeze(self, batch: fx.Node) -> fx.Node:
        base, is_flipped = graph.skip_batched_transposes(batch)
        matrix = self.derive(base, aten.squeeze.dim, 0)
        return self.derive(matrix, aten.permute.default, [1, 0]) if is_flipped else matrix


def _turn(product: fx.Node, gemm: fx.Node) -> fx.Node:
    """Return the transpose of a product in the layout of `gemm`.

    The transpose stays a view if all users of the GEMM only transpose it again.
    """
    product.meta[IS_TRANSPOSED] = True
    result = emit(gemm.graph, aten.permute.default, product, [1, 0], like=gemm)
    if all(graph.skip_transposes(user)[0] is not user for user in gemm.users):
        return result
    layout = torch.contiguous_format
    return emit(gemm.graph, aten.clone.default, result, memory_format=layout, like=gemm)
