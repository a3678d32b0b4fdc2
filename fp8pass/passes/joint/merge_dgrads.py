"""Compute the gradient of an input that several linear layers share by one GEMM.

    before   dq = scaled_mm(q(dQ), s₁, qᵀ(Wq, t₁), t₁)
             dk = scaled_mm(q(dK), s₂, qᵀ(Wk, t₂), t₂)
             dx = add(dq, dk)
    after    c  = max(s₁·t₁, s₂·t₂)
             dx = scaled_mm(joined(q(dQ), q(dK)), c, joined(qᵀ(Wq, c/s₁), qᵀ(Wk, c/s₂)), 1)

The GEMM adds up in fp32; no term of the sum is written to memory and read again. A GEMM has one
product of scales for all of its terms. Gradients, whose range is wide, keep their scales and codes.
Weights get a larger scale where their gradient is small. The error of this is small compared with
the largest entries of the sum, which are as exact as before.

Runs after the plan, so that `diagnose`, which compares layers one by one, sees the graph without
merged GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.quantization import TENSOR, parse
from fp8pass.graph.collectives import WAIT_TENSOR
from fp8pass.graph.flops import is_fp8_gemm
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.patterns import RESHAPES
from fp8pass.graph.tags import OPERAND_OF, ROLE
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# The longest contraction of a merged GEMM. On an H200, two GEMMs take 6% longer than one at 16384,
# and 12% less at 22016 (`benchmarks/results/merged.json`).
LONGEST_CONTRACTION = 16384


@dataclass
class Term:
    """A GEMM whose result is a term of a sum.

    Attributes:
        gemm: the GEMM.
        top: its result, or a view of it, which is added.
        total: the sum of all terms.
    """

    gemm: fx.Node
    top: fx.Node
    total: fx.Node

    @property
    def length(self) -> int:
        """The length of the GEMM's contraction."""
        return int(tensor(self.gemm.args[0]).shape[-1])  # type: ignore[arg-type]

    @property
    def weight(self) -> fx.Node:
        """The quantized weight."""
        codes = self.gemm.args[2]
        return codes.args[0] if _is_transposed(codes) else codes  # type: ignore

    def remove(self) -> None:
        """Take the term out of its sum. At least one other term must remain."""
        (add,) = self.top.users
        add.replace_all_uses_with(next(x for x in add.all_input_nodes if x is not self.top))
        add.graph.erase_node(add)


def merge_dgrads(gm: fx.GraphModule, ctx: Context) -> None:
    """Merge FP8 GEMMs whose results are only added to one another.

    A GEMM stays if the plan saves the codes of its weight in the forward, since merging changes
    them.
    """
    sums: dict[fx.Node, list[Term]] = {}
    for node in gm.graph.nodes:
        term = _term(node)
        if term is not None and not {term.weight, term.gemm.args[2]}.intersection(ctx.saved):
            sums.setdefault(term.total, []).append(term)
    for terms in sums.values():
        for some in _mergeable(terms):
            modules = tuple(graph.module_path(term.gemm) for term in some)
            fast = ctx.config.accumulates_fast("dgrad", sum(term.length for term in some))
            if not fast:
                ctx.plan.accumulate_precisely(modules, "dgrad")
            ctx.plan.merged.append(modules)
            _merge(gm.graph, some, fast_accumulation=fast)
    if ctx.plan.merged:
        gm.graph.eliminate_dead_code()


def _term(gemm: fx.Node) -> Term | None:
    """The term that a GEMM is, None unless it can be merged.

    It must be an FP8 dgrad whose result is only added to something, and the only user of the codes
    of its weight. A gathered weight has codes that all ranks share, while gradients, on which the
    scale of a merged weight depends, are each rank's own.
    """
    if gemm.target is not fp8.scaled_mm.default or not is_fp8_gemm(gemm):
        return None
    if gemm.meta.get(ROLE) != "dgrad" or gemm.args[4] is not None:
        return None
    if any(parse(str(text)).block != TENSOR for text in gemm.args[7:]):
        return None
    top = gemm
    while (user := _only_user(top)) is not None and user.target in RESHAPES:
        top = user
    found = Term(gemm, top, top)
    codes = gemm.args[2]
    if not isinstance(codes, fx.Node) or not graph.is_call(found.weight, fp8.quantize.default):
        return None
    if _only_user(codes) is None or _only_user(found.weight) is None:
        return None
    if graph.is_call(graph.skip_views_and_casts(found.weight.args[0]), WAIT_TENSOR):  # type: ignore[arg-type]
        return None
    while (user := _only_user(found.total)) is not None and _is_sum_of_two(user):
        found.total = user
    return found if found.total is not top else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_transposed(codes: Any) -> bool:
    return graph.is_call(codes, fp8.transpose.default)


def _is_sum_of_two(node: fx.Node) -> bool:
    """Whether a node is the sum of two different tensors of its own shape and dtype."""
    if not graph.is_call(node, aten.add.Tensor) or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    return all(
        graph.value(x) is not None and _same_shape_and_dtype(x, node) for x in node.all_input_nodes
    )


def _same_shape_and_dtype(a: fx.Node, b: fx.Node) -> bool:
    """Whether shapes and dtypes are known to be the same, also where sizes vary."""
    x, y = tensor(a), tensor(b)
    if x.dtype != y.dtype or x.ndim != y.ndim:
        return False
    return all(compat.statically_known_true(m == n) for m, n in zip(x.shape, y.shape, strict=True))


def _mergeable(terms: list[Term]) -> Iterator[list[Term]]:
    """The terms of each merged GEMM: runs of two or more that fit together, in order."""
    group: list[Term] = []
    for term in terms:
        if _fits(group, term):
            group.append(term)
            continue
        if len(group) > 1:
            yield group
        group = [term]
    if len(group) > 1:
        yield group


def _fits(group: list[Term], term: Term) -> bool:
    """Whether a term can be in one GEMM with a group of terms, which may be empty."""
    if not group:
        return True
    first, other = group[0].gemm, term.gemm
    if any(t.gemm.args[0] is other.args[0] for t in group):
        return False  # the same gradient, which kernels store once
    return (
        sum(t.length for t in (*group, term)) <= LONGEST_CONTRACTION
        and _same_shape_and_dtype(first, other)
        and all(tensor(first.args[i]).dtype == tensor(other.args[i]).dtype for i in (0, 2))  # type: ignore[arg-type]
    )


def _merge(g: fx.Graph, terms: list[Term], *, fast_accumulation: bool) -> None:
    """Put one GEMM in the place of the last term, and remove the others."""
    *others, last = terms
    gemm = last.gemm
    with g.inserting_before(gemm):
        add = partial(emit, g, like=gemm)
        scale = reduce(partial(add, aten.maximum.default), (_product(add, t) for t in terms))
        gradients = [t.gemm.args[0] for t in terms]
        weights = [_requantized(add, t, scale) for t in terms]
        merged = add(
            fp8.scaled_mm.default,
            *(add(fp8.joined.default, gradients), scale),
            *(add(fp8.joined.default, weights), add(aten.pow.Tensor_Scalar, scale, 0)),
            *(None, gemm.args[5], fast_accumulation, *gemm.args[7:]),
        )
    merged.meta[ROLE] = "dgrad"
    merged.meta[graph.ORIGINAL_OPERATOR] = gemm.meta[graph.ORIGINAL_OPERATOR]
    gemm.replace_all_uses_with(merged)
    for term in others:
        term.remove()


def _product(add: Any, term: Term) -> fx.Node:
    """The product of a term's scales, 0 if its gradient is zero."""
    _, scale, _, weight_scale = term.gemm.args[:4]
    amax = scale.args[0]  # type: ignore[union-attr]
    product = add(aten.mul.Tensor, scale, weight_scale)
    return add(aten.mul.Tensor, product, add(aten.ne.Scalar, amax, 0))


def _requantized(add: Any, term: Term, scale: fx.Node) -> fx.Node:
    """The codes of a term's weight, so that its product of scales becomes `scale`."""
    _, of_gradient, codes, of_weight = term.gemm.args[:4]
    weight = term.weight
    left = add(aten.div.Tensor, scale, of_gradient)
    # Never smaller than before, neither by rounding nor because the gradient is zero.
    left = add(aten.maximum.default, left, of_weight)
    quantized = add(fp8.quantize.default, weight.args[0], left, weight.args[2])
    quantized.meta[OPERAND_OF] = weight.meta[OPERAND_OF]
    return add(fp8.transpose.default, quantized) if _is_transposed(codes) else quantized
