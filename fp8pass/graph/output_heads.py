"""Find output heads, the layers that compute logits, and MoE routers.

A layer is an output head if its module has a head's name (`lm_head`), if it shares its weight with
an embedding, or if only pointwise operators, views, reductions and copies lie between its result
and a log-softmax or a custom loss kernel. The search from the log-softmax stops at additions to the
residual stream, so the last layer of a branch is not a head.

Fused linear cross entropies compute gradients in the forward. The GEMMs of these gradients belong
to the head.

A router is a layer before a top-k or argmax. Routers stay in high precision, because small errors
would change the choice of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from fp8pass import compat, graph
from fp8pass.config import Pattern
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
ROUTER_CHOICES = {aten.topk.default, aten.argmax.default}
# The kinds of operators that may lie between a head and the log-softmax.
KINDS_BETWEEN = (Kind.VIEW, Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT)


def has_head_name(path: str) -> bool:
    return path.rsplit(".", 1)[-1] in HEAD_NAMES or path in TOP_LEVEL_HEAD_NAMES


def stays_in_high_precision(
    path: str, layer: nn.Linear, logits: object, skip: tuple[Pattern, ...]
) -> bool:
    """Whether a layer of an untraced model matches `skip` or looks like an output head.

    It looks like a head if it has a head's name, or if its (out_features, in_features) equals
    `logits`, a result of `largest_embedding_size`.
    """
    is_head = has_head_name(path) or (layer.out_features, layer.in_features) == logits
    return is_head or matching_pattern(path, skip) is not None


def largest_embedding_size(model: nn.Module) -> tuple[int, int] | None:
    """Return (rows, columns) of the largest embedding. The output head usually has this size."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    return max(((m.num_embeddings, m.embedding_dim) for m in tables), default=None)


def is_tied_to_embedding(weight: fx.Node) -> bool:
    return any(user.target is aten.embedding.default for user in weight.users)


def find_logit_gemms(g: fx.Graph) -> set[fx.Node]:
    return _gemms_before(g, lambda n: n.target in LOG_SOFTMAX or _is_loss_kernel(n))


def find_router_gemms(g: fx.Graph) -> set[fx.Node]:
    return _gemms_before(g, lambda n: n.target in ROUTER_CHOICES)


def _gemms_before(g: fx.Graph, is_reader: Callable[[fx.Node], bool]) -> set[fx.Node]:
    backward = graph.tangent_dependent(g)
    first = {n for n in g.nodes if n not in backward and is_reader(n)}

    def passes(node: fx.Node) -> bool:
        return (node in first or kind(node) in KINDS_BETWEEN) and not _joins_stream(node)

    return {n for n in ancestors(first, passes) if kind(n) is Kind.GEMM}


def _is_loss_kernel(node: fx.Node) -> bool:
    """Whether a custom operator or Triton kernel computes a loss from logits and labels.

    Such an operator reads a matrix, and one integer for each row of the matrix. It returns or fills
    a tensor of one number for each row, or a single number.
    """
    if node.op != "call_function" or getattr(node.target, "namespace", None) in ("aten", "prims"):
        return False
    if graph.is_getitem(node) or kind(node) is not Kind.OTHER:
        return False
    operands = [x for n in node.all_input_nodes if (x := value(n)) is not None]
    labels = [x for x in operands if x.dtype in (torch.int32, torch.int64) and x.ndim > 0]
    matrices = [x for x in operands if x.is_floating_point() and x.ndim > 1]
    results = compat.tensor_leaves(node.meta.get("val"))
    losses = [x for x in results if x.is_floating_point()]
    known = compat.statically_known_true
    return any(
        known(graph.numel(label) * x.shape[-1] == graph.numel(x))
        and any(y.ndim == 0 or known(graph.numel(y) == graph.numel(label)) for y in losses)
        for label in labels
        for x in matrices
    )


@dataclass(frozen=True)
class FusedGradients:
    """Gradients of output heads in a forward that uses a fused linear cross entropy."""

    # The GEMMs that multiply a gradient of logits by the weight or the input of the head.
    gemms: set[fx.Node] = field(default_factory=set)
    # The gradients of logits, the results of `gemms`, and values computed from either.
    values: set[fx.Node] = field(default_factory=set)


def fused_gradients(g: fx.Graph) -> FusedGradients:
    backward, found = graph.tangent_dependent(g), FusedGradients()
    heads = find_logit_gemms(g)
    heads_of = {head: {head} for head in heads}  # the heads that a value depends on
    for node in (n for n in g.nodes if n not in backward and n not in heads):
        sources = set[fx.Node]().union(*(heads_of.get(n, ()) for n in node.all_input_nodes))
        if kind(node) is Kind.GEMM:
            operands = {_whole(n) for n in node.all_input_nodes}
            if any(operands & {_whole(n) for n in head.all_input_nodes} for head in sources):
                found.gemms.add(node)
                found.values.add(node)
        elif kind(node) in (*KINDS_BETWEEN, Kind.OTHER):  # scatters and loss kernels are OTHER
            if sources:
                heads_of[node] = sources
            follows = not found.values.isdisjoint(node.all_input_nodes)
            if follows or any(_has_columns_of(node, head) for head in sources):
                found.values.add(node)
    return found


def _whole(operand: fx.Node) -> fx.Node:
    """Return the whole tensor of a sliced operand. A head that runs on chunks reads slices."""
    node = skip_views_and_casts(operand)
    while node.target in PARTIAL_VIEWS or graph.is_getitem(node):
        node = skip_views_and_casts(node.all_input_nodes[0])
    return node


def _has_columns_of(node: fx.Node, head: fx.Node) -> bool:
    val = value(node)
    return val is not None and val.ndim > 1 and val.shape[-1] == graph.tensor(head).shape[-1]


def _joins_stream(node: fx.Node) -> bool:
    """Whether `node` adds a branch to the residual stream that the branch reads."""
    if not is_same_shape_addition(node):
        return False
    a, b = node.all_input_nodes
    (terms_a, before_a), (terms_b, before_b) = _terms(a), _terms(b)
    return not (terms_a.isdisjoint(before_b) and terms_b.isdisjoint(before_a))


def _terms(node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the terms of the sum `node`, and all values that are read by layers before `node`.

    A term has as many elements as the sum, and no layer lies between the term and the sum.
    """
    found = ancestors([node], lambda n: kind(n) in KINDS_BETWEEN)
    size = graph.numel(graph.tensor(node))
    terms = {n for n in found if (val := value(n)) is not None and graph.numel(val) == size}
    layers = (n for n in found if kind(n) not in KINDS_BETWEEN)
    return terms, ancestors(operand for layer in layers for operand in layer.all_input_nodes)
