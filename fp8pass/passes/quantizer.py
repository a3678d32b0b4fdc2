"""Quantize the operands of GEMMs, for `quantize_linears` and `quantize_experts`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.config import OPERANDS, Config
from fp8pass.dialect.quantization import (
    ROW,
    SQUARE,
    TALL,
    TENSOR,
    Block,
    Quantization,
    block_text,
    parse,
)
from fp8pass.graph.classify import GROUPED_GEMMS
from fp8pass.graph.linear_layers import (
    NOT_A_PARAMETER,
    Layer,
    Reason,
    emit_operand,
    gemm_operands,
    is_multiple_of_16,
    why_unsuitable_size,
)
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.tags import HIGH_PRECISION_BY_CHOICE, OPERAND_OF, REPLACED_GEMM, ROLE
from fp8pass.graph.traffic import count_elements, is_computed
from fp8pass.passes.context import Context
from fp8pass.passes.gemm_choice import Cast, Casts, Choice, choose_gemms
from fp8pass.plan import Linear

fp8 = torch.ops.fp8pass

# The reason of a layer if the configured formats are exact. FP8 GEMMs would not round anything, so
# the layer is not rewritten. Unlike the input of a skipped layer, its input may still be saved in a
# low-bit format.
EXACT_FORMATS = Reason("formats are exact, so the layer is not rewritten", chosen=True)

OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_at_all(layer: Layer, config: Config) -> Reason:
    """Return why a linear or expert layer is neither quantized nor rounded to a simulated format.

    With the option `simulate`, output heads and routers are rounded, too.
    """
    pattern = matching_pattern(layer.module, config.skip_patterns)
    is_simulated = config.simulate is not None
    if pattern is not None:
        return Reason(f"matches skip pattern {pattern!r}", chosen=True)
    if layer.is_head and not (config.quantize_lm_head or is_simulated):
        size = why_unsuitable_size(layer.out_features, layer.in_features)
        text = size or "an output head, which stays exact unless quantize_lm_head=True"
        return Reason(text, chosen=True)
    if layer.flaw:
        return Reason(layer.flaw, routine=layer.flaw != NOT_A_PARAMETER)
    if layer.is_router and not is_simulated:
        return Reason("router: a small error may send a token to another expert", chosen=True)
    if any(tensor(x).dtype not in OPERAND_DTYPES for x in gemm_operands(layer.forward)):
        return Reason(f"{graph.dtype_text(tensor(layer.forward).dtype)} operands")
    return Reason()


def describe_layer(
    layer: Layer, reason: Reason, config: Config, choice: Choice, times: str = ""
) -> Linear:
    """Return the layer's entry in the plan.

    If `reason` is empty, the GEMMs of `choice` run in FP8. The entry lists a role as `fast` if all
    GEMMs with this role use fast accumulation.
    """
    if not reason.text and not config.quantizes_linears:
        reason = Reason("formats are exact, so nothing is rounded", chosen=True)
    if reason.text:
        return layer.entry(reason, times)
    slower = choice.explain(layer)
    in_bf16 = {role for role, gemm in layer.gemms() if gemm not in choice.in_fp8}
    roles = tuple(dict.fromkeys(role for role, _ in layer.gemms() if role not in in_bf16))
    if not roles:
        reason = Reason(f"FP8 is not faster: {slower}", routine=True)
    slow = {role for role, gemm in layer.gemms() if not accumulates_fast(gemm, layer, config)}
    fast = tuple(role for role in roles if role not in slow)
    return replace(layer.entry(reason, times), fp8=roles, fast=fast, slower=slower)


def count_layers_before(g: fx.Graph) -> dict[fx.Node, int]:
    """Return, for each node, how many forward GEMMs of linear layers the graph has up to this node.

    A GEMM is counted only if it is already tagged with its role.
    """
    forward = [n.meta.get(ROLE) == "forward" for n in g.nodes]
    return dict(zip(g.nodes, accumulate(forward), strict=True))


def accumulates_fast(gemm: fx.Node, layer: Layer, config: Config) -> bool:
    """Whether a GEMM of `layer` uses fast accumulation when it runs in FP8.

    GEMMs of block-scaled operands do not, because they add the product of each block in FP32.
    """
    role, length = gemm.meta[ROLE], tensor(gemm_operands(gemm)[0]).shape[-1]
    configured = parse(config.quantizations[role, OPERANDS[role][0]])
    if any(stored_blocks(gemm)) or (configured.is_in_groups and not layer.experts):
        return False
    if gemm.target in GROUPED_GEMMS and role == "wgrad":  # contracts over the tokens of each expert
        length = length // layer.experts
    return config.accumulates_fast(role, length)


class Quantizer(ABC):
    """Replaces GEMMs of one graph by FP8 GEMMs.

    Each operand is quantized once per layout and quantization.

    Attributes:
        backward: the nodes that depend on a gradient.
        gemm, layer: the GEMM that is being rewritten, and its layer. New nodes get the GEMM's
            metadata, such as its module path.
    """

    gemm: fx.Node
    layer: Layer

    def __init__(self, g: fx.Graph, config: Config) -> None:
        self.graph, self.config = g, config
        self.backward = graph.tangent_dependent(g)
        self._quantized: dict[tuple[fx.Node, str, Quantization], tuple[fx.Node, fx.Node]] = {}
        # The `amax` node for each matrix and block. `identity_of` returns the key of a matrix.
        self._amaxes: dict[tuple[fx.Node, str, Block], fx.Node] = {}
        self._transposed: dict[fx.Node, fx.Node] = {}

    @abstractmethod
    def casts_of(self, gemm: fx.Node, layer: Layer) -> Casts:
        """Return the casts that a GEMM needs in FP8."""

    @abstractmethod
    def rewrite(self, gemm: fx.Node, layer: Layer) -> None:
        """Replace one GEMM of `layer`."""

    def choose(self, reasons: Sequence[tuple[Layer, Reason]], ctx: Context) -> Choice:
        """Tag the GEMMs of layers with their roles, and choose the GEMMs that run in FP8.

        `reasons` has the reason why each layer stays in high precision, if any.
        """
        for layer, reason in reasons:
            for role, gemm in layer.gemms():
                gemm.meta[ROLE] = role
                if reason.chosen and reason is not EXACT_FORMATS:
                    gemm.meta[HIGH_PRECISION_BY_CHOICE] = True
        eligible = [layer for layer, reason in reasons if not reason.text]
        choice = choose_gemms(self.graph, eligible, self.casts_of, self.config)
        ctx.spare_seconds += choice.saved_seconds
        ctx.launch_limit = ctx.launch_limit or choice.limit
        return choice

    def rewrite_chosen(self, reasons: Sequence[tuple[Layer, Reason]], choice: Choice) -> None:
        """Replace the GEMMs of `choice` in the order of the graph.

        The first GEMM that reads an operand quantizes it for all later GEMMs.
        """
        layers = {gemm: layer for layer, _ in reasons for _, gemm in layer.gemms()}
        for gemm in [n for n in self.graph.nodes if n in choice.in_fp8]:
            self.rewrite(gemm, layers[gemm])

    def casts_of_operand(
        self, matrix: fx.Node, quantization: Quantization, *, contract_rows: bool
    ) -> Casts:
        """Return the casts of `quantize`, by key. Casts with equal keys are the same cast.

        Bytes that a GEMM in BF16 would also move are not counted. The kernel that computes a tensor
        can also compute its amax, its row scales and its FP8 data. In the backward, a GEMM in BF16
        must dequantize or recompute a tensor, too, unless the tensor is saved exactly.
        """
        base, is_flipped = graph.skip_transposes(matrix)
        count = count_elements(matrix)
        size = count * tensor(base).element_size()
        identity, computed = identity_of(base), is_computed(base)
        own = Cast(0) if computed else Cast(size, 1)
        casts: dict[Hashable, Cast] = {(identity, "amax"): own}
        is_transposed = contract_rows != is_flipped
        if is_transposed and not quantization.survives_transpose:  # reads the tensor once more
            return {(identity, quantization, is_transposed): Cast(size + count, 1)}
        if quantization.block[0] == 1:  # a row, or a part of a row
            return casts | {(identity, quantization): Cast(count)}
        is_gradient = self.name_operand(base) == "gradient"
        if is_gradient:  # the last stage of the amax has a kernel of its own
            casts[identity, "amax"] = Cast(own.bytes, own.launches + 1)
        exact = is_gradient or not computed or self.config.save_format == "none"
        read = Cast(size, 1) if exact else Cast(0)
        layout = identity, quantization, is_transposed
        return casts | {(identity, quantization): read, layout: Cast(count)}

    def quantize(
        self, matrix: fx.Node, quantization: Quantization, *, contract_rows: bool
    ) -> tuple[fx.Node, fx.Node]:
        """Return FP8 data and scales of an operand. The GEMM contracts the data's last dimension.

        `contract_rows` is true if the original GEMM contracts the first dimension of `matrix`.
        """
        base, is_flipped = graph.skip_transposes(matrix)
        is_transposed = contract_rows != is_flipped
        # Tensor cores need contractions in multiples of 16. For other lengths, `base` is transposed
        # before it is quantized. `fp8.transpose` pads with zeros when it transposes the data back.
        needs_padding = not is_transposed and not is_multiple_of_16(tensor(base).shape[-1])
        if needs_padding or (is_transposed and not quantization.survives_transpose):
            base, is_transposed = self._permute(base), not is_transposed
        key = (*identity_of(base), quantization)
        if key not in self._quantized:
            self._quantized[key] = self._quantize(base, quantization)
        data, scale = self._quantized[key]
        operand = self.layer.module, self.name_operand(base)
        data.meta[OPERAND_OF] = tuple(dict.fromkeys((*data.meta.get(OPERAND_OF, ()), operand)))
        if not is_transposed:
            return data, scale
        if data not in self._transposed:
            self._transposed[data] = self.emit(fp8.transpose.default, data)
        if quantization.is_in_groups:  # one scale for each block: the scales form a matrix, too
            scale = self._permute(scale)
        return self._transposed[data], scale

    def _quantize(self, base: fx.Node, quantization: Quantization) -> tuple[fx.Node, fx.Node]:
        text, found = str(quantization), _find_quantized(base)
        if found and found[2] == quantization:
            return found[:2]
        groups = Quantization(quantization.format, TALL, "fp32")
        if found is None:  # the other GEMMs that read this matrix may have quantized it in groups
            data = self._quantized.get((*identity_of(base), groups))
            found = (*data, groups) if data else None
        is_finer = found and found[2] in (Quantization(quantization.format, ROW), groups)
        if found and is_finer and quantization.block == TENSOR:  # the largest of the finer scales
            scale = self.emit(fp8.amax.default, found[1], "tensor")
        else:
            scale = self.emit(fp8.scale.default, self.amax(base, quantization.block), text)
        return self.emit(fp8.quantize.default, base, scale, text), scale

    def amax(self, matrix: fx.Node, block: Block) -> fx.Node:
        """Emit the amax of each block. The tensor's amax is computed from row amaxes, if any."""
        rows = self._amaxes.get((*identity_of(matrix), ROW))
        if block == TENSOR and rows is not None:
            return self.emit(fp8.amax.default, rows, "tensor")
        key = (*identity_of(matrix), block)
        if block == TENSOR or key not in self._amaxes:
            self._amaxes[key] = self.emit(fp8.amax.default, matrix, block_text(block))
        return self._amaxes[key]

    def name_operand(self, matrix: fx.Node) -> str:
        """Return the name of an operand in `Config.quantizations`: input, weight or gradient."""
        base = graph.skip_transposes(matrix)[0]
        if base in self.backward:
            return "gradient"
        return "weight" if graph.skip_views_and_casts(base) is self.layer.weight else "input"

    def _permute(self, base: fx.Node) -> fx.Node:
        if base not in self._transposed:
            self._transposed[base] = self.derive(base, aten.permute.default, [1, 0])
        return self._transposed[base]

    def derive(self, x: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit `target(x, ...)`. If `x` is in the backward, the new node is, too."""
        node = self.emit(target, x, *args, **kwargs)
        if x in self.backward:
            self.backward.add(node)
        return node

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a node that prepares an operand of the current GEMM."""
        return emit_operand(target, *args, like=self.gemm, **kwargs)


def identity_of(matrix: fx.Node) -> tuple[fx.Node, str]:
    """Return a key that is equal for nodes that hold the same matrix.

    The key contains the shape, since views of a tensor in two shapes have different rows.
    """
    return graph.skip_reshapes(matrix), graph.shape_text(tensor(matrix))


def stored_blocks(gemm: fx.Node) -> list[Quantization | None]:
    """Return the quantization of each operand in blocks that the GEMM can read, else None."""
    result: list[Quantization | None] = []
    for operand, contracts_rows in zip(gemm_operands(gemm), (False, True), strict=True):
        base, is_flipped = graph.skip_transposes(operand)
        found = _find_quantized(base)
        block = found[2].block if found and found[2].scales == "fp32" else None
        fits = block == SQUARE or (block == TALL and contracts_rows == is_flipped)
        result.append(found[2] if found and fits else None)
    return result


def _find_quantized(matrix: fx.Node) -> tuple[fx.Node, fx.Node, Quantization] | None:
    """Return the data, scales and quantization that a matrix is dequantized from, or None.

    GEMMs can read the data directly. Quantizing the matrix again would give the same data, or the
    same values with half the scale, because BF16 represents dequantized values exactly. With scales
    that are not powers of two, as in checkpoints, requantizing would round the values once more.
    """
    shape, base = tensor(matrix).shape, graph.skip_reshapes(matrix)
    while base.target in graph.CASTS:
        base = graph.skip_reshapes(base.all_input_nodes[0])
    if not graph.is_call(base, fp8.dequantize.default) or tensor(base).shape != shape:
        return None
    data, *_, scale = base.all_input_nodes
    return data, scale, parse(str(base.args[2]))


def replace_gemm(gemm: fx.Node, product: fx.Node, result: fx.Node) -> None:
    """Replace a GEMM by `result`. Record on the new GEMM `product` which GEMM it replaces."""
    product.meta[REPLACED_GEMM] = graph.original_name(gemm)
    name = gemm.target.__name__  # type: ignore[union-attr]
    product.meta[graph.ORIGINAL_OPERATOR] = gemm.meta.get(graph.ORIGINAL_OPERATOR, name)
    gemm.replace_all_uses_with(result)
    gemm.graph.erase_node(gemm)
