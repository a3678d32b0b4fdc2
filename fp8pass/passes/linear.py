"""Run linear layers in FP8: `mm`/`addmm` of a parameter -> quantize + scaled_mm.

For `y = x Wᵀ` the joint graph holds three GEMMs, forward `x Wᵀ`, dgrad `dY W` and wgrad `dYᵀ x`.
Each becomes a `scaled_mm`, which contracts the last dimension of both operands:

    before   y  = mm(x, t(W))
             dx = mm(dY, W)
             dW = mm(t(dY), x)
    after    y  = scaled_mm(q(x),   q(W))       q(·)  = quantize(·, scale)
             dx = scaled_mm(q(dY),  qᵀ(W))      qᵀ(·) = transpose(q(·))
             dW = scaled_mm(qᵀ(dY), qᵀ(x))      scale = scale(amax(·))

Scales are just in time (COAT 5.2, LLMQ 3). In the backward there is one for each tensor: codes are
used in two layouts, and no scale may vary along what a GEMM contracts. The forward needs one
layout: there each row of `x` and `W` has a scale of its own (torchao calls that rowwise), so that a
kernel that holds a row finds its scale and quantizes it in one pass. Every tensor is quantized once
per layout and kind of scale, however many GEMMs share it; what Inductor pads for one of them counts
as another tensor.
"""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.graph import aten, emit, tensor
from fp8pass.ops import CONTRACTION_MULTIPLE
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.context import Context
from fp8pass.plan import Linear

fp8 = torch.ops.fp8pass

OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_NAMES = ("lm_head", "embed_out", "unembed")
TOP_LEVEL_HEAD_NAMES = ("output",)
LOG_SOFTMAX = {
    aten.log.default,
    aten._log_softmax.default,
    aten.logsumexp.default,
    torch.ops.prims.prepare_softmax_online.default,
}

# Set on GEMMs that the user, or the default for output heads, keeps in high precision: what they
# save is kept as it is, too.
KEPT_BY_CHOICE = "fp8pass_kept_by_choice"

# Set on `scaled_mm`: the name of the GEMM that it replaced.
STANDS_FOR = "fp8pass_stands_for"

# Set on the GEMMs of linear layers: `forward`, `dgrad` or `wgrad`.
ROLE = "fp8pass_role"

# Set on `quantize`: of which layers the codes are an operand, as (module path, `input`, `weight` or
# `gradient`).
OPERAND_OF = "fp8pass_operand_of"


def original_name(node: fx.Node) -> str:
    """The name of a node, or of the GEMM that it replaced."""
    return str(node.meta.get(STANDS_FOR, node.name))


@dataclass
class Layer:
    """The GEMMs of one use of a linear layer."""

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


def quantize_linears(gm: fx.GraphModule, ctx: Context) -> None:
    """Rewrite every eligible linear layer; record all of them in the plan."""
    eligible: dict[fx.Node, Layer] = {}
    layers = find_layers(gm.graph, ctx.parameters)
    modules = [y.module for y in layers]
    warn_about_idle_patterns("skip", ctx.config.skip, "linear layer", modules)
    for layer in layers:
        reason = why_not(layer, ctx.config)
        roles: list[str] = []
        for role, gemm in layer.gemms():
            gemm.meta[ROLE] = role
            if not reason.text:
                eligible[gemm] = layer
                roles.append(role)
            elif reason.chosen:
                gemm.meta[KEPT_BY_CHOICE] = True
        if roles and not ctx.config.quantizes_linears:
            roles, reason = [], Reason("exact formats: rewritten, not rounded", chosen=True)
        ctx.plan.linears.append(describe(layer, tuple(roles), reason))
    quantizer = Quantizer(gm.graph, ctx.config)
    for node in list(gm.graph.nodes):  # in order: GEMMs share what the first of them quantizes
        if node in eligible:
            rewrite(gm.graph, node, eligible[node], quantizer)


def find_layers(g: fx.Graph, parameters: frozenset[fx.Node]) -> list[Layer]:
    """The linear layers of a graph: GEMMs with a parameter, and the GEMMs of their gradients."""
    backward = graph.tangent_dependent(g)
    layers: list[Layer] = []
    for node in g.nodes:
        if kind(node) is not Kind.GEMM or node.op != "call_function":
            continue
        if node not in backward:
            weight, other = _split_parameter(node, parameters)
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


def _operands(gemm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What a GEMM multiplies, without zeros that Inductor's pad_mm fills a contraction up with."""
    first = 1 if gemm.target in (aten.addmm.default, aten.baddbmm.default) else 0
    a, b = gemm.args[first], gemm.args[first + 1]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    x, y = _unpadded(a, dim=1), _unpadded(b, dim=0)
    length = tensor(x).shape[-1]
    stripped = length == tensor(y).shape[-2] and not _is_multiple(length)
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


def _split_parameter(
    gemm: fx.Node, parameters: frozenset[fx.Node]
) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand that is a parameter, and the other one."""
    a, b = _operands(gemm)
    for weight, other in ((b, a), (a, b)):
        if graph.source(weight) in parameters and tensor(graph.source(weight)).ndim >= 2:
            return weight, other
    return None, None


def _split_gradient(gemm: fx.Node, backward: set[fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
    """The operand known since the forward, and the one that is a gradient."""
    a, b = _operands(gemm)
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


@dataclass(frozen=True)
class Reason:
    """Why a layer stays in high precision; `chosen` by the user, its saved input does too."""

    text: str = ""
    chosen: bool = False


def why_not(layer: Layer, config: Config) -> Reason:
    """Why `layer` cannot or should not run in FP8; an empty reason where it can."""
    pattern = matching_pattern(layer.module, config.skip)
    if pattern is not None:
        return Reason(f"matches skip pattern {pattern!r}", chosen=True)
    if not config.quantize_lm_head and is_output_head(layer):
        return Reason("output head: quantize_lm_head=False", chosen=True)
    gemm, weight = layer.forward, tensor(layer.weight)
    if gemm.target not in (aten.mm.default, aten.addmm.default) or gemm.kwargs:
        return Reason(f"{gemm.target}: only plain 2-D GEMMs run in FP8")
    if gemm.target is aten.addmm.default and tensor(gemm.args[0]).ndim != 1:  # type: ignore[arg-type]
        return Reason("its bias is not a vector")
    if any(tensor(x).dtype not in OPERAND_DTYPES for x in _operands(gemm)):
        return Reason(f"{str(tensor(gemm).dtype).removeprefix('torch.')} operands")
    if any(size % CONTRACTION_MULTIPLE for size in weight.shape):
        return Reason(f"weight {graph.shape_text(weight)}: both sizes must be multiples of 16")
    rows, contracted = tensor(gemm).shape[0], tensor(_operands(gemm)[0]).shape[-1]
    if not _is_multiple(contracted):
        return Reason(f"contracts {contracted} elements: must be a multiple of 16")
    if compat.has_unbacked(rows):
        return Reason("the number of rows depends on data")
    if compat.statically_known_true(rows == 0):
        return Reason("empty input")
    if config.quantizes_linears and (lacking := hardware.why_no_fp8_gemm(weight.device)):
        return Reason(lacking)
    return Reason()


def matching_pattern(path: str, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that matches a module path, a module above it, or a suffix of either."""
    return next((p for p in patterns if _matches(path, p)), None)


def _matches(path: str, pattern: str) -> bool:
    if f".{pattern}." in f".{path}.":
        return True
    if not any(c in pattern for c in "*?["):
        return False  # most are plain paths, of which there may be hundreds
    forms = (f"{start}{pattern}{end}" for start in ("", "*.") for end in ("", ".*"))
    return any(fnmatch.fnmatchcase(path, form) for form in forms)


def warn_about_idle_patterns(
    option: str, patterns: tuple[str, ...], what: str, names: list[str]
) -> None:
    """Warn about patterns of an option that match none of the names that a graph has of `what`."""
    for pattern in patterns if names else ():
        if not any(_matches(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern, [*names, *_last_parts(names)], n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else f" They are: {names[:8]}."
            warnings.warn(
                f"{option} pattern {pattern!r} matches no {what} of this graph.{hint}",
                stacklevel=2,
            )


def _last_parts(names: list[str]) -> list[str]:
    return sorted({name.split(":")[0].rsplit(".", 1)[-1] for name in names})


def is_output_head(layer: Layer) -> bool:
    """Whether a layer computes logits: by name, by a tied embedding, or by what it feeds."""
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


class Quantizer:
    """Quantizes matrices of one graph, each once per layout and format."""

    def __init__(self, g: fx.Graph, config: Config) -> None:
        self.graph = g
        self.config = config
        self.backward = graph.tangent_dependent(g)
        self._quantized: dict[tuple[fx.Node, str, str, bool], tuple[fx.Node, fx.Node]] = {}
        self._row_amax: dict[tuple[fx.Node, str], fx.Node] = {}
        self._transposed: dict[fx.Node, fx.Node] = {}

    def __call__(
        self, matrix: fx.Node, layer: Layer, *, contract_rows: bool, by_row: bool, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Data and scale of an operand of `layer`, laid out with its contracted dimension last.

        `contract_rows` says that the GEMM contracts `matrix` over its first dimension, `by_row`
        that each row has a scale of its own.
        """
        base, flipped = graph.untransposed(matrix)
        if contract_rows == flipped and not _is_multiple(tensor(base).shape[-1]):
            # Codes are filled up with zeros where they are transposed.
            base, flipped = self._permuted(base, like), not flipped
        format = (
            self.config.gradient_format if base in self.backward else self.config.forward_format
        )
        # One tensor may be two matrices: a view of another shape has rows of its own.
        identity = graph.root(base), graph.shape_text(tensor(base))
        key = (*identity, format, by_row)
        if key not in self._quantized:
            amax = self._amax(base, identity, by_row=by_row, like=like)
            scale = self._emit(fp8.scale.default, amax, format, like=like)
            data = self._emit(fp8.quantize.default, base, scale, format, like=like)
            self._quantized[key] = data, scale
        data, scale = self._quantized[key]
        operand = layer.module, self._operand_name(base, layer)
        data.meta[OPERAND_OF] = tuple(dict.fromkeys((*data.meta.get(OPERAND_OF, ()), operand)))
        if contract_rows == flipped:
            return data, scale
        if data not in self._transposed:
            self._transposed[data] = self._emit(fp8.transpose.default, data, like=like)
        return self._transposed[data], scale

    def _permuted(self, base: fx.Node, like: fx.Node) -> fx.Node:
        if base not in self._transposed:
            permuted = self._emit(aten.permute.default, base, [1, 0], like=like)
            self._transposed[base] = permuted
            if base in self.backward:
                self.backward.add(permuted)
        return self._transposed[base]

    def _operand_name(self, base: fx.Node, layer: Layer) -> str:
        if base in self.backward:
            return "gradient"
        return "weight" if graph.source(base) is layer.weight else "input"

    def _amax(
        self, base: fx.Node, identity: tuple[fx.Node, str], *, by_row: bool, like: fx.Node
    ) -> fx.Node:
        """Largest magnitude of each row, or of all: of the rows' where the forward has them."""
        if by_row and identity not in self._row_amax:
            self._row_amax[identity] = self._emit(fp8.row_amax.default, base, like=like)
        rows = self._row_amax.get(identity)
        if by_row and rows is not None:
            return rows
        return self._emit(fp8.amax.default, rows or base, like=like)

    def _emit(self, target: Callable[..., Any], *args: Any, like: fx.Node) -> fx.Node:
        """A node in the checkpoint region of a GEMM; a policy to save that GEMM is not for it."""
        node = emit(self.graph, target, *args, like=like)
        if compat.must_save(node):
            del node.meta["recompute"]
        return node


def _is_multiple(length: Any) -> bool:
    """Whether FP8 tensor cores take contractions of such a length, as far as is known."""
    return compat.statically_known_true(length % CONTRACTION_MULTIPLE == 0)


def scales_by_row(gemm: fx.Node, config: Config) -> bool:
    """Whether the operands of a GEMM have a scale for each row: in the forward, where they can.

    Codes of which the GEMM takes the transpose have one scale, as in the backward.
    """
    if config.forward_scales != "row" or not config.quantizes_linears:
        return False
    a, b = (graph.untransposed(x)[1] for x in _operands(gemm))
    bf16 = tensor(gemm).dtype is torch.bfloat16  # what cuBLASLt and CUTLASS give for such scales
    return gemm.meta[ROLE] == "forward" and not a and b and bf16


def rewrite(g: fx.Graph, gemm: fx.Node, layer: Layer, quantizer: Quantizer) -> None:
    """Replace one GEMM of `layer` by its FP8 form."""
    a, b = _operands(gemm)
    bias = gemm.args[0] if gemm.target is aten.addmm.default else None
    by_row = scales_by_row(gemm, quantizer.config)
    with g.inserting_before(gemm):
        a_data, a_scale = quantizer(a, layer, contract_rows=False, by_row=by_row, like=gemm)
        b_data, b_scale = quantizer(b, layer, contract_rows=True, by_row=by_row, like=gemm)
        product = emit(
            g,
            fp8.scaled_mm.default,
            *(a_data, a_scale, b_data, b_scale, bias, tensor(gemm).dtype),
            like=gemm,
        )
    product.meta[STANDS_FOR] = gemm.name
    product.meta[graph.REPLACED] = gemm.target.__name__  # type: ignore[union-attr]
    product.meta[ROLE] = gemm.meta[ROLE]
    gemm.replace_all_uses_with(product)
    g.erase_node(gemm)
    if gemm in quantizer.backward:
        quantizer.backward.add(product)


def describe(layer: Layer, rewritten: tuple[str, ...], reason: Reason) -> Linear:
    """The plan's entry for a layer."""
    out_features, in_features = tensor(layer.weight).shape[:2]
    if tensor(layer.input).shape[-1] == out_features:  # the weight is stored as [in, out]
        in_features, out_features = out_features, in_features
    rows = tensor(layer.input).shape[0]
    unique = tuple(dict.fromkeys(rewritten))
    sizes = int(in_features), int(out_features)
    return Linear(layer.module, str(rows), *sizes, unique, reason.text, reason.chosen)
