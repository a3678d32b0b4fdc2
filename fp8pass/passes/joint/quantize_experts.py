"""Run experts in FP8: `_grouped_mm` or `bmm` of a parameter -> quantize + scaled_grouped_mm.

Tokens are sorted by expert. `offsets` contains the end of each expert group. For
`y[e] = x[e] W[e]ᵀ` the joint graph holds three grouped GEMMs:

    before   y  = grouped_mm(x, Wᵀ, offsets)
             dx = grouped_mm(dY, W, offsets)
             dW = grouped_mm(t(dY), x, offsets)
    after    y  = scaled_grouped_mm(q(x), q(W), offsets)
             dx = scaled_grouped_mm(q(dY), q(Wᵀ), offsets)
             dW = scaled_grouped_outer(qᵀ(dY), qᵀ(x), padded_ends(offsets))

             q(·) = quantize(·, scale)     qᵀ(·) = transpose_segments(·, scale, offsets)

PyTorch's grouped FP8 GEMM takes a scale for each row of both operands. So each token has a scale,
and a weight has a scale for each index of the dimension that the GEMM does not contract. Forward
and dgrad contract different dimensions of a weight. Therefore each weight is quantized twice, the
second time transposed. Wgrad contracts the tokens of each group, so its scales may vary only
between expert groups. A group's scale is computed from the largest amax of its tokens, without
another pass over the tensor. Tensor cores need multiples of 16 tokens, but the router decides the
sizes of groups, so `transpose_segments` pads each group with zeros. The padding is computed on the
device of the offsets, so that the CPU does not wait for the GPU.

If the tokens are gathered from the rows of another matrix, the pass quantizes that matrix and
gathers its FP8 data, which has half the bytes. Matrices that are larger than the gathered tokens
are excluded. For wgrad, `transpose_segments` gathers the rows.

`bmm` and `baddbmm`, where all experts have the same number of tokens, become the same operators:

    before   y  = bmm(x, W)                     x [E, T, K], W [E, K, N]
             dx = bmm(dY, Wᵀ)
             dW = bmm(xᵀ, dY)
    after    y  = view(scaled_grouped_mm(q(rows), q(Wᵀ), offsets), [E, T, N])
             ...                                rows = view(x, [E·T, K]), offsets = T, 2·T, ..., E·T

`rows` is a copy if the matrices of `x` are not stacked in memory, for example if `x` is a view of
[T, E, K] or [E, K, T]. Tokens that go to all experts are quantized once, and their FP8 data is
repeated.

Recipe `exact` does not change these GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import BY_ROW, ROW, Quantization
from fp8pass.graph.classify import BATCHED_GEMMS, GROUPED_GEMMS
from fp8pass.graph.collectives import find_exchanges, receives_tokens
from fp8pass.graph.linear_layers import Layer, Reason, find_layers, gemm_operands
from fp8pass.graph.nodes import aten, emit, prims, tensor
from fp8pass.graph.tags import IS_TRANSPOSED, ROLE
from fp8pass.graph.traffic import count_elements, is_computed
from fp8pass.passes.context import Context
from fp8pass.passes.gemm_choice import Cast, Casts
from fp8pass.passes.quantizer import (
    EXACT_FORMATS,
    Quantizer,
    accumulates_fast,
    count_layers_before,
    describe_layer,
    identity_of,
    replace_gemm,
    why_not_at_all,
)

fp8 = torch.ops.fp8pass
T = TypeVar("T")

# The most experts that PyTorch's grouped FP8 GEMM accepts.
MOST_EXPERTS = 1023


def quantize_experts(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite the GEMMs of experts, and insert the experts in the plan's list of linear layers."""
    has_experts = any(n.target in GROUPED_GEMMS | BATCHED_GEMMS for n in gm.graph.nodes)
    if ctx.config.simulate is not None or not has_experts:
        return
    g, config, places = gm.graph, ctx.config, count_layers_before(gm.graph)
    layers = (layer for layer in find_layers(g, ctx.facts) if layer.experts)
    received = {exchange.wait for exchange in find_exchanges(g)}
    reasons = [(layer, why_not(layer, config, received)) for layer in layers]
    rewriter = ExpertRewriter(g, config, received)
    choice = rewriter.choose(reasons, ctx)
    for before, (layer, reason) in enumerate(reasons):
        entry = describe_layer(layer, reason, config, choice)
        ctx.plan.linears.insert(places[layer.forward] + before, entry)
    rewriter.rewrite_chosen(reasons, choice)
    rewriter.remove_unused_rows()


def why_not(layer: Layer, config: Config, received: Set[fx.Node]) -> Reason:
    """Return why experts cannot or should not run in FP8; an empty reason if they run in FP8.

    If ranks exchange the tokens, experts run in FP8 even on a rank that receives no tokens, because
    all ranks must send the same dtype.
    """
    if (reason := why_not_at_all(layer, config)).text:
        return reason
    if not config.quantizes_linears:
        return EXACT_FORMATS
    if (config.forward_format, config.gradient_format) != (E4M3.name, E4M3.name):
        return Reason("PyTorch's FP8 GEMMs of experts take only e4m3")
    gemm = layer.forward
    if gemm.target in BATCHED_GEMMS:
        weights = _weights_of(gemm, layer)
        if gemm.kwargs:
            return Reason(
                f"{gemm.target} with alpha or beta: only plain sums and products run in FP8"
            )
    else:
        tokens, weights, _ = _grouped_operands_of(gemm)
        if (tensor(tokens).ndim, tensor(weights).ndim) != (2, 3):
            return Reason(f"{gemm.target}: only 2-D tokens times 3-D weights run in FP8")
    sizes = tensor(weights).shape
    if not all(isinstance(n, int) and n % CONTRACTION_MULTIPLE == 0 for n in sizes[1:]):
        shape = "×".join(map(str, sizes))
        return Reason(f"weights {shape}: both sizes of each matrix must be multiples of 16")
    if not isinstance(sizes[0], int):
        return Reason("the number of experts is dynamic")
    if sizes[0] > MOST_EXPERTS:
        return Reason(f"{sizes[0]} experts: PyTorch's FP8 GEMMs take at most {MOST_EXPERTS}")
    if 0 in sizes:
        return Reason("empty weight", routine=True)
    is_empty = any(compat.statically_known_true(size == 0) for size in layer.rows)
    if is_empty and not _exchanges(layer, received):
        return Reason("empty input", routine=True)
    if lacking := hardware.why_no_grouped_gemm(tensor(gemm).device):
        return Reason(lacking)
    return Reason()


def _exchanges(layer: Layer, received: Set[fx.Node]) -> bool:
    """Whether ranks exchange the tokens of a layer, or the gradients of its results."""
    operands = (x for _, gemm in layer.gemms() for x in gemm_operands(gemm))
    return any(receives_tokens(graph.skip_transposes(x)[0], received) for x in operands)


def _weights_of(gemm: fx.Node, layer: Layer) -> fx.Node:
    """Return the operand of a batched forward or dgrad GEMM that contains the weights."""
    a, b = gemm_operands(gemm)
    return a if graph.skip_views_and_casts(a) is layer.weight else b


def _is_wgrad(gemm: fx.Node) -> bool:
    is_grouped = gemm.target in GROUPED_GEMMS
    return tensor(gemm).ndim == 3 if is_grouped else gemm.meta[ROLE] == "wgrad"


def _grouped_operands_of(gemm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    given = dict(zip(("self", "mat2", "offs"), gemm.args, strict=False)) | gemm.kwargs
    return given["self"], given["mat2"], given["offs"]  # type: ignore[return-value]


class Gather(NamedTuple):
    """The operands of `matrix[rows]`."""

    matrix: fx.Node
    rows: fx.Node


class ExpertRewriter(Quantizer):
    """Replaces the GEMMs of experts by FP8 GEMMs, which share quantized tokens and weights."""

    def __init__(self, g: fx.Graph, config: Config, received: Set[fx.Node]) -> None:
        super().__init__(g, config)
        self.received = received
        self._emitted: dict[tuple[object, ...], Any] = {}

    def casts_of(self, gemm: fx.Node, layer: Layer) -> Casts:
        """Return the casts that a GEMM needs in FP8.

        A separate kernel transposes each operand of wgrad, and a separate kernel quantizes each
        orientation of a weight. The kernel that computes tokens also quantizes their rows, before
        the tokens are gathered.
        """
        casts: dict[Hashable, Cast] = {}
        for x in gemm_operands(gemm):
            base = graph.skip_batched_transposes(graph.skip_transposes(x)[0])[0]
            count, identity = count_elements(x), identity_of(base)
            size = count * tensor(x).element_size()
            if graph.skip_views_and_casts(x) is layer.weight:
                casts[identity, gemm.meta[ROLE]] = Cast(count + size, 1)
                continue
            casts[identity, "amax"] = Cast(0) if is_computed(base) else Cast(size, 1)
            if _is_wgrad(gemm):
                casts[identity, "group"] = Cast(count + size, 1)
            elif not self._find_gather(base):  # gathering FP8 data saves more than the cast costs
                casts[identity, "row"] = Cast(count)
        return casts

    def rewrite(self, gemm: fx.Node, layer: Layer) -> None:
        self.gemm, self.layer = gemm, layer
        with gemm.graph.inserting_before(gemm):
            if _is_wgrad(gemm):
                product = result = self._multiply_wgrad()
            elif gemm.target in GROUPED_GEMMS:
                product = result = self._multiply_groups(*_grouped_operands_of(gemm))
            else:
                product, result = self._multiply_batch()
        replace_gemm(gemm, product, result)

    def _multiply_groups(self, x: fx.Node, weights: fx.Node, offsets: fx.Node) -> fx.Node:
        """Emit a forward or dgrad GEMM: tokens times the weights [E, K, N] of their experts."""
        left = self._quantize_by_row(self._make_row_major(x))
        right = self._quantize_by_row(self._stack_weights(weights))
        return self._multiply(fp8.scaled_grouped_mm.default, *left, *right, offsets)

    def _multiply_batch(self) -> tuple[fx.Node, fx.Node]:
        """Emit a batched forward or dgrad GEMM; return the GEMM, and its result in `gemm`'s shape.

        If the weights are the first factor, the tokens are columns. They are then transposed to
        rows, and the result is transposed back. The result is copied to row-major memory, unless
        all its users only transpose it again.
        """
        gemm = self.gemm
        tokens, weights = gemm_operands(gemm)
        is_turned = _weights_of(gemm, self.layer) is tokens
        if is_turned:
            tokens, weights = map(self._transpose_matrices, (weights, tokens))
        rows, offsets = self._stack_rows(tokens), self._offsets_of(tokens)
        product = self._multiply_groups(rows, weights, offsets)
        result = self._unstack_rows(product, tokens)
        is_biased = gemm.target is aten.baddbmm.default
        if is_turned:
            product.meta[IS_TRANSPOSED] = True
            result = self.derive(result, aten.permute.default, [0, 2, 1])
            if is_biased or not all(map(graph.is_batched_transpose, gemm.users)):
                result = self._copy(result)
        if not is_biased:
            return product, result
        total = emit(gemm.graph, aten.add.Tensor, result, gemm.args[0], like=gemm)
        return total, total

    def _multiply_wgrad(self) -> fx.Node:
        """Emit the product of tokens and gradients for each expert."""
        if self.gemm.target in GROUPED_GEMMS:
            left, right, offsets = _grouped_operands_of(self.gemm)
            rows, is_flipped = graph.skip_transposes(left)
            if not is_flipped:
                rows = self.emit(aten.permute.default, left, [1, 0])
            other = self._make_row_major(right)
        else:
            left, right = gemm_operands(self.gemm)
            rows, other = self._stack_rows(self._transpose_matrices(left)), self._stack_rows(right)
            offsets = self._offsets_of(right)
        a, b = self._quantize_by_group(rows, offsets), self._quantize_by_group(other, offsets)
        ends = self._once(("ends", offsets), lambda: self.emit(fp8.padded_ends.default, offsets))
        return self._multiply(fp8.scaled_grouped_outer.default, *a, *b, ends)

    def _multiply(self, target: Any, *operands: fx.Node) -> fx.Node:
        gemm = self.gemm
        options = tensor(gemm).dtype, accumulates_fast(gemm, self.layer, self.config)
        product = emit(gemm.graph, target, *operands, *options, like=gemm)
        product.meta[ROLE] = gemm.meta[ROLE]
        if gemm in self.backward:
            self.backward.add(product)
        return product

    # Operands

    def _quantize_by_row(self, matrix: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return data and row scales of a matrix that is contracted over its last dimension."""
        gather, by_row = self._find_gather(matrix), Quantization(E4M3, ROW)
        if gather is None:
            return self.quantize(matrix, by_row, contract_rows=False)

        def quantize_gathered() -> tuple[fx.Node, fx.Node]:
            data, _ = self.quantize(gather.matrix, by_row, contract_rows=False)
            scale = self.emit(fp8.scale.default, self._amax_rows(matrix), BY_ROW)
            data = self.emit(fp8.as_bytes.default, data)
            data = self.emit(aten.index.Tensor, data, [gather.rows])
            return self.emit(fp8.as_codes.default, data, E4M3.name), scale

        return self._once(("gathered", matrix), quantize_gathered)

    def _quantize_by_group(self, x: fx.Node, offsets: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return FP8 data [K, T'] of tokens [T, K] with padded groups, and one scale per group."""

        def quantize_groups() -> tuple[fx.Node, fx.Node]:
            amax = self.emit(fp8.segment_amax.default, self._amax_rows(x), offsets)
            scale = self.emit(fp8.scale.default, amax, BY_ROW)
            operands: tuple[Any, ...] = x, scale, offsets, E4M3.name
            if gather := self._find_gather(x):  # the kernel gathers the rows
                operands = gather.matrix, scale, offsets, E4M3.name, gather.rows
            return self.emit(fp8.transpose_segments.default, *operands), scale

        return self._once(("group", x, offsets), quantize_groups)

    def _amax_rows(self, tokens: fx.Node) -> fx.Node:
        """Return the amax of each token. For gathered tokens, gather the amaxes of source rows."""
        gather = self._find_gather(tokens)
        if gather is None:
            return self.amax(tokens, ROW)

        def gather_amaxes() -> fx.Node:
            return self.emit(aten.index.Tensor, self.amax(gather.matrix, ROW), [gather.rows])

        return self._once(("amaxes", tokens), gather_amaxes)

    def _find_gather(self, tokens: fx.Node) -> Gather | None:
        """Return the gather of rows that computes `tokens`, if any.

        The gathered matrix must not be larger than `tokens`. A matrix received from other ranks may
        have any size, because ranks with different sizes must decide equally.
        """
        if not graph.is_call(tokens, aten.index.Tensor):
            return None
        arguments: Any = tokens.args
        x, indices = arguments
        rows = indices[0]
        if len(indices) > 1 or tensor(x).ndim != 2 or tensor(rows).ndim != 1:
            return None
        if graph.skip_transposes(x)[1]:
            return None
        is_small = receives_tokens(x, self.received) or graph.nbytes(tokens) >= graph.nbytes(x)
        return Gather(x, rows) if is_small else None

    def _make_row_major(self, x: fx.Node) -> fx.Node:
        return self._copy(x) if graph.skip_transposes(x)[1] else x

    def _stack_weights(self, weights: fx.Node) -> fx.Node:
        """Return the transposes of weights [E, K, N], stacked to [E·N, K]."""
        base, is_flipped = graph.skip_batched_transposes(weights)

        def stack() -> fx.Node:
            experts, inward, outward = tensor(weights).shape
            x = base if is_flipped else self.emit(aten.permute.default, base, [0, 2, 1])
            x = x if tensor(x).is_contiguous() else self._copy(x)
            return self.emit(aten.view.default, x, [experts * outward, inward])

        return self._once(("weights", base, is_flipped), stack)

    def _stack_rows(self, batch: fx.Node) -> fx.Node:
        """Return the matrices of a batch [E, T, K], stacked to [E·T, K]."""
        base, is_flipped = graph.skip_batched_transposes(batch)
        key = "rows", graph.skip_reshapes(base), is_flipped, graph.shape_text(tensor(batch))
        return self._once(key, lambda: self._emit_rows(batch))

    def _emit_rows(self, batch: fx.Node) -> fx.Node:
        experts = self.layer.experts
        if (shared := _shared_matrix(batch)) is not None:
            is_matrix = tensor(shared).ndim == 2
            matrix = shared if is_matrix else self.derive(shared, aten.squeeze.dim, 0)
            numbers = self._count_up(self._rows_per_matrix(batch), 0, 1)
            repeated = self.emit(aten.repeat.default, numbers, [experts])
            return self.derive(self._make_row_major(matrix), aten.index.Tensor, [repeated])
        if not _is_stacked(tensor(batch)):
            batch = self._copy(batch)
        val = tensor(batch)
        columns = compat.size_hint(val.shape[2])  # the size of a weight, and so static
        # PyTorch would add guards on symbolic sizes to compute the fake value of this view.
        fake = val.new_empty_strided((experts * val.shape[1], columns), val.stride()[1:])
        return self.derive(batch, aten.view.default, [-1, columns], fake=fake)

    def _unstack_rows(self, rows: fx.Node, batch: fx.Node) -> fx.Node:
        """Reshape rows [E·T, N] to [E, T, N], with T from `batch`."""
        experts, columns = self.layer.experts, tensor(rows).shape[1]
        fake = tensor(rows).new_empty((experts, tensor(batch).shape[1], columns))
        return self.derive(rows, aten.view.default, [experts, -1, columns], fake=fake)

    def _transpose_matrices(self, batch: fx.Node) -> fx.Node:
        base, is_flipped = graph.skip_batched_transposes(batch)
        return base if is_flipped else self.derive(base, aten.permute.default, [0, 2, 1])

    def _offsets_of(self, batch: fx.Node) -> fx.Node:
        """Return the end of each matrix in the stacked rows of a batch: row indices, int32 [E].

        E comes from the layer, since the batch dimension of tokens may be symbolic.
        """
        experts = self.layer.experts

        def count() -> fx.Node:
            rows = self._rows_per_matrix(batch)
            return self._count_up(experts, rows, rows)

        return self._once(("offsets", experts, str(tensor(batch).shape[1])), count)

    def _rows_per_matrix(self, batch: fx.Node) -> Any:
        rows = tensor(batch).shape[1]
        return rows if isinstance(rows, int) else self.emit(aten.sym_size.int, batch, 1)

    def _count_up(self, count: Any, start: Any, step: Any) -> fx.Node:
        val = tensor(self.gemm)
        options = {"dtype": torch.int32, "device": val.device, "requires_grad": False}
        with compat.fake_mode_of(val):
            return self.emit(prims.iota.default, count, start=start, step=step, **options)

    def _copy(self, x: fx.Node) -> fx.Node:
        return self.derive(x, aten.clone.default, memory_format=torch.contiguous_format)

    def _once(self, key: tuple[object, ...], emit_value: Callable[[], T]) -> T:
        """Emit a value for the first GEMM that needs it, and return it for every GEMM."""
        if key not in self._emitted:
            self._emitted[key] = emit_value()
        found: T = self._emitted[key]
        return found

    def remove_unused_rows(self) -> None:
        """Remove stacked rows without users: their GEMM reads an equal matrix, quantized before."""
        for (kind, *_), node in self._emitted.items():
            if kind == "rows" and not node.users:
                node.graph.erase_node(node)


def _is_stacked(batch: torch.Tensor) -> bool:
    """Whether matrices [E, T, K] are row-major and follow one another in memory."""
    known, (matrix, row, element) = compat.statically_known_true, batch.stride()
    return known(matrix == batch.shape[1] * row) and known(element == 1)


def _shared_matrix(batch: fx.Node) -> fx.Node | None:
    """Return the matrix that a batch repeats for every expert; None if its matrices may differ."""
    repeat, sizes = graph.skip_reshapes(batch), tensor(batch).shape[1:]
    if repeat.target not in (aten.expand.default, aten.repeat.default):
        return None
    if repeat.target is aten.repeat.default and repeat.args[1][-1] != 1:  # type: ignore[index]
        return None
    x: fx.Node = repeat.args[0]  # type: ignore[assignment]
    shape = tensor(x).shape
    if len(shape) not in (2, 3) or [*map(str, shape[-2:])] != [*map(str, sizes)]:
        return None
    is_one = len(shape) == 2 or (isinstance(shape[0], int) and shape[0] == 1)
    return x if is_one else None
