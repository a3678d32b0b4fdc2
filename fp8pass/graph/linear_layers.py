"""The GEMMs of linear layers: forward `x Wᵀ`, input gradient `dY W`, weight gradient `dYᵀ x`.

A GEMM is a linear layer if one operand is a parameter, looked at through casts, views and
transposes, or is computed from trained parameters alone: a normalized, masked or gathered weight.
Roles are found by data flow; module paths decide only between layers that share an input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.nodes import aten, tensor

HEAD_NAMES = ("lm_head", "embed_out", "unembed")
TOP_LEVEL_HEAD_NAMES = ("output",)
LOG_SOFTMAX = {
    aten.log.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    torch.ops.prims.prepare_softmax_online.default,
}


@dataclass
class Layer:
    """The GEMMs of one use of a linear layer.

    Attributes:
        weight: the parameter, or the node that computes it from parameters.
        input: the other operand of the forward.
        forward: the GEMM of the forward.
        dgrad, wgrad: those of the backward, if `weight` is a parameter.
    """

    weight: fx.Node
    input: fx.Node
    forward: fx.Node
    dgrad: list[fx.Node] = field(default_factory=list)
    wgrad: list[fx.Node] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Path of the module that this is."""
        return graph.module_path(self.forward)

    def gemms(self) -> Iterator[tuple[str, fx.Node]]:
        """All GEMMs with their roles."""
        yield "forward", self.forward
        for role, nodes in (("dgrad", self.dgrad), ("wgrad", self.wgrad)):
            yield from ((role, node) for node in nodes)


def find_layers(g: fx.Graph, facts: JointFacts) -> list[Layer]:
    """The linear layers of a graph: GEMMs with a weight, and the GEMMs of their gradients."""
    backward = graph.tangent_dependent(g)
    computed = _computed_weights(g, facts)
    layers: list[Layer] = []
    for node in g.nodes:
        if kind(node) is not Kind.GEMM or node.op != "call_function":
            continue
        if node not in backward:
            weight, other = _split_weight(node, facts.parameters)
            if weight is None:
                weight, other = _split_weight(node, computed, computed | facts.parameters)
            if weight is not None and other is not None:
                layers.append(Layer(graph.source(weight), other, node))
            continue
        known, gradient = _split_gradient(node, backward)
        if known is None or gradient is None:
            continue
        dgrad_of = [y for y in layers if y.weight is graph.source(known)]
        if dgrad_of:
            _nearest(node, dgrad_of).dgrad.append(node)
            continue
        wgrad_of = [y for y in layers if _same_matrix(y.input, known) and _is_wgrad(node, y)]
        if wgrad_of:
            _nearest(node, wgrad_of).wgrad.append(node)
    return layers


def operands_of(gemm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The operands of a GEMM, without the zeros that Inductor's pad_mm appends to a contraction."""
    first = 1 if gemm.target in (aten.addmm.default, aten.baddbmm.default) else 0
    a, b = gemm.args[first], gemm.args[first + 1]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    x, y = _unpadded(a, dim=1), _unpadded(b, dim=0)
    length = tensor(x).shape[-1]
    stripped = length == tensor(y).shape[-2] and not is_multiple_of_16(length)
    return (x, y) if stripped else (a, b)


def _unpadded(matrix: fx.Node, dim: int) -> fx.Node:
    """A matrix without zeros after its last elements along `dim`, if it has none elsewhere."""
    filled = [*matrix.args[2:], *matrix.kwargs.values()]
    if not graph.is_call(matrix, aten.constant_pad_nd.default) or any(filled):
        return matrix
    x, pad = matrix.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(pad, (list, tuple))
    if not all(isinstance(length, int) for length in pad):
        return matrix
    # Before and after the elements of the last dimension, then of the first.
    ends = {1: pad[1], 0: pad[3] if len(pad) > 2 else 0}
    return x if ends[dim] == sum(map(abs, pad)) else matrix


def _split_weight(
    gemm: fx.Node, weights: Collection[fx.Node], others: Collection[fx.Node] = ()
) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand that is one of `weights`, and the other one, which is none of `others`."""
    a, b = operands_of(gemm)
    for weight, other in ((b, a), (a, b)):
        source = graph.source(weight)
        if source in weights and tensor(source).ndim >= 2 and graph.source(other) not in others:
            return weight, other
    return None, None


def _computed_weights(g: fx.Graph, facts: JointFacts) -> set[fx.Node]:
    """The nodes that are computed from trained parameters, and from no activation.

    A product of two matrices is none of them: that of learned queries and a weight is as good as
    an activation. One of a matrix and a vector, which spectral norm takes, may be.
    """
    trained = facts.parameters & facts.held
    static, found = set(facts.parameters), set(trained)
    for node in g.nodes:
        if node.op in ("placeholder", "output") or _multiplies_matrices(node):
            continue
        if static.issuperset(node.all_input_nodes):
            static.add(node)
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return found - trained


def _multiplies_matrices(node: fx.Node) -> bool:
    val = graph.value(node)
    is_product = kind(node) in (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)
    return is_product and (val is None or val.ndim >= 2)


def _split_gradient(gemm: fx.Node, backward: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand known since the forward, and the one that is a gradient."""
    a, b = operands_of(gemm)
    if (a in backward) == (b in backward):
        return None, None
    return (b, a) if a in backward else (a, b)


def _same_matrix(x: fx.Node, y: fx.Node) -> bool:
    """Whether two matrices hold the same elements, rows of zeros at the end not counted."""
    x, y = (_unpadded(graph.untransposed(matrix)[0], dim=0) for matrix in (x, y))
    return graph.root(x) is graph.root(y)


def _is_wgrad(gemm: fx.Node, layer: Layer) -> bool:
    return sorted(tensor(gemm).shape) == sorted(tensor(layer.weight).shape)


def _nearest(gemm: fx.Node, layers: list[Layer]) -> Layer:
    """The layer that a backward GEMM belongs to, where several share its operand."""
    path = graph.module_path(gemm)
    return next((y for y in layers if y.module == path), layers[0])


def is_output_head(layer: Layer) -> bool:
    """Whether a layer computes logits: by its name, a tied embedding, or a later log-softmax."""
    name = layer.module.rsplit(".", 1)[-1]
    if name in HEAD_NAMES or layer.module in TOP_LEVEL_HEAD_NAMES:
        return True
    if any(user.target is aten.embedding.default for user in layer.weight.users):
        return True
    return _feeds_log_softmax(layer.forward)


def _feeds_log_softmax(gemm: fx.Node) -> bool:
    through = (Kind.VIEW, Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT)
    seen, pending = {gemm}, [gemm]
    while pending:
        for user in pending.pop().users:
            if user.target in LOG_SOFTMAX:
                return True
            if user not in seen and kind(user) in through:
                seen.add(user)
                pending.append(user)
    return False


def is_multiple_of_16(length: Any) -> bool:
    """Whether FP8 tensor cores take contractions of such a length, as far as is known."""
    return compat.statically_known_true(length % CONTRACTION_MULTIPLE == 0)
