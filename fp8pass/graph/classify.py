"""Classify operators into kinds, with a table of operators for each kind."""

from __future__ import annotations

import operator
from collections.abc import Set
from enum import Enum
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.nodes import aten, prims
from fp8pass.graph.pointwise import POINTWISE


class Kind(Enum):
    INPUT = "input"
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    MOVEMENT = "movement"  # copies elements: gather, cat, pad
    CREATION = "creation"  # reads no tensor
    SYMBOL = "symbol"  # a symbolic number, not a tensor
    QUANTIZE = "quantize"
    GEMM = "gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    RANDOM = "random"
    COLLECTIVE = "collective"
    OTHER = "other"


# Views that drop some of their operand's elements, or split the operand into parts.
PARTIAL_VIEWS = {
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.as_strided.default, aten.diagonal.default,
    aten.unfold.default,
}  # fmt: skip

# `OpOverload.is_view` cannot replace this table: it includes `view.dtype` and views of complex
# numbers.
VIEWS = {
    *graph.RESHAPES, *PARTIAL_VIEWS, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.expand.default, aten._conj.default, aten.lift_fresh.default,
    prims.broadcast_in_dim.default,
}  # fmt: skip

# GEMMs that multiply each group of rows by a different matrix.
GROUPED_GEMMS = {aten._grouped_mm.default, aten._scaled_grouped_mm.default}

BATCHED_GEMMS = {aten.bmm.default, aten.baddbmm.default}

GEMM_OPERATORS = {
    aten.mm.default, aten.addmm.default, aten.mv.default, aten.addmv.default, aten.dot.default,
    aten.linear.default, aten.matmul.default, aten._scaled_mm.default,
    *GROUPED_GEMMS, *BATCHED_GEMMS,
    *(op for op, dialect in OPERATORS.items() if dialect.multiplies),
}  # fmt: skip

FLEX_ATTENTION = set(compat.FLEX_ATTENTION)

QUANTIZERS = {op for op, dialect in OPERATORS.items() if not dialect.multiplies}

AMAX_OPERATORS = {op for op, dialect in OPERATORS.items() if dialect.reduces}

REDUCTIONS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.var.correction,
    aten.var_mean.correction, aten.std.correction, aten.amax.default, aten.amin.default,
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.any.default, aten.any.dim,
    aten.all.default, aten.logsumexp.default, aten._softmax.default, aten._log_softmax.default,
    aten.native_layer_norm.default, aten.native_group_norm.default, aten._fused_rms_norm.default,
    aten.linalg_vector_norm.default, prims.prepare_softmax_online.default,
}  # fmt: skip

MOVEMENTS = {
    aten.cat.default, aten.stack.default, aten.embedding.default, aten.index.Tensor,
    aten.index_select.default, aten.gather.default, aten.constant_pad_nd.default,
    aten.slice_scatter.default, aten.select_scatter.default, aten.flip.default, prims.rev.default,
    aten.roll.default, aten.repeat.default, aten.tril.default, aten.triu.default,
}  # fmt: skip

CREATIONS = {
    aten.full.default, aten.full_like.default, aten.zeros.default, aten.zeros_like.default,
    aten.ones.default, aten.ones_like.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    prims.iota.default,
}  # fmt: skip


def kind(node: fx.Node) -> Kind:
    """Return the kind of a node's operator. A getitem has the kind of the operator it reads."""
    if compat.is_sym_node(node):
        return Kind.SYMBOL
    if node.op in ("placeholder", "get_attr"):
        return Kind.INPUT
    target = node.target
    if target is operator.getitem:
        return kind(node.args[0])  # type: ignore[arg-type]
    for operators, kind_ in _KINDS:
        if target in operators:
            return kind_
    if not compat.is_operator(target):
        return Kind.OTHER
    schema = compat.schema_of(target)
    if target.namespace == "_c10d_functional":
        return Kind.COLLECTIVE
    # PyTorch tags attention as random, but attention draws random numbers only for dropout.
    has_zero_dropout = argument_of(node, "dropout_p", missing=1.0) in (None, 0.0)
    if torch.Tag.nondeterministic_seeded in target.tags and not has_zero_dropout:
        return Kind.RANDOM
    if "attention" in schema.name:
        return Kind.ATTENTION
    if "convolution" in schema.name:
        return Kind.CONVOLUTION
    if torch.Tag.pointwise in target.tags and not schema.is_mutable:
        return Kind.POINTWISE
    return Kind.OTHER


_KINDS: tuple[tuple[Set[Any], Kind], ...] = (
    (VIEWS, Kind.VIEW),
    (GEMM_OPERATORS, Kind.GEMM),
    (FLEX_ATTENTION, Kind.ATTENTION),
    (QUANTIZERS, Kind.QUANTIZE),
    (REDUCTIONS, Kind.REDUCTION),
    (MOVEMENTS, Kind.MOVEMENT),
    (CREATIONS, Kind.CREATION),
    (POINTWISE.keys(), Kind.POINTWISE),  # `kind` also checks for `torch.Tag.pointwise`
)


def is_attention_mask(node: fx.Node) -> bool:
    """Whether `node` is the bias that a CUDA attention kernel adds to its scores."""
    attention = (
        u for u in node.users if kind(u) is Kind.ATTENTION and compat.is_operator(u.target)
    )
    return any(argument_of(u, "attn_bias") is node for u in attention)


def attention_output(backward: fx.Node) -> fx.Node | None:
    """Return the output [batch, heads, tokens, head dim] that an attention backward reads.

    Return None for variable-length attention, because its output has another layout.
    """
    if kind(backward) is not Kind.ATTENTION or not compat.is_operator(backward.target):
        return None
    has_layout = "scaled_dot_product" in compat.schema_of(backward.target).name
    return argument_of(backward, "out") if has_layout else None


def argument_of(node: fx.Node, name: str, missing: Any = None) -> Any:
    """Return the argument `name` of a call, or None if the call omits the argument.

    Return `missing` if the operator's schema has no such argument.
    """
    for position, argument in enumerate(compat.schema_of(node.target).arguments):
        if argument.name == name:
            positional = node.args[position] if position < len(node.args) else None
            return node.kwargs.get(name, positional)
    return missing
