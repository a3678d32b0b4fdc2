"""What `quantize_linears` and `quantize_experts` share: codes of operands, and who has none."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect.formats import FORMATS, Format
from fp8pass.dialect.quantization import ROW, TENSOR, Block, Quantization, block_text, parse
from fp8pass.graph.classify import GROUPED_GEMMS
from fp8pass.graph.linear_layers import (
    Layer,
    Reason,
    emit_operand,
    gemm_operands,
    is_multiple_of_16,
)
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.tags import HIGH_PRECISION_BY_CHOICE, OPERAND_OF, REPLACED_GEMM, ROLE

fp8 = torch.ops.fp8pass

# What is not rewritten where nothing is rounded. Its operands are kept as the rules allow.
EXACT_FORMATS = Reason("exact formats: not rewritten", chosen=True)

OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not_at_all(layer: Layer, config: Config) -> Reason:
    """Why a layer, or one of experts, does not run in FP8 whatever its GEMMs are like."""
    pattern = matching_pattern(layer.module, config.skip_patterns)
    if pattern is not None:
        return Reason(f"matches skip pattern {pattern!r}", chosen=True)
    if not config.quantize_lm_head and layer.is_head:
        return Reason("an output head, which stays exact unless quantize_lm_head=True", chosen=True)
    if layer.flaw:
        return layer.why_not_linear
    if layer.is_router:
        return Reason("router: a small error may send a token to another expert", chosen=True)
    if any(tensor(x).dtype not in OPERAND_DTYPES for x in gemm_operands(layer.forward)):
        return Reason(f"{graph.dtype_text(tensor(layer.forward).dtype)} operands")
    return Reason()


def why_not_these_rows(layer: Layer) -> Reason:
    """Why the input of a layer has a number of rows that no FP8 GEMM takes."""
    if any(map(compat.has_unbacked, layer.rows)):
        return Reason("the number of rows depends on data")
    if any(compat.statically_known_true(size == 0) for size in layer.rows):
        return Reason("empty input", routine=True)
    return Reason()


def mark(layer: Layer, reason: Reason) -> tuple[str, ...]:
    """Write down what each GEMM of a layer is for; the roles of those that run in FP8."""
    by_choice = reason.chosen and reason is not EXACT_FORMATS
    for role, gemm in layer.gemms():
        gemm.meta[ROLE] = role
        if by_choice:
            gemm.meta[HIGH_PRECISION_BY_CHOICE] = True
    return () if reason.text else tuple(dict.fromkeys(role for role, _ in layer.gemms()))


def fast_roles(layer: Layer, config: Config) -> tuple[str, ...]:
    """The roles whose GEMMs of a layer all use fast accumulation."""
    slow = {role for role, gemm in layer.gemms() if not accumulates_fast(gemm, layer, config)}
    return tuple(dict.fromkeys(role for role, _ in layer.gemms() if role not in slow))


def accumulates_fast(gemm: fx.Node, layer: Layer, config: Config) -> bool:
    """Whether the FP8 form of a layer's GEMM uses fast accumulation."""
    role, length = gemm.meta[ROLE], tensor(gemm_operands(gemm)[0]).shape[-1]
    if gemm.target in GROUPED_GEMMS and role == "wgrad":  # contracts over the tokens of each expert
        length = length // layer.experts
    return config.accumulates_fast(role, length)


class Quantizer:
    """Quantizes matrices of one graph, each once per layout and format."""

    def __init__(self, g: fx.Graph, config: Config) -> None:
        self.config = config
        self.backward = graph.tangent_dependent(g)
        self._quantized: dict[tuple[fx.Node, str, Quantization], tuple[fx.Node, fx.Node]] = {}
        # Of blocks of a matrix; the largest of them is that of the whole matrix.
        self._amaxes: dict[tuple[fx.Node, str, Block], fx.Node] = {}
        self._transposed: dict[fx.Node, fx.Node] = {}

    def __call__(
        self,
        matrix: fx.Node,
        layer: Layer,
        quantization: Quantization,
        *,
        contract_rows: bool,
        like: fx.Node,
    ) -> tuple[fx.Node, fx.Node]:
        """Data and scales of an operand of `layer`, laid out with its contracted dimension last.

        `contract_rows` says that the GEMM contracts `matrix` over its first dimension.
        """
        base, flipped = graph.skip_transposes(matrix)
        is_transposed = contract_rows != flipped
        # Transposing data pads them with zeros to a length that tensor cores take.
        needs_padding = not is_transposed and not is_multiple_of_16(tensor(base).shape[-1])
        if needs_padding or (is_transposed and not quantization.survives_transpose):
            base, is_transposed = self._permuted(base, like), not is_transposed
        # One tensor may be two matrices: a view of another shape has rows of its own.
        identity = graph.skip_reshapes(base), graph.shape_text(tensor(base))
        key = (*identity, quantization)
        if key not in self._quantized:
            self._quantized[key] = self._quantize(base, identity, quantization, like)
        data, scale = self._quantized[key]
        operand = layer.module, self._operand_name(base, layer)
        data.meta[OPERAND_OF] = tuple(dict.fromkeys((*data.meta.get(OPERAND_OF, ()), operand)))
        if not is_transposed:
            return data, scale
        if data not in self._transposed:
            self._transposed[data] = emit_operand(fp8.transpose.default, data, like=like)
        if quantization.is_in_groups:  # the scales of blocks are a matrix, too
            scale = self._permuted(scale, like)
        return self._transposed[data], scale

    def _quantize(
        self,
        base: fx.Node,
        identity: tuple[fx.Node, str],
        quantization: Quantization,
        like: fx.Node,
    ) -> tuple[fx.Node, fx.Node]:
        text, is_tensor = str(quantization), quantization.block == TENSOR
        found = _codes_behind(base, quantization.format.name)
        if found and found[2] == quantization:
            return found[:2]
        if found and is_tensor:  # the largest of the rows' scales
            scale = emit_operand(fp8.amax.default, found[1], "tensor", like=like)
        else:
            amax = self._amax(base, identity, quantization.block, like)
            scale = emit_operand(fp8.scale.default, amax, text, like=like)
        return emit_operand(fp8.quantize.default, base, scale, text, like=like), scale

    def _permuted(self, base: fx.Node, like: fx.Node) -> fx.Node:
        if base not in self._transposed:
            permuted = emit_operand(aten.permute.default, base, [1, 0], like=like)
            self._transposed[base] = permuted
            if base in self.backward:
                self.backward.add(permuted)
        return self._transposed[base]

    def operand_names(self, gemm: fx.Node, layer: Layer) -> list[str]:
        """The operands of a GEMM as `Config.quantizations` names them."""
        role = gemm.meta[ROLE]
        known = {"dgrad": "weight", "wgrad": "input"}
        bases = [graph.skip_transposes(x)[0] for x in gemm_operands(gemm)]
        if role == "forward":
            return [self._operand_name(base, layer) for base in bases]
        return ["gradient" if base in self.backward else known[role] for base in bases]

    def format_of(self, matrix: fx.Node) -> Format:
        """The format of a matrix in FP8 GEMMs, which depends on whether it is a gradient."""
        is_gradient = graph.skip_transposes(matrix)[0] in self.backward
        name = self.config.gradient_format if is_gradient else self.config.forward_format
        return FORMATS[name]

    def _operand_name(self, base: fx.Node, layer: Layer) -> str:
        if base in self.backward:
            return "gradient"
        return "weight" if graph.skip_views_and_casts(base) is layer.weight else "input"

    def _amax(
        self, base: fx.Node, identity: tuple[fx.Node, str], block: Block, like: fx.Node
    ) -> fx.Node:
        """The largest magnitude of each block; that of a tensor is the largest of its rows'."""
        rows = self._amaxes.get((*identity, ROW))
        if block == TENSOR and rows is not None:
            return emit_operand(fp8.amax.default, rows, "tensor", like=like)
        key = (*identity, block)
        if block == TENSOR or key not in self._amaxes:
            text = block_text(block)
            self._amaxes[key] = emit_operand(fp8.amax.default, base, text, like=like)
        return self._amaxes[key]


def _codes_behind(matrix: fx.Node, format: str) -> tuple[fx.Node, fx.Node, Quantization] | None:
    """The data, scales and quantization that a matrix was dequantized from, if in a format.

    The values of E4M3 codes, which BF16 holds, would have these again, or the same of half a scale.
    """
    while matrix.target in graph.CASTS:
        (matrix,) = matrix.all_input_nodes
    if not graph.is_call(matrix, fp8.dequantize.default):
        return None
    planes, scale, text = matrix.args[:3]
    data = planes[0]  # type: ignore[index]
    assert isinstance(data, fx.Node)
    assert isinstance(scale, fx.Node)
    how = parse(str(text))
    return (data, scale, how) if how.format is FORMATS[format] and not how.is_in_groups else None


def take_place(node: fx.Node, gemm: fx.Node) -> None:
    """Have a node go by the name of the GEMM that it replaces."""
    node.meta[REPLACED_GEMM] = graph.original_name(gemm)
    name = gemm.target.__name__  # type: ignore[union-attr]
    node.meta[graph.ORIGINAL_OPERATOR] = gemm.meta.get(graph.ORIGINAL_OPERATOR, name)
