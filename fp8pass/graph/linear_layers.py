"""The GEMMs of linear layers: forward `x Wᵀ`, input gradient `dY W`, weight gradient `dYᵀ x`.

A linear layer is activation × weight:

- a *weight* is an `nn.Parameter`, trained or frozen, or has the elements of parameters, however
  normalized, masked, scaled, gathered or added to (`origins.py`); looked at through casts, views
  and transposes;
- an *activation* depends on the data: on an input that is no parameter and no buffer, or on random
  numbers.

Experts are many linear layers in one GEMM: each row of the input meets the weight of its expert.
Which rows these are is data (`_grouped_mm`), or each has as many (`bmm`). A `bmm` of one matrix is
a linear layer like any other: `einsum` writes it so.

Three kinds of GEMMs come close. They are listed as layers with a `flaw` and stay in high precision:
those whose weight is computed in another way (low-rank, orthogonal), those whose weight is a buffer
or a constant tensor (a Fourier or mel matrix, a graph's Laplacian, a rotation), and those of
parameters alone (an orthogonality penalty, a projection of learned queries). Any other GEMM is no
layer.

What belongs to which layer in the backward follows from the step of autograd that a GEMM
differentiates, where that is known, and from data flow; module paths decide only between layers
that share an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.classify import BATCHED, GROUPED, Kind, kind
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.names import warn_about_idle_patterns
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.origins import Origins
from fp8pass.graph.output_heads import (
    fused_gradients,
    has_head_name,
    is_tied_to_embedding,
    logits,
    routers,
)
from fp8pass.graph.tags import ADDED
from fp8pass.plan import Linear

# A weight that its user could make a parameter.
NO_PARAMETER = "its weight is a buffer or constant: only parameters run in FP8"
# Of a narrow weight: its smaller side, and how many times as long the larger one is.
MOST_NARROW, LEAST_RATIO = 64, 16
# GEMMs that add their product to their first operand.
ADDING = {aten.addmm.default, aten.baddbmm.default, aten.addmv.default}


@dataclass(frozen=True)
class Reason:
    """Why a layer stays in high precision; `chosen` by the user, its saved input does too.

    A `routine` one is none that a user could change, or gain by.
    """

    text: str = ""
    chosen: bool = False
    routine: bool = False


@dataclass
class Layer:
    """The GEMMs of one use of a linear layer, or of what comes close to one.

    Attributes:
        weight: the parameter, or the node that computes it from parameters, or a buffer.
        input: the other operand of the forward.
        forward: the GEMM of the forward.
        in_features, out_features: the sizes of the matrix that it multiplies with.
        rows: how many rows the input has, in sizes to be multiplied.
        flaw: what it lacks to be activation × weight; '' for a linear layer.
        experts: how many weights there are, of which each row of the input meets one; 0 for a
            single weight.
        is_head: whether it computes logits, see `output_heads.py`.
        is_router: whether it decides where tokens go, see there.
        dgrad, wgrad: those of the backward, if `weight` is a parameter.
    """

    weight: fx.Node
    input: fx.Node
    forward: fx.Node
    in_features: Any
    out_features: Any
    rows: tuple[Any, ...]
    flaw: str = ""
    experts: int = 0
    is_head: bool = False
    is_router: bool = False
    dgrad: list[fx.Node] = field(default_factory=list)
    wgrad: list[fx.Node] = field(default_factory=list)

    @property
    def module(self) -> str:
        """Path of the module that this is."""
        return graph.module_path(self.forward)

    @property
    def why_none(self) -> Reason:
        """Why it is no linear layer; an empty reason where it is one."""
        return Reason(self.flaw, routine=self.flaw not in ("", NO_PARAMETER))

    def gemms(self) -> Iterator[tuple[str, fx.Node]]:
        """All GEMMs with their roles."""
        yield "forward", self.forward
        for role, nodes in (("dgrad", self.dgrad), ("wgrad", self.wgrad)):
            yield from ((role, node) for node in nodes)

    def entry(
        self,
        reason: Reason,
        times: str,
        *,
        fp8: tuple[str, ...] = (),
        simulated: tuple[str, ...] = (),
        fast: tuple[str, ...] = (),
    ) -> Linear:
        """The plan's entry, with the roles of the GEMMs that were rewritten."""
        rows = f"{times}{_product_text(self.rows)}"
        sizes = compat.size_hint(self.in_features), compat.size_hint(self.out_features)
        return Linear(
            self.module,
            rows,
            *sizes,
            fp8,
            reason.text,
            reason.chosen,
            reason.routine,
            simulated=simulated,
            experts=self.experts,
            fast=fast,
        )


@dataclass(frozen=True)
class GraphPart:
    """A graph, or what runs on each chunk of a part of it, with its linear layers.

    Attributes:
        gm: the graph.
        layers: its linear layers, and what comes close.
        times: how often it runs, as text in front of a number of rows; '' for the whole graph.
    """

    gm: fx.GraphModule
    layers: list[Layer]
    times: str = ""


def parts_with_layers(
    gm: fx.GraphModule, facts: JointFacts, skip: tuple[str, ...]
) -> list[GraphPart]:
    """A graph and the bodies of its chunks; warns about patterns of `skip` that match nothing."""
    parts = [GraphPart(gm, find_layers(gm.graph, facts))]
    for chunks in chunks_of(gm.graph):
        layers = find_layers(chunks.body.graph, chunks.facts(facts))
        parts.append(GraphPart(chunks.body, layers, f"{chunks.count} × "))
    modules = [layer.module for part in parts for layer in part.layers]
    warn_about_idle_patterns("skip", skip, "linear layer", modules)
    return parts


def find_layers(g: fx.Graph, facts: JointFacts) -> list[Layer]:
    """The linear layers of a graph and what comes close, with the GEMMs of their gradients."""
    backward, origins = graph.tangent_dependent(g), Origins.of(g, facts)
    of_heads, before_choice = logits(g) | fused_gradients(g).gemms, routers(g)
    layers: list[Layer] = []
    by_weight: dict[fx.Node, list[Layer]] = {}
    by_input: dict[fx.Node, list[Layer]] = {}
    differentiated: dict[int, list[fx.Node]] = {}
    for node in g.nodes:
        if not _multiplies_matrices(node):
            continue
        if node not in backward:
            differentiated.setdefault(node.meta.get("seq_nr", -1), []).append(node)
            if layer := _layer_of(node, facts, origins):
                layer.is_head = _is_head(layer, of_heads)
                layer.is_router = node in before_choice
                layers.append(layer)
                by_weight.setdefault(layer.weight, []).append(layer)
                by_input.setdefault(_elements(layer.input), []).append(layer)
            continue
        known, gradient = _split_gradient(node, backward)
        if known is None or gradient is None:
            continue
        forwards = differentiated.get(node.meta.get("seq_nr"), ())
        dgrad_of = by_weight.get(graph.source(known), [])
        wgrad_of = [y for y in by_input.get(_elements(known), ()) if _is_wgrad(node, y)]
        for found, role in ((dgrad_of, "dgrad"), (wgrad_of, "wgrad")):
            if of := [y for y in found if not forwards or y.forward in forwards]:
                getattr(_nearest(node, of), role).append(node)
                break
    return layers


def _multiplies_matrices(node: fx.Node) -> bool:
    """Whether a node is a GEMM of two matrices, or batches of them, that is not in FP8 already."""
    if node.op != "call_function" or kind(node) is not Kind.GEMM or node.target in OPERATORS:
        return False
    return all(tensor(x).ndim >= 2 for x in node.args[first_operand(node) :][:2])  # type: ignore[arg-type]


def first_operand(gemm: fx.Node) -> int:
    """The position of the first factor: what is added to the product comes before it."""
    return 1 if gemm.target in ADDING else 0


def _product_text(sizes: tuple[Any, ...]) -> str:
    """A product, as `64` or `4 × s0`."""
    known = math.prod(size for size in sizes if isinstance(size, int))
    varying = [str(size) for size in sizes if not isinstance(size, int)]
    return " × ".join([*([str(known)] if known != 1 or not varying else []), *varying])


def _layer_of(gemm: fx.Node, facts: JointFacts, origins: Origins) -> Layer | None:
    """The layer whose forward a GEMM is, by what its operands are computed from."""
    a, b = operands_of(gemm)
    found = []
    for weight, other in ((b, a), (a, b)):
        source = graph.source(weight)
        flaw = _flaw(gemm, source, graph.source(other), facts, origins)
        if flaw is not None and tensor(source).ndim >= 2:
            inward, outward = (-2, -1) if weight is b else (-1, -2)
            sizes, (*rows,) = tensor(weight).shape, tensor(other).shape
            del rows[-1 if weight is b else -2]
            experts = _experts_of(gemm, sizes[0], flaw)
            of_weight = sizes[inward], sizes[outward], tuple(rows)
            found.append(Layer(source, other, gemm, *of_weight, flaw, experts))
    return min(found, key=lambda layer: bool(layer.flaw), default=None)


def _experts_of(gemm: fx.Node, batch: Any, flaw: str) -> int:
    """How many weights a GEMM has; 0 where there is one, or what is batched is no weight."""
    is_one = isinstance(batch, int) and batch == 1
    several = gemm.target in GROUPED or (gemm.target in BATCHED and not is_one and not flaw)
    return compat.size_hint(batch) if several else 0


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
        return NO_PARAMETER
    if weight not in origins.computed | origins.products:
        return None
    if origins.has_elements_of_parameters(weight):
        return ""
    if weight in origins.computed:
        operator = graph.operator_name(weight)
        return f"its weight is computed by {operator} from fewer parameters than it has elements"
    # A product of parameters is a low-rank or an orthogonal weight. Where such products are
    # batched they are learned queries, which attend to the data.
    is_matrix = gemm.target in (aten.mm.default, aten.addmm.default)
    return "its weight is computed by a product of parameters" if is_matrix else None


def operands_of(gemm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The operands of a GEMM, without the zeros that Inductor's pad_mm appends to a contraction."""
    first = first_operand(gemm)
    a, b = gemm.args[first], gemm.args[first + 1]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    x, y = _unpadded(a, dim=1), _unpadded(b, dim=0)
    length = tensor(x).shape[-1]
    fits = compat.statically_known_true(length == tensor(y).shape[-2])
    stripped = fits and not is_multiple_of_16(length)
    return (x, y) if stripped else (a, b)


def emit_operand(target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A node in the checkpoint region of a GEMM; a policy to save that GEMM is not for it.

    It does not count among the operators of the model.
    """
    node = graph.emit(like.graph, target, *args, like=like, **kwargs)
    if target not in OPERATORS:
        node.meta[ADDED] = True
    if compat.must_save(node):
        del node.meta["recompute"]
    return node


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


def _is_head(layer: Layer, of_heads: set[fx.Node]) -> bool:
    named = has_head_name(layer.module) or is_tied_to_embedding(layer.weight)
    return named or layer.forward in of_heads


def _split_gradient(gemm: fx.Node, backward: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand known since the forward, and the one that is a gradient."""
    a, b = operands_of(gemm)
    if (a in backward) == (b in backward):
        return None, None
    return (b, a) if a in backward else (a, b)


def _elements(matrix: fx.Node) -> fx.Node:
    """The node whose elements a matrix has, in any layout, without rows of zeros at the end.

    A matrix, or each of a batch.
    """
    untransposed = graph.untransposed_matrices if tensor(matrix).ndim == 3 else graph.untransposed
    return graph.root(_unpadded(untransposed(matrix)[0], dim=0))


def _is_wgrad(gemm: fx.Node, layer: Layer) -> bool:
    rows, columns = tensor(gemm).shape[-2:]
    a, b = layer.in_features, layer.out_features
    known = compat.statically_known_true
    return (known(rows == a) and known(columns == b)) or (known(rows == b) and known(columns == a))


def _nearest(gemm: fx.Node, layers: list[Layer]) -> Layer:
    """The layer that a backward GEMM belongs to, where several share its operand."""
    path = graph.module_path(gemm)
    return next((y for y in layers if y.module == path), layers[0])


def why_not_of_this_size(out_features: Any, in_features: Any) -> str:
    """Why no product with a weight of these sizes runs in FP8, or should; '' where it may."""
    weight = f"weight {out_features}×{in_features}"
    if not (is_multiple_of_16(out_features) and is_multiple_of_16(in_features)):
        return f"{weight}: both sizes must be multiples of 16"
    if is_narrow(out_features, in_features):
        return f"{weight}: too narrow to gain by FP8"
    return ""


def is_narrow(out_features: Any, in_features: Any) -> bool:
    """Whether products with a weight of these sizes gain nothing by FP8, as an adapter of rank 16.

    They do about as many operations for each byte that they move as the smaller side is long, where
    a GPU could do several hundred; and every cast is one more launch.
    """
    smaller, larger = sorted(map(compat.size_hint, (out_features, in_features)))
    return 0 < smaller <= MOST_NARROW and larger >= LEAST_RATIO * smaller


def is_multiple_of_16(length: Any) -> bool:
    """Whether FP8 tensor cores take contractions of such a length, as far as is known."""
    known = compat.statically_known_true
    if known(length % CONTRACTION_MULTIPLE == 0):
        return True
    # What a guard has found to be some number, a weight's size say, is known by that alone.
    number = compat.size_hint(length)
    return number % CONTRACTION_MULTIPLE == 0 and known(length == number)
