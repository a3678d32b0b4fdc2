"""Run experts in FP8: `_grouped_mm` or `bmm` of a parameter -> quantize + scaled_grouped_mm.

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

Where each expert has as many tokens, a batch of matrices, the same stands for `bmm` and `baddbmm`:

    before   y  = bmm(x, W)                     x [E, T, K], W [E, K, N]
             dx = bmm(dY, Wᵀ)
             dW = bmm(xᵀ, dY)
    after    y  = view(scaled_grouped_mm(q(rows), q(Wᵀ), offsets), [E, T, N])
             ...                                rows = view(x, [E·T, K]), offsets = T, 2·T, ..., E·T

Where matrices do not lie one below the other in memory, because tokens come first or are columns,
`rows` is a copy. Tokens that go to all experts are rows that are taken more than once: they are
quantized once, and copies are made of codes.

Recipe `exact` leaves these GEMMs as they are.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import BY_ROW, ROW, Quantization
from fp8pass.graph.classify import BATCHED_GEMMS, GROUPED_GEMMS
from fp8pass.graph.linear_layers import (
    Layer,
    Reason,
    emit_operand,
    find_layers,
    gemm_operands,
)
from fp8pass.graph.nodes import aten, emit, prims, tensor
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

# PyTorch's GEMM of codes takes no more groups.
MOST_EXPERTS = 1023


def quantize_experts(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite the GEMMs of experts; record them at their place among linear layers."""
    has_any = any(n.target in GROUPED_GEMMS | BATCHED_GEMMS for n in gm.graph.nodes)
    if ctx.config.simulate is not None or not has_any:
        return
    eligible: dict[fx.Node, Layer] = {}
    places = _places(gm.graph)
    layers = (layer for layer in find_layers(gm.graph, ctx.facts) if layer.experts)
    for before, layer in enumerate(layers):
        reason = why_not(layer, ctx.config)
        roles = mark(layer, reason)
        if roles:
            eligible |= {gemm: layer for _, gemm in layer.gemms()}
        fast = fast_roles(layer, ctx.config) if roles else ()
        entry = layer.entry(reason, "", fp8=roles, fast=fast)
        ctx.plan.linears.insert(places[layer.forward] + before, entry)
    quantizer = ExpertQuantizer(gm.graph, ctx.config)
    for node in list(gm.graph.nodes):  # in order: GEMMs share what the first of them quantizes
        if node in eligible:
            rewrite(node, eligible[node], quantizer)
    quantizer.forget_rows()


def _places(g: fx.Graph) -> dict[fx.Node, int]:
    """How many of the layers that are in the plan already come before each node."""
    forward = [n.meta.get(ROLE) == "forward" for n in g.nodes]
    return dict(zip(g.nodes, itertools.accumulate(forward), strict=True))


def why_not(layer: Layer, config: Config) -> Reason:
    """Why experts cannot or should not run in FP8; an empty reason where they can."""
    if (reason := why_not_at_all(layer, config)).text:
        return reason
    if not config.quantizes_linears:
        return EXACT_FORMATS
    if (config.forward_format, config.gradient_format) != (E4M3.name, E4M3.name):
        return Reason("PyTorch has FP8 GEMMs of experts for e4m3 only")
    gemm = layer.forward
    if gemm.target in BATCHED_GEMMS:
        weights = weights_of(gemm, layer)
        if gemm.kwargs:
            return Reason(f"{gemm.target} with factors: only plain sums and products run in FP8")
    else:
        tokens, weights, _ = grouped_operands_of(gemm)
        if (tensor(tokens).ndim, tensor(weights).ndim) != (2, 3):
            return Reason(f"{gemm.target}: only 2-D tokens times 3-D weights run in FP8")
    sizes = tensor(weights).shape
    if not all(isinstance(n, int) and n % CONTRACTION_MULTIPLE == 0 for n in sizes[1:]):
        shape = "×".join(map(str, sizes))
        return Reason(f"weights {shape}: both sizes of each must be multiples of 16")
    if not isinstance(sizes[0], int):
        return Reason("the number of experts varies")
    if sizes[0] > MOST_EXPERTS:
        return Reason(f"{sizes[0]} experts: PyTorch's FP8 GEMMs take {MOST_EXPERTS} at most")
    if 0 in sizes:
        return Reason("empty weight", routine=True)
    if (reason := why_not_these_rows(layer)).text:
        return reason
    if lacking := hardware.why_no_grouped_gemm(tensor(gemm).device):
        return Reason(lacking)
    return Reason()


def weights_of(gemm: fx.Node, layer: Layer) -> fx.Node:
    """The factor of a batched forward or dgrad that is the weights, in front or behind."""
    a, b = gemm_operands(gemm)
    return a if graph.skip_views_and_casts(a) is layer.weight else b


def grouped_operands_of(gemm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Both factors of a grouped GEMM, and where the segments of what it groups end."""
    given = dict(zip(("self", "mat2", "offs"), gemm.args, strict=False)) | gemm.kwargs
    return given["self"], given["mat2"], given["offs"]  # type: ignore[return-value]


class ExpertQuantizer(Quantizer):
    """Quantizes tokens and weights of experts, each once per layout."""

    def __init__(self, g: fx.Graph, config: Config) -> None:
        super().__init__(g, config)
        self._matrices: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._segments: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]] = {}
        self._gathered: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._ends: dict[fx.Node, fx.Node] = {}
        self._rows: dict[tuple[fx.Node, bool, str], fx.Node] = {}
        self._offsets: dict[tuple[int, str], fx.Node] = {}

    def by_row(self, matrix: fx.Node, layer: Layer, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Codes of a matrix that is contracted over its last dimension, and the rows' scales."""
        if matrix in self._gathered or _gathers_all_rows(matrix):
            return self._gathered_codes(matrix, layer, like)
        return self(matrix, layer, self._quantization(matrix), contract_rows=False, like=like)

    def _quantization(self, matrix: fx.Node) -> Quantization:
        return Quantization(self.format_of(matrix), ROW)

    def _gathered_codes(
        self, tokens: fx.Node, layer: Layer, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Codes of permuted tokens: permuted codes, half the bytes, each row coded once."""
        if tokens not in self._gathered:
            x, indices = tokens.args
            assert isinstance(x, fx.Node)
            codes, _ = self(x, layer, self._quantization(x), contract_rows=False, like=like)
            amaxes = self._amax(x, _identity(x), ROW, like)
            taken = emit_operand(aten.index.Tensor, amaxes, indices, like=like)
            self._amaxes[(*_identity(tokens), ROW)] = taken  # those of wgrad, too
            scale = emit_operand(fp8.scale.default, taken, BY_ROW, like=like)
            data = emit_operand(fp8.as_bytes.default, codes, like=like)
            data = emit_operand(aten.index.Tensor, data, indices, like=like)
            data = emit_operand(fp8.as_codes.default, data, E4M3.name, like=like)
            self._gathered[tokens] = data, scale
        return self._gathered[tokens]

    def tokens(self, x: fx.Node, like: fx.Node) -> fx.Node:
        """`x`, in memory row by row if it is the transpose of what is."""
        return x if not graph.skip_transposes(x)[1] else self.copy(x, like)

    def matrices(self, weights: fx.Node, like: fx.Node) -> fx.Node:
        """The transposes of weights [E, K, N], one below the other: [E·N, K]."""
        base, flipped = graph.skip_batched_transposes(weights)
        key = base, flipped
        if key not in self._matrices:
            experts, inward, outward = tensor(weights).shape
            if not flipped:
                base = emit_operand(aten.permute.default, base, [0, 2, 1], like=like)
            if not tensor(base).is_contiguous():
                base = self.copy(base, like)
            shape = [experts * outward, inward]
            self._matrices[key] = emit_operand(aten.view.default, base, shape, like=like)
        return self._matrices[key]

    def segments(self, x: fx.Node, offsets: fx.Node, like: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Codes of tokens `x` [T, K] that are contracted, [K, T'], and the scales of segments."""
        if (x, offsets) not in self._segments:
            amaxes = self._amax(x, _identity(x), ROW, like)
            amax = emit_operand(fp8.segment_amax.default, amaxes, offsets, like=like)
            scale = emit_operand(fp8.scale.default, amax, BY_ROW, like=like)
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

    def rows(self, batch: fx.Node, layer: Layer, like: fx.Node) -> fx.Node:
        """The matrices of a batch [E, T, K], one below the other: [E·T, K].

        Fake values of views are given: to find them PyTorch would compare sizes that vary.
        """
        base, flipped = graph.skip_batched_transposes(batch)
        key = graph.skip_reshapes(base), flipped, graph.shape_text(tensor(batch))
        if key not in self._rows:
            self._rows[key] = self._rows_of(batch, layer, like)
        return self._rows[key]

    def _rows_of(self, batch: fx.Node, layer: Layer, like: fx.Node) -> fx.Node:
        if (shared := _shared_matrix(batch)) is not None:
            one = tensor(shared).ndim == 2
            matrix = shared if one else self.of(shared, like, aten.squeeze.dim, 0)
            times = self._times(layer.experts, batch, like)
            return self.of(self.tokens(matrix, like), like, aten.index.Tensor, [times])
        if not _lie_one_below_the_other(tensor(batch)):
            batch = self.copy(batch, like)
        val = tensor(batch)
        columns = compat.size_hint(val.shape[2])  # a size of the weights, which does not vary
        shape = layer.experts * val.shape[1], columns
        fake = val.new_empty_strided(shape, val.stride()[1:])
        return self.of(batch, like, aten.view.default, [-1, columns], fake=fake)

    def unstacked(self, rows: fx.Node, batch: fx.Node, layer: Layer, like: fx.Node) -> fx.Node:
        """Rows [E·T, N] as a batch of matrices, of as many rows as those of `batch`."""
        columns = tensor(rows).shape[1]
        fake = tensor(rows).new_empty((layer.experts, tensor(batch).shape[1], columns))
        shape = [layer.experts, -1, columns]
        return self.of(rows, like, aten.view.default, shape, fake=fake)

    def swapped(self, batch: fx.Node, like: fx.Node) -> fx.Node:
        """The transposes of a batch of matrices."""
        base, flipped = graph.skip_batched_transposes(batch)
        return base if flipped else self.of(base, like, aten.permute.default, [0, 2, 1])

    def offsets(self, batch: fx.Node, layer: Layer, like: fx.Node) -> fx.Node:
        """Where the matrices of a batch end if they are one below the other, int32 [E].

        How many they are the layer knows: a batch of tokens may have a size that varies.
        """
        key = layer.experts, str(tensor(batch).shape[1])
        if key not in self._offsets:
            each = self._size(batch, like)
            self._offsets[key] = self._steps(layer.experts, each, each, like)
        return self._offsets[key]

    def _times(self, experts: int, batch: fx.Node, like: fx.Node) -> fx.Node:
        """The numbers of the rows of each of a batch of equal matrices, int32 [E·T]."""
        numbers = self._steps(self._size(batch, like), 0, 1, like)
        return emit_operand(aten.repeat.default, numbers, [experts], like=like)

    def _size(self, batch: fx.Node, like: fx.Node) -> Any:
        """How many rows each matrix of a batch has."""
        rows = tensor(batch).shape[1]
        if isinstance(rows, int):
            return rows
        return emit_operand(aten.sym_size.int, batch, 1, like=like)

    def _steps(self, count: Any, start: Any, step: Any, like: fx.Node) -> fx.Node:
        device = tensor(like).device
        options = {"dtype": torch.int32, "device": device, "requires_grad": False}
        with compat.fake_mode_of(tensor(like)):
            return emit_operand(
                prims.iota.default, count, start=start, step=step, **options, like=like
            )

    def forget_rows(self) -> None:
        """Remove reshapes that nothing uses in the end."""
        for node in self._rows.values():
            if not node.users:
                node.graph.erase_node(node)

    def copy(self, x: fx.Node, like: fx.Node) -> fx.Node:
        return self.of(x, like, aten.clone.default, memory_format=torch.contiguous_format)

    def of(self, x: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """What an operator makes of `x`, in the half of `x`."""
        node = emit_operand(target, x, *args, like=like, **kwargs)
        if x in self.backward:
            self.backward.add(node)
        return node


def _lie_one_below_the_other(batch: torch.Tensor) -> bool:
    """Whether matrices [E, T, K] are rows in memory, and those of one follow those of another."""
    known, (matrix, row, element) = compat.statically_known_true, batch.stride()
    return known(matrix == batch.shape[1] * row) and known(element == 1)


def _shared_matrix(batch: fx.Node) -> fx.Node | None:
    """The matrix that all of a batch are, expanded or repeated; None if they are not one."""
    made, sizes = graph.skip_reshapes(batch), tensor(batch).shape[1:]
    if made.target not in (aten.expand.default, aten.repeat.default):
        return None
    if made.target is aten.repeat.default and made.args[1][-1] != 1:  # type: ignore[index]
        return None
    x: fx.Node = made.args[0]  # type: ignore[assignment]
    shape = tensor(x).shape
    if len(shape) not in (2, 3) or [*map(str, shape[-2:])] != [*map(str, sizes)]:
        return None
    is_one = len(shape) == 2 or (isinstance(shape[0], int) and shape[0] == 1)
    return x if is_one else None


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
    return not graph.skip_transposes(x)[1] and graph.nbytes(node) >= graph.nbytes(x)


def _identity(x: fx.Node) -> tuple[fx.Node, str]:
    """What says that two matrices are one."""
    return graph.skip_reshapes(x), graph.shape_text(tensor(x))


def rewrite(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> None:
    """Replace one GEMM of `layer` by its FP8 form."""
    is_wgrad = (
        tensor(gemm).ndim == 3 if gemm.target in GROUPED_GEMMS else gemm.meta[ROLE] == "wgrad"
    )
    with gemm.graph.inserting_before(gemm):
        if is_wgrad:
            result = _outer(gemm, layer, quantizer)
        elif gemm.target in GROUPED_GEMMS:
            result = _product(gemm, layer, quantizer, *grouped_operands_of(gemm))
            take_place(result, gemm)
        else:
            result = _batch_of_products(gemm, layer, quantizer)
    gemm.replace_all_uses_with(result)
    gemm.graph.erase_node(gemm)


def _product(
    gemm: fx.Node,
    layer: Layer,
    quantizer: ExpertQuantizer,
    x: fx.Node,
    weights: fx.Node,
    offsets: fx.Node,
) -> fx.Node:
    """Forward or dgrad: tokens times the weights [E, K, N] of their experts."""
    left = quantizer.by_row(quantizer.tokens(x, gemm), layer, gemm)
    right = quantizer.by_row(quantizer.matrices(weights, gemm), layer, gemm)
    operands = *left, *right, offsets
    return _multiplied(gemm, layer, quantizer, fp8.scaled_grouped_mm.default, *operands)


def _batch_of_products(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> fx.Node:
    """The same for a batch of matrices, of which each has the tokens of an expert.

    Weights in front have tokens that are columns, which is undone unless it only would be again.
    """
    tokens, weights = gemm_operands(gemm)
    in_front = weights_of(gemm, layer) is tokens
    if in_front:
        tokens, weights = (quantizer.swapped(x, gemm) for x in (weights, tokens))
    rows, offsets = (of(tokens, layer, gemm) for of in (quantizer.rows, quantizer.offsets))
    product = _product(gemm, layer, quantizer, rows, weights, offsets)
    result = quantizer.unstacked(product, tokens, layer, gemm)
    is_biased = gemm.target is aten.baddbmm.default
    if in_front:
        product.meta[IS_TRANSPOSED] = True
        result = quantizer.of(result, gemm, aten.permute.default, [0, 2, 1])
        if is_biased or not all(map(graph.is_batched_transpose, gemm.users)):
            result = quantizer.copy(result, gemm)
    if is_biased:
        result = emit(gemm.graph, aten.add.Tensor, result, gemm.args[0], like=gemm)
    take_place(result if is_biased else product, gemm)
    return result


def _outer(gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer) -> fx.Node:
    """Wgrad: a product of each expert's tokens and gradients."""
    if gemm.target in GROUPED_GEMMS:
        left, right, offsets = grouped_operands_of(gemm)
        rows, flipped = graph.skip_transposes(left)
        if not flipped:
            rows = emit_operand(aten.permute.default, left, [1, 0], like=gemm)
        both = rows, quantizer.tokens(right, gemm)
    else:
        left, right = gemm_operands(gemm)
        factors = quantizer.swapped(left, gemm), right
        rows, other = (quantizer.rows(x, layer, gemm) for x in factors)
        both = rows, other
        offsets = quantizer.offsets(right, layer, gemm)
    (a, a_scale), (b, b_scale) = (quantizer.segments(x, offsets, gemm) for x in both)
    operands = a, a_scale, b, b_scale, quantizer.ends(offsets, gemm)
    product = _multiplied(gemm, layer, quantizer, fp8.scaled_grouped_outer.default, *operands)
    take_place(product, gemm)
    return product


def _multiplied(
    gemm: fx.Node, layer: Layer, quantizer: ExpertQuantizer, target: Any, *operands: fx.Node
) -> fx.Node:
    options = tensor(gemm).dtype, accumulates_fast(gemm, layer, quantizer.config)
    product = emit(gemm.graph, target, *operands, *options, like=gemm)
    product.meta[ROLE] = gemm.meta[ROLE]
    if gemm in quantizer.backward:
        quantizer.backward.add(product)
    return product
