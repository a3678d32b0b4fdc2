"""Run experts in FP8: `_grouped_mm` of a parameter -> quantize + scaled_grouped_mm.

Tokens are sorted by expert, and `offsets` says where each expert's *segment* of them ends. Of
`y[e] = x[e] W[e]ᵀ` the joint graph holds three grouped GEMMs:

    before   y  = grouped_mm(x, Wᵀ, offsets)
             dx = grouped_mm(dY, W, offsets)
             dW = grouped_mm(t(dY), x, offsets)
    after    y  = scaled_grouped_mm(q(x), q(W), offsets)
             dx = scaled_grouped_mm(q(dY), q(Wᵀ), offsets)
             dW = scaled_grouped_outer(qᵀ(dY), qᵀ(x), padded_ends(offsets))

             q(·) = quantize(·, scale)     qᵀ(·) = transpose_segments(·, scale, offsets)

PyTorch's GEMM of codes takes a scale for each row of both operands. So tokens have a scale each,
and weights one for each feature that is not contracted: they are quantized for the forward and, the
other way, for dgrad. Wgrad contracts tokens, where a scale may vary only from segment to segment:
it follows from the largest of the tokens' amaxes there, which costs no pass over the tensor. Tensor
cores take tokens in multiples of 16, and segments are what the router makes them:
`transpose_segments` fills each up with zeros. All of that is computed where the offsets are, so
that the CPU waits for nothing.

Tokens that are rows of another matrix, in the order of their experts, are quantized where they come
from: codes are permuted, which are half the bytes. For wgrad `transpose_segments` permutes them.

Recipe `exact` leaves these GEMMs as they are.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect import hardware
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.granularity import ROW
from fp8pass.graph.classify import GROUPED
from fp8pass.graph.linear_layers import Layer, Reason, emit_operand, find_layers
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.tags import KEPT_BY_CHOICE, ROLE, STANDS_FOR
from fp8pass.passes.context import Context
from fp8pass.passes.quantize_linears import Quantizer

fp8 = torch.ops.fp8pass


def quantize_experts(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite the grouped GEMMs of experts; record them at their place among linear layers."""
    if ctx.config.simulate is not None or not any(n.target in GROUPED for n in gm.graph.nodes):
        return
    eligible: dict[fx.Node, Layer] = {}
    places = _places(gm.graph)
    layers = (layer for layer in find_layers(gm.graph, ctx.facts) if layer.experts)
    for before, layer in enumerate(layers):
        reason, roles = why_not(layer, ctx.config), dict[str, None]()
        for role, gemm in layer.gemms():
            gemm.meta[ROLE] = role
            if not reason.text:
                eligible[gemm] = layer
                roles[role] = None
            elif reason.chosen:
                gemm.meta[KEPT_BY_CHOICE] = True
        entry = layer.entry(reason, "", fp8=tuple(roles))
        ctx.plan.linears.insert(places[layer.forward] + before, entry)
    quantizer = ExpertQuantizer(gm.graph, ctx.config)
    for node in list(gm.graph.nodes):  # in order: GEMMs share what the first of them quantizes
        if node in eligible:
            rewrite(node, eligible[node], quantizer)


def _places(g: fx.Graph) -> dict[fx.Node, int]:
    """How many of the layers that are in the plan already come before each node."""
    forward = [n.meta.get(ROLE) == "forward" for n in g.nodes]
    return dict(zip(g.nodes, itertools.accumulate(forward), strict=True))


def why_not(layer: Layer, config: Config) -> Reason:
    """Why experts cannot or should not run in FP8; an empty reason where they can."""
    pattern = matching_pattern(layer.module, config.skip)
    if pattern is not None:
        return Reason(f"matches skip pattern {pattern!r}", chosen=True)
    if layer.flaw:
        return Reason(layer.flaw)
    if not config.quantizes_linears:
        return Reason("exact formats: not rewritten", chosen=True)
    if (config.forward_format, config.gradient_format) != (E4M3.name, E4M3.name):
        return Reason("PyTorch has FP8 GEMMs of experts for e4m3 only")
    gemm = layer.forward
    tokens, weights, _ = operands_of(gemm)
    if (tensor(tokens).ndim, tensor(weights).ndim) != (2, 3):
        return Reason(f"{gemm.target}: only 2-D tokens times 3-D weights run in FP8")
    sizes = tensor(weights).shape
    if not all(isinstance(n, int) and n % CONTRACTION_MULTIPLE == 0 for n in sizes[1:]):
        shape = "×".join(map(str, sizes))
        return Reason(f"weights {shape}: both sizes of each must be multiples of 16")
    if not isinstance(sizes[0], int):
        return Reason("the number of experts varies")
    if 0 in sizes:
        return Reason("empty weight")
    rows = tensor(gemm).shape[0]
    if compat.has_unbacked(rows):
        return Reason("the number of rows depends on data")
    if compat.statically_known_true(rows == 0):
        return Reason("empty input")
    if lacking := hardware.why_no_grouped_gemm(tensor(gemm).device):
        return Reason(lacking)
    return Reason()


def operands_of(gemm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Both factors of a grouped GEMM, and where the segments of what it groups end."""
    given = dict(zip(("self", "mat2", "offs"), gemm.args, strict=False)) | gemm.kwargs
    return given["self"], given["mat2"], given["offs"]  # type: ignore[return-value]


class ExpertQuantizer(Quantizer):
    """Quantizes tokens and weights of experts, each once per layout."""

    def __init__(self, g: fx.Graph, config: Config) -> None:
        super().__init__(g, config, {})  # codes that are inputs are those of single weights
        self._matrices: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._segments: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]] = {}
        self._gathered: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._ends: dict[fx.Node, fx.Node] = {}

    def by_row(self, matrix: fx.Node, layer: Layer, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Codes of a matrix that is contracted over its last dimension, and the rows' scales."""
        if matrix in self._gathered or _gathers_all_rows(matrix):
            return self._gathered_codes(matrix, layer, like)
        return self(matrix, layer, ROW, contract_rows=False, like=like)

    def _gathered_codes(
        self, tokens: fx.Node, layer: Layer, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Codes of permuted tokens: permuted codes, half the bytes, each row coded once."""
        if tokens not in self._gathered:
            x, indices = tokens.args
            assert isinstance(x, fx.Node)
            codes, _ = self(x, layer, ROW, contract_rows=False, like=like)
            amaxes = self._amax(x, _identity(x), ROW, like)
            taken = emit_operand(aten.index.Tensor, amaxes, indices, like=like)
            self._amaxes[_identity(tokens)] = taken  # those of wgrad, too
            scale = emit_operand(fp8.scale.default, taken, E4M3.name, like=like)
            data = emit_operand(fp8.as_bytes.default, codes, like=like)
            data = emit_operand(aten.index.Tensor, data, indices, like=like)
            data = emit_operand(fp8.as_codes.default, data, E4M3.name, like=like)
            self._gathered[tokens] = data, scale
        return self._gathered[tokens]

    def tokens(self, x: fx.Node, like: fx.Node) -> fx.Node:
        """`x`, in memory row by row if it is the transpose of what is."""
        return x if not graph.untransposed(x)[1] else self._copy(x, like)

    def matrices(self, weights: fx.Node, like: fx.Node) -> fx.Node:
        """The transposes of weights [E, K, N], one below the other: [E·N, K]."""
        base, flipped = graph.untransposed_matrices(weights)
        key = base, flipped
        if key not in self._matrices:
            experts, inward, outward = tensor(weights).shape
            if not flipped:
                base = emit_operand(aten.permute.default, base, [0, 2, 1], like=like)
            if not tensor(base).is_contiguous():
                base = self._copy(base, like)
            shape = [experts * outward, inward]
            self._matrices[key] = emit_operand(aten.view.default, base, shape, like=like)
        return self._matrices[key]

    def segments(self, x: fx.Node, offsets: fx.Node, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Codes of tokens `x` [T, K] that are contracted, [K, T'], and the scales of segments."""
        if (x, offsets) not in self._segments:
            amaxes = self._amax(x, _identity(x), ROW, like)
            amax = emit_operand(fp8.segment_amax.default, amaxes, offsets, like=like)
            scale = emit_operand(fp8.scale.default, amax, E4M3.name, like=like)
            operands: tuple[Any, ...] = x, scale, offsets, E4M3.name
            if _gathers_all_rows(x):  # the kernel goes through an index itself
                matrix, indices = x.args
                operands = matrix, scale, offsets, E4M3.name, indices[0]  # type: ignore[index]
            codes = emit_operand(fp8.transpose_segments.default, *operands, like=like)
            self._segments[x, offsets] = codes, scale
        return self._segments[x, offsets]

    def ends(self, offsets: fx.Node, like: fx.Node) -> fx.Node:
        """Where padded segments end."""
        if offsets not in self._ends:
            self._ends[offsets] = emit_operand(fp8.padded_ends.default, offsets, like=like)
        return self._ends[offsets]

    def _copy(self, x: fx.Node, like: fx.Node) -> fx.Node:
        layout = torch.contiguous_format
        copy = emit_operand(aten.clone.default, x, memory_format=layout, like=like)
        if x in self.backward:
            self.backward.add(copy)
        return copy


def _gathers_all_rows(node: fx.Node) -> bool:
    """Whether a matrix has rows of another one, as many at least as that has."""
    if not graph.is_call(node, aten.index.Tensor):
        return False
    x, indices = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(indices, (list, tuple))
    rows = indices[0] if len(indices) == 1 else None
    if not isinstance(rows, fx.Node) or tensor(x).ndim != 2 or tensor(rows).ndim != 1:
        return False
    return not graph.untransposed(x)[1] and graph.nbytes(node) >= graph.nbytes(x)


def _identity(x: fx.Node) -> tuple[fx.Node, str]:
    """What says that two matrices are one."""
    return graph.root(x), graph.shape_text(tensor(x))


def rewrite(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> None:
    """Replace one grouped GEMM of `layer` by its FP8 form."""
    with gemm.graph.inserting_before(gemm):
        multiplied = _outer if tensor(gemm).ndim == 3 else _product
        target, *operands = multiplied(gemm, layer, quantizer)
        product = emit(gemm.graph, target, *operands, tensor(gemm).dtype, like=gemm)
    product.meta[STANDS_FOR] = gemm.name
    product.meta[graph.REPLACED] = gemm.target.__name__  # type: ignore[union-attr]
    product.meta[ROLE] = gemm.meta[ROLE]
    gemm.replace_all_uses_with(product)
    gemm.graph.erase_node(gemm)
    if gemm in quantizer.backward:
        quantizer.backward.add(product)


def _product(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> tuple[Any, ...]:
    """Forward or dgrad: tokens times the weights of their experts."""
    x, weights, offsets = operands_of(gemm)
    left = quantizer.by_row(quantizer.tokens(x, gemm), layer, gemm)
    right = quantizer.by_row(quantizer.matrices(weights, gemm), layer, gemm)
    return fp8.scaled_grouped_mm.default, *left, *right, offsets


def _outer(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> tuple[Any, ...]:
    """Wgrad: a product of each expert's tokens and gradients."""
    left, right, offsets = operands_of(gemm)
    rows, flipped = graph.untransposed(left)
    if not flipped:
        rows = emit_operand(aten.permute.default, left, [1, 0], like=gemm)
    operands = (quantizer.segments(x, offsets, gemm) for x in (rows, quantizer.tokens(right, gemm)))
    (a, a_scale), (b, b_scale) = operands
    ends = quantizer.ends(offsets, gemm)
    return fp8.scaled_grouped_outer.default, a, a_scale, b, b_scale, ends
