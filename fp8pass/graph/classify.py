"""The role of every operator for a low-precision compiler, as data.

`kind` is a pure function of a node, so passes may ask about nodes that other passes created.
"""

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
    """The roles that the passes tell apart."""

    INPUT = "input"
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    MOVEMENT = "movement"  # copies elements about: gather, cat, pad
    CREATION = "creation"  # depends on no tensor
    SYMBOL = "symbol"  # a size, not a tensor
    QUANTIZE = "quantize"
    GEMM = "gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    RANDOM = "random"
    COLLECTIVE = "collective"
    OTHER = "other"


# Views of some of the elements.
PARTIAL_VIEWS = {
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.as_strided.default,
    aten.diagonal.default,
    aten.unfold.default,
}

VIEWS = (
    graph.RESHAPES
    | PARTIAL_VIEWS
    | {
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.expand.default,
        aten._conj.default,
        aten.lift_fresh.default,
        prims.broadcast_in_dim.default,
    }
)

# GEMMs over groups of rows, or of what they contract.
GROUPED_GEMMS = {aten._grouped_mm.default, aten._scaled_grouped_mm.default}

# GEMMs over a batch, of matrix by matrix.
BATCHED_GEMMS = {aten.bmm.default, aten.baddbmm.default}

GEMMS = {
    aten.mm.default,
    aten.addmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.linear.default,
    aten.matmul.default,
    aten._scaled_mm.default,
    *GROUPED_GEMMS,
    *BATCHED_GEMMS,
    *(op for op, dialect in OPERATORS.items() if dialect.multiplies),
}

FLEX_ATTENTION = set(compat.FLEX_ATTENTION)

QUANTIZERS = {op for op, dialect in OPERATORS.items() if not dialect.multiplies}

# Those of them that reduce a whole tensor, row or group to one number.
AMAX_OPERATORS = {op for op, dialect in OPERATORS.items() if dialect.reduces}

REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.var.correction,
    aten.var_mean.correction,
    aten.std.correction,
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.any.default,
    aten.any.dim,
    aten.all.default,
    aten.logsumexp.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._fused_rms_norm.default,
    aten.linalg_vector_norm.default,
    prims.prepare_softmax_online.default,
}

MOVEMENTS = {
    aten.cat.default,
    aten.stack.default,
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.constant_pad_nd.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.flip.default,
    prims.rev.default,  # what flip is decomposed into
    aten.roll.default,
    aten.repeat.default,
    aten.tril.default,
    aten.triu.default,
}

CREATIONS = {
    aten.full.default,
    aten.full_like.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    prims.iota.default,
}


def kind(node: fx.Node) -> Kind:
    """The kind of a node, by its operator."""
    if node.op in ("placeholder", "get_attr"):
        return Kind.SYMBOL if compat.is_sym_node(node) else Kind.INPUT
    target = node.target
    if compat.is_sym_node(node):
        return Kind.SYMBOL
    if target is operator.getitem:
        return kind(node.args[0])  # type: ignore[arg-type]
    for members, name in _TABLE:
        if target in members:
            return name
    if not compat.is_operator(target):
        return Kind.OTHER
    schema = compat.schema_of(target)
    if target.namespace == "_c10d_functional":
        return Kind.COLLECTIVE
    if torch.Tag.nondeterministic_seeded in target.tags and not _without_dropout(node):
        return Kind.RANDOM
    if "attention" in schema.name:
        return Kind.ATTENTION
    if "convolution" in schema.name:
        return Kind.CONVOLUTION
    if torch.Tag.pointwise in target.tags and not schema.is_mutable:
        return Kind.POINTWISE
    return Kind.OTHER


def _without_dropout(node: fx.Node) -> bool:
    """Whether an operator that may draw random numbers, as attention does for dropout, does not."""
    for position, argument in enumerate(compat.schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else None
            return node.kwargs.get("dropout_p", given) in (None, 0.0)
    return False


_TABLE: tuple[tuple[Set[Any], Kind], ...] = (
    (VIEWS, Kind.VIEW),
    (GEMMS, Kind.GEMM),
    (FLEX_ATTENTION, Kind.ATTENTION),
    (QUANTIZERS, Kind.QUANTIZE),
    (REDUCTIONS, Kind.REDUCTION),
    (MOVEMENTS, Kind.MOVEMENT),
    (CREATIONS, Kind.CREATION),
    (POINTWISE.keys(), Kind.POINTWISE),  # others are tagged so by PyTorch
)


def is_attention_mask(node: fx.Node) -> bool:
    """Whether a CUDA kernel of attention adds `node` to its scores."""
    return any(u.args[i] is node for u in node.users for i in _masks_of(u))


def attention_output(backward: fx.Node) -> fx.Node | None:
    """The output that the backward of an attention operator reads, [batch, heads, tokens, d].

    None for other operators, and for those of sequences of varying lengths, in other layouts.
    """
    if kind(backward) is not Kind.ATTENTION or not compat.is_operator(backward.target):
        return None
    schema = compat.schema_of(backward.target)
    names = [argument.name for argument in schema.arguments]
    if "scaled_dot_product" not in schema.name or "out" not in names:
        return None
    return backward.args[names.index("out")]  # type: ignore[return-value]


def _masks_of(attention: fx.Node) -> list[int]:
    """The places of what CUDA kernels add to their scores, among an operator's arguments."""
    if kind(attention) is not Kind.ATTENTION or not compat.is_operator(attention.target):
        return []
    names = [argument.name for argument in compat.schema_of(attention.target).arguments]
    return [i for i, name in enumerate(names) if name == "attn_bias" and i < len(attention.args)]
