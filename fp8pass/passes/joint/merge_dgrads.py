"""Compute, in one GEMM, the gradient of an input that several linear layers share.

    before   dq = scaled_mm(q(dQ), s₁, qᵀ(Wq, t₁), t₁)
             dk = scaled_mm(q(dK), s₂, qᵀ(Wk, t₂), t₂)
             dx = add(dq, dk)
    after    c  = max(s₁·t₁, s₂·t₂)
             dx = scaled_mm(joined(q(dQ), q(dK)), c, joined(qᵀ(Wq, c/s₁), qᵀ(Wk, c/s₂)), 1)

The merged GEMM adds the terms in FP32, and has one scale `c`. Weights are requantized rather than
gradients, because gradients have a wide range. The error of requantization is small relative to the
largest entries. Operands in blocks keep their data and scales, because their scales may vary along
the contraction.

The pass runs after `materialize_plan`, because `diagnose` needs a separate dgrad for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.dialect.quantization import TENSOR, Quantization, parse
from fp8pass.graph import sums
from fp8pass.graph.collectives import WAIT_TENSOR
from fp8pass.graph.flops import is_fp8_gemm
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.sums import have_equal_shape_and_dtype, only_user
from fp8pass.graph.tags import OPERAND_OF, ROLE
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# The longest contraction of a merged GEMM. On an H200, two GEMMs take 6% longer than a merged GEMM
# of length 16384, and 12% less than a merged GEMM of length 22016
# (`benchmarks/results/merged.json`).
LONGEST_CONTRACTION = 16384


@dataclass(frozen=True)
class Term:
    """A GEMM and the term of a sum that it computes."""

    gemm: fx.Node
    place: sums.Term  # the term's place in the sum

    @property
    def quantizations(self) -> tuple[Quantization, Quantization]:
        """The quantizations of the gradient and of the weight."""
        a, b = (parse(str(text)) for text in self.gemm.args[7:])
        return a, b

    @property
    def is_in_blocks(self) -> bool:
        return all(how.scales == "fp32" and how.is_in_groups for how in self.quantizations)

    @property
    def length(self) -> int:
        return int(tensor(self.gemm.args[0]).shape[-1])  # type: ignore[arg-type]

    @property
    def operand(self) -> fx.Node:
        return self.gemm.args[2]  # type: ignore[return-value]

    @property
    def is_transposed(self) -> bool:
        return graph.is_call(self.operand, fp8.transpose.default)

    @property
    def weight(self) -> fx.Node:
        return self.operand.args[0] if self.is_transposed else self.operand  # type: ignore


def merge_dgrads(gm: fx.GraphModule, ctx: Context) -> None:
    """Merge FP8 dgrad GEMMs whose results are only added, unless their FP8 weights are saved."""
    found: dict[fx.Node, list[Term]] = {}
    for node in gm.graph.nodes:
        term = _find_term(node)
        if term is not None and not {term.weight, term.operand}.intersection(ctx.saved):
            found.setdefault(term.place.total, []).append(term)
    for terms in found.values():
        for group in _group_terms(terms):
            modules = tuple(graph.module_path(term.gemm) for term in group)
            ctx.plan.merged.append(modules)
            fast = False  # GEMMs of block-scaled operands never accumulate fast
            if not group[0].is_in_blocks:
                fast = ctx.config.accumulates_fast("dgrad", sum(term.length for term in group))
                if not fast:
                    ctx.plan.make_dgrads_precise(modules)
            _merge(gm.graph, group, fast_accumulation=fast)
    if ctx.plan.merged:
        gm.graph.eliminate_dead_code()


def _find_term(gemm: fx.Node) -> Term | None:
    """Return an FP8 dgrad GEMM with its place in a sum, or None if it cannot be merged.

    Nothing except the sum may use its result, and nothing except the GEMM may use its weight.

    Gathered weights are excluded, because the scale of a requantized weight depends on the
    gradients of one rank.
    """
    if gemm.target is not fp8.scaled_mm.default or not is_fp8_gemm(gemm):
        return None
    if gemm.meta.get(ROLE) != "dgrad" or gemm.args[4] is not None:
        return None
    place = sums.find_term(gemm)
    if place is None:
        return None
    term = Term(gemm, place)
    if not term.is_in_blocks and any(how.block != TENSOR for how in term.quantizations):
        return None
    if not graph.is_call(term.weight, fp8.quantize.default):
        return None
    if only_user(term.operand) is None or only_user(term.weight) is None:
        return None
    if graph.is_call(graph.skip_views_and_casts(term.weight.args[0]), WAIT_TENSOR):  # type: ignore[arg-type]
        return None
    return term


def _group_terms(terms: Iterable[Term]) -> list[list[Term]]:
    """Group adjacent terms that fit in one GEMM. Terms without a partner drop out."""
    groups: list[list[Term]] = []
    for term in terms:
        if groups and _fits(groups[-1], term):
            groups[-1].append(term)
        else:
            groups.append([term])
    return [group for group in groups if len(group) > 1]


def _fits(group: list[Term], term: Term) -> bool:
    first, other = group[0].gemm, term.gemm
    if any(t.gemm.args[0] is other.args[0] for t in group):
        return False  # `joined` would contain the gradient twice, but a kernel stores it once
    return (
        sum(t.length for t in (*group, term)) <= LONGEST_CONTRACTION
        and have_equal_shape_and_dtype(first, other)
        and first.args[7:] == other.args[7:]
    )


def _merge(g: fx.Graph, terms: list[Term], *, fast_accumulation: bool) -> None:
    """Replace the sum of `terms` by a GEMM."""
    *others, last = terms
    gemm = last.gemm
    with g.inserting_before(gemm):
        add = partial(emit, g, like=gemm)
        operands = (_join_blocks if last.is_in_blocks else _join_requantized)(add, terms)
        options = None, gemm.args[5], fast_accumulation, *gemm.args[7:]
        merged = add(fp8.scaled_mm.default, *operands, *options)
    merged.meta[ROLE] = "dgrad"
    merged.meta[graph.ORIGINAL_OPERATOR] = gemm.meta[graph.ORIGINAL_OPERATOR]
    gemm.replace_all_uses_with(merged)
    for term in others:
        term.place.remove()


def _join_requantized(add: Any, terms: list[Term]) -> tuple[fx.Node, ...]:
    """Return the joined gradients, the scale `c`, the joined requantized weights, and 1."""
    scale = reduce(partial(add, aten.maximum.default), (_multiply_scales(add, t) for t in terms))
    weights = [_requantize_weight(add, t, scale) for t in terms]
    gradients = add(fp8.joined.default, [t.gemm.args[0] for t in terms])
    return gradients, scale, add(fp8.joined.default, weights), add(aten.pow.Tensor_Scalar, scale, 0)


def _join_blocks(add: Any, terms: list[Term]) -> tuple[fx.Node, ...]:
    """Return the joined gradients and weights, each followed by its joined scales."""
    gradients, scales, weights, weight_scales = ([t.gemm.args[i] for t in terms] for i in range(4))
    return (
        add(fp8.joined.default, gradients),
        _join_scales(add, scales),
        add(fp8.joined.default, weights),
        _join_scales(add, weight_scales),
    )


def _join_scales(add: Any, scales: list[Any]) -> fx.Node:
    """Concatenate the columns of scales. GEMMs read columns that are contiguous in memory."""
    columns = [add(aten.permute.default, scale, [1, 0]) for scale in scales]
    return add(aten.permute.default, add(aten.cat.default, columns, 0), [1, 0])


def _multiply_scales(add: Any, term: Term) -> fx.Node:
    """Emit the product of a term's scales. If the gradient is zero, emit 0, to keep `c` small."""
    _, scale, _, weight_scale = term.gemm.args[:4]
    amax = scale.args[0]  # type: ignore[union-attr]
    product = add(aten.mul.Tensor, scale, weight_scale)
    return add(aten.mul.Tensor, product, add(aten.ne.Scalar, amax, 0))


def _requantize_weight(add: Any, term: Term, scale: fx.Node) -> fx.Node:
    _, gradient_scale, _, weight_scale = term.gemm.args[:4]
    wanted = add(aten.div.Tensor, scale, gradient_scale)
    # Rounding, or a gradient of zeros, must not make the weight's scale smaller: a smaller scale
    # would clamp large weights.
    wanted = add(aten.maximum.default, wanted, weight_scale)
    weight = term.weight
    quantized = add(fp8.quantize.default, weight.args[0], wanted, weight.args[2])
    quantized.meta[OPERAND_OF] = weight.meta[OPERAND_OF]
    return add(fp8.transpose.default, quantized) if term.is_transposed else quantized
