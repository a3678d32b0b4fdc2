"""Run linear layers in FP8: `mm`, `addmm` of a parameter -> quantize + scaled_mm.

For `y = x Wᵀ` the joint graph holds three GEMMs, forward `x Wᵀ`, dgrad `dY W` and wgrad `dYᵀ x`.
Each becomes a `scaled_mm`, which contracts the last dimension of both operands:

    before   y  = mm(x, t(W))
             dx = mm(dY, W)
             dW = mm(t(dY), x)
    after    y  = scaled_mm(q(x),   q(W))       q(·)  = quantize(·, scale)
             dx = scaled_mm(q(dY),  qᵀ(W))      qᵀ(·) = transpose(q(·))
             dW = scaled_mm(qᵀ(dY), qᵀ(x))      scale = scale(amax(·))

Scales are just in time (COAT 5.2, LLMQ 3). In the backward there is one for each tensor: codes are
used in two layouts, and no scale may vary along what a GEMM contracts. The forward needs one
layout: there each row of `x` and `W` has a scale of its own (torchao calls that rowwise), so that a
kernel that holds a row finds its scale and quantizes it in one pass. Every tensor is quantized once
per layout and quantization, however many GEMMs share it; a tensor that Inductor padded for one of
them counts as another tensor.

`einsum` writes a linear layer as a `bmm` of one matrix, which becomes an `mm` first.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.dialect.quantization import ROW, TENSOR, Block, Quantization, parse
from fp8pass.graph.linear_layers import (
    GraphPart,
    Layer,
    Reason,
    emit_operand,
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
from fp8pass.passes.quantizer import (
    EXACT_FORMATS,
    Quantizer,
    accumulates_fast,
    fast_roles,
    mark,
    take_place,
    why_not_at_all,
    why_not_these_rows,
)

fp8 = torch.ops.fp8pass

# Nobody pads an adapter of rank 8 or a head of 10 classes: there is nothing to gain.
WORTH_PADDING = 64


def quantize_linears(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite every eligible linear layer; record all of them in the plan."""
    if ctx.config.simulate is not None:  # `simulate_format` takes its place
        return
    for part in parts_with_layers(gm, ctx.facts, ctx.config.skip_patterns):
        quantize_layers(part, ctx)
        if part.gm is not gm:
            part.gm.recompile()
    for operator, layer in layers_in_called_graphs(gm, ctx.facts):
        reason = Reason(f"in a graph that {operator} calls, which no pass rewrites")
        ctx.plan.linears.append(layer.entry(reason, ""))


def quantize_layers(part: GraphPart, ctx: Context) -> None:
    """Rewrite the eligible ones of a graph's layers."""
    g, eligible = part.gm.graph, dict[fx.Node, Layer]()
    for layer in part.layers:
        if layer.experts:  # `quantize_experts` has them
            continue
        reason = why_not(layer, ctx.config)
        roles = mark(layer, reason)
        if roles:
            eligible |= {gemm: layer for _, gemm in layer.gemms()}
        if roles and not ctx.config.quantizes_linears:
            roles, reason = (), Reason("exact formats: rewritten, not rounded", chosen=True)
        fast = fast_roles(layer, ctx.config) if roles else ()
        ctx.plan.linears.append(layer.entry(reason, part.times, fp8=roles, fast=fast))
    quantizer = Quantizer(g, ctx.config)
    for node in list(g.nodes):  # in order: GEMMs share what the first of them quantizes
        if node in eligible:
            rewrite(node, eligible[node], quantizer)


def why_not(layer: Layer, config: Config) -> Reason:
    """Why `layer` cannot or should not run in FP8; an empty reason where it can."""
    if (reason := why_not_at_all(layer, config)).text:
        return reason
    gemm, weight = layer.forward, (layer.out_features, layer.in_features)
    if _is_batch_of_one(gemm) and not config.quantizes_linears:
        return EXACT_FORMATS
    if not _multiplies_two_matrices(gemm):
        name = graph.operator_name(gemm)
        return Reason(f"the operator {name} computes it: only products of two matrices run in FP8")
    biased = gemm.target is aten.addmm.default
    if biased and tensor(gemm.args[0]).ndim != 1:  # type: ignore[arg-type]
        return Reason("its bias is not a vector")
    if why := why_unsuitable_size(*weight):
        small = any(compat.size_hint(size) < WORTH_PADDING for size in weight)
        return Reason(why, routine=small or is_narrow(*weight))
    if biased and not has_columns_for_tensor_cores(gemm):
        return Reason(
            "its bias has an element for each token, and their number is no multiple of 16"
        )
    if any(compat.statically_known_true(size == 0) for size in weight):
        return Reason("empty weight", routine=True)
    if (reason := why_not_these_rows(layer)).text:
        return reason
    device = tensor(gemm).device
    if config.quantizes_linears and (lacking := hardware.why_no_fp8_gemm(device)):
        return Reason(lacking)
    return Reason()


def _multiplies_two_matrices(gemm: fx.Node) -> bool:
    plain = gemm.target in (aten.mm.default, aten.addmm.default) and not gemm.kwargs
    return plain or _is_batch_of_one(gemm)


def _is_batch_of_one(gemm: fx.Node) -> bool:
    size = tensor(gemm).shape[0]
    return gemm.target is aten.bmm.default and isinstance(size, int) and size == 1


def choose_quantization(operand: str, gemm: fx.Node, config: Config) -> Quantization:
    """The quantization of an operand of a GEMM: `Config.quantizations`, if the GEMM can have it."""
    chosen = parse(config.quantizations[gemm.meta[ROLE], operand])
    fits = _takes_rows(gemm) if chosen.block == ROW else _divides(chosen.block, gemm)
    return chosen if fits else Quantization(chosen.format, TENSOR)


def _takes_rows(gemm: fx.Node) -> bool:
    """Whether operands of a GEMM can have a scale for each row.

    Not if data would have to be transposed, or padded to a contraction that tensor cores take; and
    cuBLASLt multiplies such operands only if the result is BF16.
    """
    operands = gemm_operands(gemm)
    if not is_multiple_of_16(tensor(operands[0]).shape[-1]):
        return False
    a_is_transposed, b_is_transposed = (graph.skip_transposes(x)[1] for x in operands)
    contracts_rows = a_is_transposed or not b_is_transposed
    return tensor(gemm).dtype is torch.bfloat16 and not contracts_rows


def _divides(block: Block, gemm: fx.Node) -> bool:
    """Whether a block divides the operands of a GEMM, transposed or not."""
    sizes = [size for x in gemm_operands(gemm) for size in tensor(x).shape]
    return all(
        isinstance(size, int) and size % side == 0 for size in sizes for side in block if side > 1
    )


def has_columns_for_tensor_cores(gemm: fx.Node) -> bool:
    """Whether FP8 tensor cores take as many columns of the result as it has, as far as is known."""
    return is_multiple_of_16(tensor(gemm).shape[1])


def rewrite(gemm: fx.Node, layer: Layer, quantizer: Quantizer) -> None:
    """Replace one GEMM of `layer` by its FP8 form."""
    g = gemm.graph
    if _is_batch_of_one(gemm):
        gemm = _without_batch(gemm, quantizer)
    a, b = gemm_operands(gemm)
    bias = gemm.args[0] if gemm.target is aten.addmm.default else None
    names = quantizer.operand_names(gemm, layer)
    how = [choose_quantization(name, gemm, quantizer.config) for name in names]
    with g.inserting_before(gemm):
        left = quantizer(a, layer, how[0], contract_rows=False, like=gemm)
        right = quantizer(b, layer, how[1], contract_rows=True, like=gemm)
        # Where tokens are columns, as in gradients of transposed inputs, they are to be rows.
        flipped = quantizer.config.quantizes_linears and not has_columns_for_tensor_cores(gemm)
        operands = (*right, *left) if flipped else (*left, *right)
        quantizations = map(str, reversed(how) if flipped else how)
        options = tensor(gemm).dtype, accumulates_fast(gemm, layer, quantizer.config)
        args = *operands, bias, *options, *quantizations
        product = emit(g, fp8.scaled_mm.default, *args, like=gemm)
        result = _flipped(product, gemm) if flipped else product
    take_place(product, gemm)
    product.meta[ROLE] = gemm.meta[ROLE]
    gemm.replace_all_uses_with(result)
    g.erase_node(gemm)
    if gemm in quantizer.backward:
        quantizer.backward |= {product, *product.users, result}


def _without_batch(gemm: fx.Node, quantizer: Quantizer) -> fx.Node:
    """The product of two matrices that takes the place of a batch of one."""
    backward = quantizer.backward
    with gemm.graph.inserting_before(gemm):
        operands = [_only_matrix(x, gemm, backward) for x in gemm_operands(gemm)]
        product = emit(gemm.graph, aten.mm.default, *operands, like=gemm)
        batch = emit_operand(aten.unsqueeze.default, product, 0, like=gemm)
    take_place(product, gemm)
    product.meta[ROLE] = gemm.meta[ROLE]
    if gemm in backward:
        backward |= {product, batch}
    gemm.replace_all_uses_with(batch)
    gemm.graph.erase_node(gemm)
    return product


def _only_matrix(batch: fx.Node, like: fx.Node, backward: set[fx.Node]) -> fx.Node:
    base, flipped = graph.skip_batched_transposes(batch)
    matrix = emit_operand(aten.squeeze.dim, base, 0, like=like)
    found = emit_operand(aten.permute.default, matrix, [1, 0], like=like) if flipped else matrix
    if batch in backward:
        backward |= {matrix, found}
    return found


def _flipped(product: fx.Node, gemm: fx.Node) -> fx.Node:
    """The transpose of a product, in the layout of `gemm` unless that is only transposed again."""
    product.meta[IS_TRANSPOSED] = True
    g = gemm.graph
    result = emit(g, aten.permute.default, product, [1, 0], like=gemm)
    if all(graph.skip_transposes(user)[0] is not user for user in gemm.users):
        return result
    layout = torch.contiguous_format
    return emit(g, aten.clone.default, result, memory_format=layout, like=gemm)
