"""The GEMMs of linear layers: forward `x Wᵀ`, input gradient `dY W`, weight gradient `dYᵀ x`.

A linear layer is activation × weight:

- a *weight* is an `nn.Parameter`, trained or frozen, looked at through casts, views and transposes;
- an *activation* depends on the data: on an input that is no parameter and no buffer, or on random
  numbers.

Three kinds of GEMMs come close. They are listed as layers with a `flaw` and stay in high precision:
those whose weight is computed from parameters (normalized, masked, gathered, low-rank), those whose
weight is a buffer or a constant tensor (a Fourier or mel matrix, a graph's Laplacian, a rotation),
and those of parameters alone (an orthogonality penalty, a projection of learned queries). Any other
GEMM is no layer.

What belongs to which layer in the backward follows from the step of autograd that a GEMM
differentiates, where that is known, and from data flow; module paths decide only between layers
that share an input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.origins import Origins
from fp8pass.graph.output_heads import has_head_name, is_tied_to_embedding, logits


@dataclass
class Layer:
    """The GEMMs of one use of a linear layer, or of what comes close to one.

    Attributes:
        weight: the parameter, or the node that computes it from parameters, or a buffer.
        input: the other operand of the forward.
        forward: the GEMM of the forward.
        flaw: what it lacks to be activation × parameter; '' for a linear layer.
        is_head: whether it computes logits, see `output_heads.py`.
        dgrad, wgrad: those of the backward, if `weight` is a parameter.
    """

    weight: fx.Node
    input: fx.Node
    forward: fx.Node
    flaw: str = ""
    is_head: bool = False
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
    """The linear layers of a graph and what comes close, with the GEMMs of their gradients."""
    backward, origins = graph.tangent_dependent(g), Origins.of(g, facts)
    before_softmax = logits(g)
    layers: list[Layer] = []
    differentiated: dict[int, list[fx.Node]] = {}
    for node in g.nodes:
        if kind(node) is not Kind.GEMM or node.op != "call_function":
            continue
        if node not in backward:
            differentiated.setdefault(node.meta.get("seq_nr", -1), []).append(node)
            if layer := _layer_of(node, facts, origins):
                layer.is_head = _is_head(layer, before_softmax)
                layers.append(layer)
            continue
        known, gradient = _split_gradient(node, backward)
        if known is None or gradient is None:
            continue
        forwards = differentiated.get(node.meta.get("seq_nr"), ())
        candidates = [y for y in layers if not forwards or y.forward in forwards]
        dgrad_of = [y for y in candidates if y.weight is graph.source(known)]
        if dgrad_of:
            _nearest(node, dgrad_of).dgrad.append(node)
            continue
        wgrad_of = [y for y in candidates if _same_matrix(y.input, known) and _is_wgrad(node, y)]
        if wgrad_of:
            _nearest(node, wgrad_of).wgrad.append(node)
    return layers


def _layer_of(gemm: fx.Node, facts: JointFacts, origins: Origins) -> Layer | None:
    """The layer whose forward a GEMM is, by what its operands are computed from."""
    a, b = operands_of(gemm)
    found = []
    for weight, other in ((b, a), (a, b)):
        source = graph.source(weight)
        flaw = _flaw(gemm, source, graph.source(other), facts, origins)
        if flaw is not None and tensor(source).ndim >= 2:
            found.append(Layer(source, other, gemm, flaw))
    return min(found, key=lambda layer: bool(layer.flaw), default=None)


def _flaw(
    gemm: fx.Node, weight: fx.Node, other: fx.Node, facts: JointFacts, origins: Origins
) -> str | None:
    """What a GEMM lacks to be a linear layer with this weight; None if it is not even close."""
    is_activation = origins.is_activation(other)
    if weight in facts.weights:
        return "" if is_activation else "none of its operands is an activation"
    if not is_activation:
        return None
    if weight in facts.parameters:
        return "its weight is a buffer or constant: only parameters run in FP8"
    # A product of parameters is a low-rank or an orthogonal weight. Where such products are
    # batched they are learned queries, which attend to the data.
    is_matrix = gemm.target in (aten.mm.default, aten.addmm.default)
    if weight in origins.computed or (weight in origins.products and is_matrix):
        operator = graph.operator_name(weight)
        return f"its weight is computed by {operator}: only parameters run in FP8"
    return None


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


def _is_head(layer: Layer, before_softmax: set[fx.Node]) -> bool:
    named = has_head_name(layer.module) or is_tied_to_embedding(layer.weight)
    return named or layer.forward in before_softmax


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


def is_multiple_of_16(length: Any) -> bool:
    """Whether FP8 tensor cores take contractions of such a length, as far as is known."""
    return compat.statically_known_true(length % CONTRACTION_MULTIPLE == 0)
