"""A compiled graph as a picture: operators in columns by module, with the tensors between them.

Modules go from left to right in the order in which the forward runs them, with a column for each
run. Operators of the backward are in the column of the forward operator that they belong to.

Views, casts, constants, sizes and parameters are half of a graph and compute nothing of interest:
they are not drawn, edges pass through them. Values that the backward uses are always drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.compilation import CompiledGraph
from fp8pass.dialect.quantization import ROW, TENSOR, Block, block_text, parse
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.flops import is_fp8_gemm
from fp8pass.graph.names import operator_name
from fp8pass.graph.patterns import is_dequantized_saved_value
from fp8pass.graph.tags import CARRIES, ROLE
from fp8pass.tools.report.sources import source_line

fp8 = torch.ops.fp8pass

HIDDEN = (Kind.VIEW, Kind.CREATION, Kind.SYMBOL)

KINDS = {
    "fp8": "linear layer in FP8",
    "linear": "other matrix product",
    "attention": "attention",
    "nonlinear": "non-linear",
    "quantize": "quantize",
    "dequantize": "dequantize",
    "recomputed": "recomputed",
    "input": "input",
}


@dataclass(frozen=True)
class DrawnOperator:
    """One operator that is drawn.

    Attributes:
        id: name of its node.
        label: the text on it.
        kind: a key of `KINDS`.
        module: path of the module it comes from.
        column: number of its column.
        backward: whether it runs in the backward.
        details: further facts, each with its name.
    """

    id: str
    label: str
    kind: str
    module: str
    column: int
    backward: bool
    details: dict[str, str]


@dataclass(frozen=True)
class Edge:
    """A tensor that one operator computes and another one uses.

    Attributes:
        source, target: ids of the operators.
        crosses: whether it goes from the forward to the backward.
        bytes: bytes kept for that, counted at the first edge of the tensor only.
    """

    source: str
    target: str
    crosses: bool
    bytes: int


@dataclass(frozen=True)
class DrawnLayer:
    """`count` equal numbered layers of a model, of which the first is drawn."""

    first: str
    last: str
    count: int
    columns: tuple[int, ...]


@dataclass
class Picture:
    """Operators in columns, each column with the path of its module, and edges between them."""

    columns: list[str]
    operators: list[DrawnOperator]
    edges: list[Edge]
    layers: list[DrawnLayer] = field(default_factory=list)


def draw(compiled: CompiledGraph) -> Picture:
    """The picture of one graph, with every layer."""
    drawing = _Drawing(compiled)
    operators = [drawing.operator(n) for n in drawing.drawn]
    return Picture(drawing.columns.modules, operators, list(drawing.edges()))


def forward_nodes(compiled: CompiledGraph) -> set[fx.Node]:
    """The nodes that run in the forward: all that outputs and kept tensors are computed from."""
    if not any(compat.is_tangent(n) for n in compiled.gm.graph.nodes):
        return set(compiled.gm.graph.nodes)
    return graph.ancestors([*_forward_outputs(compiled), *compiled.ctx.saved])


def _forward_outputs(compiled: CompiledGraph) -> list[fx.Node]:
    """The outputs of the forward; all outputs for a graph without a backward."""
    results = graph.outputs(compiled.gm.graph)[: compiled.ctx.facts.num_fwd_outputs or None]
    return [n for n in results if isinstance(n, fx.Node)]


class _Columns:
    """The column of each node.

    The nodes of the forward make the columns. Those of the backward, and those computed for it
    alone, go into the column that they belong to.
    """

    def __init__(self, forward: list[fx.Node]) -> None:
        self.modules: list[str] = []
        self._by_origin: dict[object, int] = {}
        for node in forward:
            path = graph.module_path(node)
            if not self.modules or self.modules[-1] != path:
                self.modules.append(path)
            column, sequence = len(self.modules) - 1, node.meta.get("seq_nr")
            for origin in (node.name, (path, sequence), path, ("", sequence)):
                self._by_origin[origin] = column

    def __getitem__(self, node: fx.Node) -> int:
        """The column of the same node, the same step of autograd, or the same module."""
        path, sequence = graph.module_path(node), node.meta.get("seq_nr")
        carried = node.meta.get(CARRIES)
        for origin in (node.name, carried, (path, sequence), path or None, ("", sequence)):
            if origin in self._by_origin:
                return self._by_origin[origin]
        return max(len(self.modules) - 1, 0)


class _Drawing:
    """The nodes of a graph that are drawn, and the details shown of each."""

    def __init__(self, compiled: CompiledGraph) -> None:
        self.ctx, plan = compiled.ctx, compiled.plan
        self.crossing = set(self.ctx.saved)
        self.forward = forward_nodes(compiled)
        self.drawn = [n for n in compiled.gm.graph.nodes if self._is_drawn(n)]
        computed = graph.ancestors(_forward_outputs(compiled))
        self.columns = _Columns([n for n in self.drawn if n in computed])
        self.decisions = {n.name: d for n, d in self.ctx.decisions.items()}
        self.saved = {s.name: s for s in plan.saved}
        self.kept = {t.name: s for s in plan.saved for t in s.tensors}
        self.linears = {y.module: y for y in plan.linears}

    def _is_drawn(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return graph.value(node) is not None and node not in self.ctx.facts.parameters
        if node.op != "call_function" or compat.is_sym_node(node):
            return False
        if node in self.crossing:
            return True
        hidden = graph.is_getitem(node) or node.target in graph.CASTS or kind(node) in HIDDEN
        return not hidden

    def operator(self, node: fx.Node) -> DrawnOperator:
        """The drawn operator of a node."""
        return DrawnOperator(
            id=node.name,
            label=_label(node),
            kind=self._kind(node),
            module=graph.module_path(node),
            column=self.columns[node],
            backward=node not in self.forward,
            details={name: text for name, text in self._details(node) if text},
        )

    def edges(self) -> Iterator[Edge]:
        """The edges between drawn operators, each once."""
        drawn, counted = set(self.drawn), set()
        for node in self.drawn:
            for source in dict.fromkeys(_drawn_operands(node, drawn)):
                crosses = source in self.crossing and node not in self.forward
                saved = self.kept.get(source.name)
                first = crosses and source not in counted and saved is not None and saved.bytes
                if first:
                    counted.add(source)
                yield Edge(source.name, node.name, crosses, graph.nbytes(source) if first else 0)

    def _kind(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input"
        if is_dequantized_saved_value(node):
            return "dequantize"
        if CARRIES in node.meta and node not in self.forward:
            return "recomputed"
        if is_fp8_gemm(node):
            return "fp8"
        named = {
            Kind.GEMM: "linear",
            Kind.CONVOLUTION: "linear",
            Kind.ATTENTION: "attention",
            Kind.QUANTIZE: "quantize",
        }
        return named.get(kind(node), "nonlinear")

    def _details(self, node: fx.Node) -> Iterator[tuple[str, str]]:
        value = graph.value(node)
        yield "operator", str(graph.operator_of(node).target)
        if value is not None:
            yield "shape", graph.shape_text(value)
            yield "dtype", graph.dtype_text(value.dtype)
        yield from _quantization(node)
        yield "role", node.meta.get(ROLE, "")
        yield from self._saving(node)
        linear = self.linears.get(graph.module_path(node))
        if linear is not None and kind(node) is Kind.GEMM:
            yield "in high precision because", linear.reason
        yield "source", source_line(node)

    def _saving(self, node: fx.Node) -> Iterator[tuple[str, str]]:
        """How a value reaches the backward, and why so."""
        name = node.meta.get(CARRIES, node.name) if node not in self.forward else node.name
        saved = self.saved.get(name) or self.kept.get(node.name)
        if saved is not None:
            yield "keeps", saved.name if saved.name != node.name else ""
            yield "in keep_exact", saved.value
            yield "kept as", saved.kept_as
            yield "kept bytes", f"{saved.bytes:,}"
            if saved.expected_error:
                yield "expected gradient error", f"{saved.expected_error:.2%}"
        decision = self.decisions.get(saved.name if saved else name)
        if decision is not None:
            reason = decision.reason
            yield "in the backward", f"recomputed: {reason}" if decision.recomputed else reason


def _drawn_operands(node: fx.Node, drawn: set[fx.Node]) -> Iterator[fx.Node]:
    """The drawn operators whose results `node` uses, also through nodes that are not drawn."""
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        operand = pending.pop()
        if operand in drawn:
            yield operand
        elif operand not in seen:
            seen.add(operand)
            pending.extend(operand.all_input_nodes)


def _label(node: fx.Node) -> str:
    if node.op == "placeholder":
        return str(node.target)
    if kind(node) is Kind.ATTENTION:
        return "attention"
    _, _, name = operator_name(node).partition(".")
    return name.split(".")[0] or str(getattr(node.target, "__name__", node.target))


def _quantization(node: fx.Node) -> Iterator[tuple[str, str]]:
    """Formats and scales of the data that an operator of the dialect reads or computes."""
    of_operator = {
        fp8.quantize.default: slice(2, 3),
        fp8.dequantize.default: slice(2, 3),
        fp8.scale.default: slice(1, 2),
        fp8.scaled_mm.default: slice(7, 9),
    }
    if node.target in of_operator:
        found = [parse(str(text)) for text in node.args[of_operator[node.target]]]
        yield "format", " × ".join(how.format.name for how in found)
        yield "scales", " × ".join(_scales_text(how.block) for how in found)


def _scales_text(block: Block) -> str:
    names = {TENSOR: "one for the tensor", ROW: "one for each row"}
    return names.get(block) or f"one for {block_text(block)}"
