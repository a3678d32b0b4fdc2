"""The GEMMs of linear layers: forward `x Wᵀ`, input gradient `dY W`, weight gradient `dYᵀ x`.

A linear layer multiplies an activation by a weight:

- A weight is an `nn.Parameter`, trained or frozen, or a matrix computed from parameters by
  normalizing, masking, scaling, gathering or adding. Such a matrix must not have more elements than
  these parameters (`origins.py`). The GEMM may read a cast, view or transpose of the weight.
- An activation depends on random numbers or on the data. The data are all inputs of the graph
  except parameters and buffers.

The experts of an MoE layer are many linear layers in one GEMM. Each expert multiplies different
rows of the input. In a grouped GEMM (`_grouped_mm`), some experts may have more rows than others.
In a batched GEMM (`bmm`), all experts have the same number of rows. A `bmm` with a single weight,
which `einsum` emits, is an ordinary linear layer.

Some GEMMs of the forward resemble linear layers, but stay in high precision. They are listed as
layers with a `flaw`. Other GEMMs are not listed. The flaws are:

- The weight is a product of parameters (low-rank, orthogonal), or it has more elements than the
  parameters that it is computed from.
- The weight is a buffer or a constant (a Fourier or mel matrix, a Laplacian, a rotation).
- Neither operand is an activation: both are parameters (an orthogonality penalty, learned queries),
  or one is a parameter and the other a constant.

A GEMM of the backward belongs to the layer whose forward GEMM reads the same operand and has the
same autograd step (`seq_nr`, if known). If several layers match, the first layer with the GEMM's
module path is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Pattern
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.classify import BATCHED_GEMMS, GROUPED_GEMMS, Kind, kind
from fp8pass.graph.joint_facts import JointFacts
from fp8pass.graph.names import warn_about_idle_patterns
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.origins import Origins
from fp8pass.graph.output_heads import (
    find_logit_gemms,
    find_router_gemms,
    fused_gradients,
    has_head_name,
    is_tied_to_embedding,
)
from fp8pass.graph.tags import ADDED_BY_PASS
from fp8pass.plan import Linear

# This flaw is worth a warning, because the user can register the weight as a parameter instead.
NOT_A_PARAMETER = "its weight is a buffer or constant: only parameters run in FP8"
# PyTorch repeats the weight of a frozen nn.Linear if its input is not contiguous.
REPEATED = (
    "its weight is repeated for each matrix of a batch; if the layer is a frozen nn.Linear, call "
    "contiguous() on its input"
)
# A weight is narrow if its smaller size is at most MAX_NARROW_SIDE, and its larger size is at least
# MIN_NARROW_RATIO times the smaller size.
MAX_NARROW_SIDE, MIN_NARROW_RATIO = 64, 16
# An adapter's layer is at least this many times as wide as the adapter's rank.
MIN_ADAPTER_RATIO = 4
# GEMMs that add their first operand to the product.
GEMMS_WITH_BIAS = {aten.addmm.default, aten.baddbmm.default, aten.addmv.default}


@dataclass(frozen=True)
class Reason:
    """Why a layer stays in high precision.

    Attributes:
        text: the reason; '' if nothing prevents FP8.
        chosen: whether an option requires high precision, or the layer is an output head or a
            router. In these cases, the layer's saved input stays in high precision, too.
        routine: whether no warning is needed, because the user cannot remove the reason, or would
            gain nothing by removing it.
    """

    text: str = ""
    chosen: bool = False
    routine: bool = False


@dataclass
class Layer:
    """One call of a linear layer with its GEMMs, or a GEMM that only resembles a layer (`flaw`).

    Attributes:
        weight: a parameter, a node that computes a weight from parameters, or a buffer.
        input: the operand of the forward GEMM that is not the weight.
        forward: the GEMM of the forward.
        in_features, out_features: the sizes of the weight; symbolic with dynamic shapes.
        rows: the sizes of the input, except the dimension that the GEMM sums over, e.g. (batch,
            tokens). Their product is the number of rows.
        flaw: why the forward GEMM is not activation × weight; '' for a linear layer.
        experts: the number of experts; 0 for a layer with a single weight.
        is_head: whether the layer computes logits (`output_heads.py`).
        is_router: whether the layer chooses experts (`output_heads.py`).
        dgrad, wgrad: the GEMMs of the backward that compute the gradients of `input` and `weight`.
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
        """The path of the module that calls the layer."""
        return graph.module_path(self.forward)

    def gemms(self) -> Iterator[tuple[str, fx.Node]]:
        """Yield the role (`forward`, `dgrad` or `wgrad`) and the node of each GEMM."""
        yield "forward", self.forward
        for role, nodes in (("dgrad", self.dgrad), ("wgrad", self.wgrad)):
            yield from ((role, node) for node in nodes)

    def entry(self, reason: Reason, times: str) -> Linear:
        """Return the layer's entry in the plan. The caller adds the GEMMs that a pass rewrites."""
        return Linear(
            module=self.module,
            rows=f"{times}{_product_text(self.rows)}",
            in_features=compat.size_hint(self.in_features),
            out_features=compat.size_hint(self.out_features),
            fp8=(),
            reason=reason.text,
            chosen=reason.chosen,
            routine=reason.routine,
            experts=self.experts,
        )


@dataclass(frozen=True)
class GraphPart:
    """A graph, or a subgraph that runs on each chunk (`chunks.py`), with its linear layers.

    Attributes:
        gm: the graph or subgraph.
        layers: the linear layers of `gm`, and its GEMMs with a `flaw`.
        times: a prefix for the number of rows in the plan. It is e.g. `4 × ` for a subgraph that
            runs on 4 chunks, and '' for a whole graph.
    """

    gm: fx.GraphModule
    layers: list[Layer]
    times: str = ""


def parts_with_layers(
    gm: fx.GraphModule, facts: JointFacts, skip: tuple[Pattern, ...]
) -> list[GraphPart]:
    """Find the layers of a graph and its chunk subgraphs.

    Warn about each `skip` pattern that matches no layer.
    """
    parts = [GraphPart(gm, find_layers(gm.graph, facts))]
    for chunks in chunks_of(gm.graph):
        layers = find_layers(chunks.body.graph, chunks.facts(facts))
        parts.append(GraphPart(chunks.body, layers, f"{chunks.count} × "))
    layers = [layer for part in parts for layer in part.layers]
    layers += [layer for _, layer in layers_in_called_graphs(gm, facts)]
    modules = [layer.module for layer in layers]
    warn_about_idle_patterns("skip", skip, "linear layer", modules)
    return parts


def layers_in_called_graphs(gm: fx.GraphModule, facts: JointFacts) -> Iterator[tuple[str, Layer]]:
    """Yield `(operator name, layer)` for each layer in a graph that e.g. a `torch.cond` calls.

    The search covers `torch.cond`, `scan`, `while_loop` and `map` in the forward. Passes do not
    rewrite the graphs that these operators call.
    """
    backward = graph.tangent_dependent(gm.graph)
    for call in gm.graph.nodes:
        if call in backward or not compat.calls_graphs(call):
            continue
        operands = [n for n in call.all_input_nodes if n.op != "get_attr"]
        for reference in (n for n in call.all_input_nodes if n.op == "get_attr"):
            called = getattr(gm, reference.target)
            if isinstance(called, fx.GraphModule):
                # The inputs of the called graph are the last operands of the call.
                inputs = called.graph.find_nodes(op="placeholder")
                pairs = zip(reversed(inputs), reversed(operands), strict=False)
                for layer in find_layers(called.graph, facts.map_to_subgraph(pairs)):
                    yield graph.operator_name(call), layer


def find_layers(g: fx.Graph, facts: JointFacts) -> list[Layer]:
    """Find the layers of a graph, including layers with a `flaw`, and each layer's GEMMs."""
    backward, origins = graph.tangent_dependent(g), Origins.of(g, facts)
    head_gemms, router_gemms = find_logit_gemms(g) | fused_gradients(g).gemms, find_router_gemms(g)
    layers: list[Layer] = []
    by_weight: dict[fx.Node, list[Layer]] = {}
    by_input: dict[fx.Node, list[Layer]] = {}
    by_autograd_step: dict[int, list[fx.Node]] = {}
    for node in g.nodes:
        if not _multiplies_matrices(node):
            continue
        if node not in backward:
            by_autograd_step.setdefault(node.meta.get("seq_nr", -1), []).append(node)
            if layer := _layer_of(node, facts, origins):
                is_named = has_head_name(layer.module) or is_tied_to_embedding(layer.weight)
                layer.is_head = is_named or node in head_gemms
                layer.is_router = node in router_gemms
                layers.append(layer)
                by_weight.setdefault(layer.weight, []).append(layer)
                by_input.setdefault(_elements(layer.input), []).append(layer)
            continue
        a, b = gemm_operands(node)
        if (a in backward) == (b in backward):
            continue
        known = b if a in backward else a  # the operand from the forward
        forwards = by_autograd_step.get(node.meta.get("seq_nr"), ())
        dgrad_layers = by_weight.get(graph.skip_views_and_casts(known), [])
        wgrad_layers = [y for y in by_input.get(_elements(known), ()) if _is_wgrad(node, y)]
        for found, role in ((dgrad_layers, "dgrad"), (wgrad_layers, "wgrad")):
            if candidates := [y for y in found if not forwards or y.forward in forwards]:
                path = graph.module_path(node)
                chosen = next((y for y in candidates if y.module == path), candidates[0])
                getattr(chosen, role).append(node)
                break
    return layers


def _multiplies_matrices(node: fx.Node) -> bool:
    """Whether a node is a high-precision GEMM whose factors are matrices or batches of matrices."""
    if node.op != "call_function" or kind(node) is not Kind.GEMM or node.target in OPERATORS:
        return False
    return all(tensor(x).ndim >= 2 for x in node.args[first_factor_index(node) :][:2])  # type: ignore[arg-type]


def first_factor_index(gemm: fx.Node) -> int:
    """Return the index of the first factor in `gemm.args`: 1 after a bias, else 0."""
    return 1 if gemm.target in GEMMS_WITH_BIAS else 0


def _product_text(sizes: tuple[Any, ...]) -> str:
    """Format a product of sizes, for example `64` or `4 × s0`."""
    known = math.prod(size for size in sizes if isinstance(size, int))
    symbolic = [str(size) for size in sizes if not isinstance(size, int)]
    return " × ".join([*([str(known)] if known != 1 or not symbolic else []), *symbolic])


def _layer_of(gemm: fx.Node, facts: JointFacts, origins: Origins) -> Layer | None:
    """Return the layer that a forward GEMM computes, or None if neither operand is a weight."""
    a, b = gemm_operands(gemm)
    found = []
    for weight, other in ((b, a), (a, b)):
        source = graph.skip_views_and_casts(weight)
        flaw = _flaw(gemm, source, graph.skip_views_and_casts(other), facts, origins)
        if flaw is not None and tensor(source).ndim >= 2:
            contracted, outer = (-2, -1) if weight is b else (-1, -2)
            sizes, (*rows,) = tensor(weight).shape, tensor(other).shape
            del rows[-1 if weight is b else -2]
            features = sizes[contracted], sizes[outer]
            experts = _experts_of(gemm, sizes[0], flaw)
            found.append(Layer(source, other, gemm, *features, tuple(rows), flaw, experts))
    return min(found, key=lambda layer: bool(layer.flaw), default=None)


def _experts_of(gemm: fx.Node, batch: Any, flaw: str) -> int:
    """Return the number of experts; 0 for a single weight, or for a batch with a `flaw`."""
    is_one = isinstance(batch, int) and batch == 1
    several = gemm.target in GROUPED_GEMMS or (
        gemm.target in BATCHED_GEMMS and not is_one and not flaw
    )
    return compat.size_hint(batch) if several else 0


def _flaw(
    gemm: fx.Node, weight: fx.Node, other: fx.Node, facts: JointFacts, origins: Origins
) -> str | None:
    """Return why `gemm` is not a linear layer with this weight.

    Return '' for a linear layer, and None for a GEMM that is not listed as a layer.
    """
    is_activation = origins.is_activation(other)
    if weight in facts.weights:
        return "" if is_activation else "none of its operands is an activation"
    if not is_activation:
        return None
    if weight in facts.parameters:
        return NOT_A_PARAMETER
    if weight not in origins.computed | origins.products:
        return None
    if origins.has_elements_of_parameters(weight):
        return ""
    if weight in origins.computed:
        if gemm.target in BATCHED_GEMMS and _is_repeated_weight(weight, facts):
            return REPEATED
        operator = graph.operator_name(weight)
        return f"{operator} computes its weight from parameters that have fewer elements"
    # A single matrix that is a product of parameters is a low-rank or orthogonal weight. A batch of
    # such matrices contains learned queries, which attend to the data, and so is not a weight.
    is_matrix = gemm.target in (aten.mm.default, aten.addmm.default)
    return "its weight is a product of parameters" if is_matrix else None


def _is_repeated_weight(node: fx.Node, facts: JointFacts) -> bool:
    """Whether a node repeats a matrix that is a parameter."""
    if node.target is not aten.expand.default:
        return False
    source = graph.skip_views_and_casts(node.args[0])  # type: ignore[arg-type]
    return source in facts.weights and tensor(source).ndim == 2


def gemm_operands(gemm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the factors of a GEMM, without zeros that Inductor's pad_mm appended."""
    arguments: Any = gemm.args[first_factor_index(gemm) :]
    a, b = arguments[:2]
    x, y = _unpadded(a, dim=1), _unpadded(b, dim=0)
    length = tensor(x).shape[-1]
    fits = compat.statically_known_true(length == tensor(y).shape[-2])
    return (x, y) if fits and not is_multiple_of_16(length) else (a, b)


def emit_operand(target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Emit a node that prepares an operand of the GEMM `like`, in the GEMM's checkpoint region.

    If the user's checkpoint policy saves the GEMM's result, the new node is not saved with it.
    Unless `target` is an operator of the dialect, the node is tagged as added by a pass.
    """
    node = graph.emit(like.graph, target, *args, like=like, **kwargs)
    if target not in OPERATORS:
        node.meta[ADDED_BY_PASS] = True
    if compat.must_save(node):
        del node.meta["recompute"]
    return node


def _unpadded(matrix: fx.Node, dim: int) -> fx.Node:
    """Undo zero padding at the end of dimension `dim`. Return matrices with other padding as is."""
    if not graph.is_call(matrix, aten.constant_pad_nd.default):
        return matrix
    arguments: Any = matrix.args
    x, pad, *fill = arguments
    is_static = all(isinstance(length, int) for length in pad)
    if any((*fill, *matrix.kwargs.values())) or not is_static:
        return matrix
    # The padding is (before, after) of the last dimension, then of the first dimension.
    ends = {1: pad[1], 0: pad[3] if len(pad) > 2 else 0}
    return x if ends[dim] == sum(map(abs, pad)) else matrix


def _elements(matrix: fx.Node) -> fx.Node:
    """Skip transposes, zero padding and reshapes of an operand; return the tensor before them."""
    is_batch = tensor(matrix).ndim == 3
    skip = graph.skip_batched_transposes if is_batch else graph.skip_transposes
    return graph.skip_reshapes(_unpadded(skip(matrix)[0], dim=0))


def _is_wgrad(gemm: fx.Node, layer: Layer) -> bool:
    rows, columns = tensor(gemm).shape[-2:]
    a, b = layer.in_features, layer.out_features
    known = compat.statically_known_true
    return (known(rows == a) and known(columns == b)) or (known(rows == b) and known(columns == a))


def why_unsuitable_size(out_features: Any, in_features: Any) -> str:
    """Return why a weight of these sizes stays in high precision, or '' if it can run in FP8."""
    weight = f"weight {out_features}×{in_features}"
    if not (is_multiple_of_16(out_features) and is_multiple_of_16(in_features)):
        return f"{weight}: both sizes must be multiples of 16"
    if is_narrow(out_features, in_features):
        return f"{weight}: too narrow to gain by FP8"
    return ""


def is_narrow(out_features: Any, in_features: Any) -> bool:
    """Whether a weight is too narrow to gain speed from FP8, as in an adapter of rank 16.

    The number of operations that a GEMM does per byte is about the smaller size. A GPU can do
    several hundred operations per byte that it reads, so memory bandwidth limits narrow GEMMs. FP8
    does not speed them up, and casts add kernel launches.
    """
    smaller, larger = sorted(map(compat.size_hint, (out_features, in_features)))
    return 0 < smaller <= MAX_NARROW_SIDE and larger >= MIN_NARROW_RATIO * smaller


def projects_down(gemm: fx.Node) -> bool:
    """Whether an `mm` multiplies [T, K] by a narrow [K, R], such as `A` of an adapter of rank R."""
    return _is_narrow_mm(gemm, rank_dim=1)


def projects_up(gemm: fx.Node) -> bool:
    """Whether an `mm` multiplies [T, R] by a narrow [R, N], such as `B` of an adapter of rank R."""
    return _is_narrow_mm(gemm, rank_dim=0)


def _is_narrow_mm(gemm: fx.Node, rank_dim: int) -> bool:
    if gemm.target is not aten.mm.default:
        return False
    shape = tensor(gemm.args[1]).shape  # type: ignore[arg-type]
    rank, width = shape[rank_dim], compat.size_hint(shape[1 - rank_dim])
    is_small = isinstance(rank, int) and 0 < rank <= MAX_NARROW_SIDE
    return is_small and rank * MIN_ADAPTER_RATIO <= width


def is_multiple_of_16(length: Any) -> bool:
    """Whether a length is known to be a multiple of 16, as FP8 tensor cores require."""
    known = compat.statically_known_true
    if known(length % CONTRACTION_MULTIPLE == 0):
        return True
    # A guard may have fixed a symbolic size to one value, for example to a weight's size.
    hint = compat.size_hint(length)
    return hint % CONTRACTION_MULTIPLE == 0 and known(length == hint)
