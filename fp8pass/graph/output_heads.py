"""Output heads, the layers that compute logits; routers, which say where tokens go.

A layer is one by its name, by an embedding that shares its weight, or because a log-softmax follows
with nothing but pointwise operators, views, reductions and copies between. The sum of a residual
stream ends that way back: the last layer of a branch that is added to a stream is no head, even if
the stream ends in a log-softmax without one.

Where the forward computes gradients of a head, as fused linear cross entropies do, these belong to
the head: they are exact, too.

A layer is a router if the same lies between it and a choice of the largest, which a small error may
change.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fp8pass import graph
from fp8pass.graph.classify import PARTIAL_VIEWS, Kind, kind
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.nodes import aten, value
from fp8pass.graph.order import ancestors
from fp8pass.graph.patterns import is_same_shape_addition, skip_views_and_casts

HEAD_NAMES = ("lm_head", "embed_out", "unembed")
TOP_LEVEL_HEAD_NAMES = ("output",)
LOG_SOFTMAX = {
    aten.log.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    torch.ops.prims.prepare_softmax_online.default,
}
CHOICES = {aten.topk.default, aten.argmax.default}
BETWEEN = (Kind.VIEW, Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT)


def has_head_name(path: str) -> bool:
    """Whether a module with this path computes logits, as far as its name says."""
    return path.rsplit(".", 1)[-1] in HEAD_NAMES or path in TOP_LEVEL_HEAD_NAMES


def stays_in_high_precision(
    path: str, layer: nn.Linear, logits: object, skip: tuple[str, ...]
) -> bool:
    """Whether a layer is skipped, or an output head as far as is known before a graph is traced.

    Heads have the `logits`' sizes, if not a head's name.
    """
    is_head = has_head_name(path) or (layer.out_features, layer.in_features) == logits
    return is_head or matching_pattern(path, skip) is not None


def largest_embedding_size(model: nn.Module) -> tuple[int, int] | None:
    """The sizes of the largest embedding, which an output head has, too."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    return max(((m.num_embeddings, m.embedding_dim) for m in tables), default=None)


def is_tied_to_embedding(weight: fx.Node) -> bool:
    """Whether a weight is also the table of an embedding."""
    return any(user.target is aten.embedding.default for user in weight.users)


def find_logit_gemms(g: fx.Graph) -> set[fx.Node]:
    """The GEMMs whose result a log-softmax of the forward reads."""
    return _gemms_before(g, LOG_SOFTMAX)


def find_router_gemms(g: fx.Graph) -> set[fx.Node]:
    """The GEMMs of whose result the forward takes the largest."""
    return _gemms_before(g, CHOICES)


@dataclass(frozen=True)
class FusedGradients:
    """Gradients of output heads that the forward computes, as fused linear cross entropies do.

    Attributes:
        gemms: the products of gradients of logits with the weight or the input of their head.
        values: these products, gradients of logits, and the values that follow from them.
    """

    gemms: set[fx.Node] = field(default_factory=set)
    values: set[fx.Node] = field(default_factory=set)


def fused_gradients(g: fx.Graph) -> FusedGradients:
    """Find the gradients of output heads that the forward of a joint graph computes."""
    backward, found = graph.tangent_dependent(g), FusedGradients()
    heads = find_logit_gemms(g)
    origins = {head: {head} for head in heads}  # of a value between two GEMMs: the heads behind it
    for node in (n for n in g.nodes if n not in backward and n not in heads):
        behind = set[fx.Node]().union(*(origins.get(n, ()) for n in node.all_input_nodes))
        if kind(node) is Kind.GEMM:
            operands = {_whole(n) for n in node.all_input_nodes}
            if any(operands & {_whole(n) for n in head.all_input_nodes} for head in behind):
                found.gemms.add(node)
                found.values.add(node)
        elif kind(node) in (*BETWEEN, Kind.OTHER):  # scatters, and kernels of losses
            if behind:
                origins[node] = behind
            follows = not found.values.isdisjoint(node.all_input_nodes)
            if follows or any(_has_columns_of(node, head) for head in behind):
                found.values.add(node)
    return found


def _whole(operand: fx.Node) -> fx.Node:
    """Return the tensor that an operand is a part of: heads may be computed in chunks."""
    node = skip_views_and_casts(operand)
    while node.target in PARTIAL_VIEWS or graph.is_getitem(node):
        node = skip_views_and_casts(node.all_input_nodes[0])
    return node


def _has_columns_of(node: fx.Node, head: fx.Node) -> bool:
    val = value(node)
    return val is not None and val.ndim > 1 and val.shape[-1] == graph.tensor(head).shape[-1]


def _gemms_before(g: fx.Graph, ends: Set[Any]) -> set[fx.Node]:
    backward = graph.tangent_dependent(g)
    first = {n for n in g.nodes if n.target in ends and n not in backward}
    seen, pending = set(first), list(first)
    while pending:
        node = pending.pop()
        passes = node in first or kind(node) in BETWEEN
        if passes and not _joins_stream(node):
            pending += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return {n for n in seen if kind(n) is Kind.GEMM}


def _joins_stream(node: fx.Node) -> bool:
    """Whether `node` adds a branch to the stream that the branch is computed from."""
    if not is_same_shape_addition(node):
        return False
    a, b = node.all_input_nodes
    (terms_a, behind_a), (terms_b, behind_b) = _terms(a), _terms(b)
    return not (terms_a.isdisjoint(behind_b) and terms_b.isdisjoint(behind_a))


def _terms(node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """What goes into a value without a layer between, in its size; and all behind these layers."""
    seen, pending, layers = {node}, [node], list[fx.Node]()
    while pending:
        current = pending.pop()
        if kind(current) in BETWEEN:
            pending += [n for n in current.all_input_nodes if n not in seen]
            seen.update(current.all_input_nodes)
        else:
            layers += current.all_input_nodes
    size = graph.numel(graph.tensor(node))
    terms = {n for n in seen if (val := value(n)) is not None and graph.numel(val) == size}
    return terms, ancestors(layers)
