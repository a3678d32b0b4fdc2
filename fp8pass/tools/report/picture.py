"""Draw a compiled graph: operators in columns by module, and the tensors between them.

Columns follow the order in which the forward runs the modules. A backward operator is in the column
of its forward operator. If PyTorch adds several gradients of a value, the sum has no module. It is
in the column of the first module that reads the value.

Views, casts, constants, sizes and parameters are not drawn, and edges pass through them, unless
they are saved for the backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.compilation import CompiledGraph
from fp8pass.dialect.quantization import ROW, TENSOR, block_text, parse
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.flops import is_fp8_gemm
from fp8pass.graph.names import short_operator_name
from fp8pass.graph.patterns import is_dequantized_saved_value
from fp8pass.graph.tags import COPIED_VALUE, INPUT_NAME, ROLE
from fp8pass.tools.explanation_data import describe_operands

fp8 = torch.ops.fp8pass

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in \S+\n\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)

HIDDEN = (Kind.VIEW, Kind.CREATION, Kind.SYMBOL)

OPERATOR_KINDS = {
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
    id: str
    label: str
    kind: str  # a key of `OPERATOR_KINDS`
    module: str
    column: int
    backward: bool
    # Text by title, e.g. `shape`, `dtype` or `saved as`.
    details: dict[str, str]


@dataclass(frozen=True)
class Edge:
    """A tensor that one operator computes and another operator uses."""

    # Ids of operators.
    source: str
    target: str
    crosses: bool  # from the forward to the backward
    # Saved bytes on the tensor's first edge, and 0 on other edges.
    bytes: int


@dataclass(frozen=True)
class DrawnLayer:
    """`count` equal numbered layers. Only the first is drawn."""

    first: str
    last: str
    count: int
    columns: tuple[int, ...]


@dataclass
class Picture:
    """A drawing of a graph. `columns` has the path of each column's module."""

    columns: list[str]
    operators: list[DrawnOperator]
    edges: list[Edge]
    layers: list[DrawnLayer] = field(default_factory=list)


def draw(compiled: CompiledGraph) -> Picture:
    drawing = _Drawing(compiled)
    operators = [drawing.operator(n) for n in drawing.drawn]
    return Picture(drawing.modules, operators, list(drawing.edges()))


def find_forward_nodes(compiled: CompiledGraph) -> set[fx.Node]:
    if not any(compat.is_tangent(n) for n in compiled.gm.graph.nodes):
        return set(compiled.gm.graph.nodes)
    return graph.ancestors([*_find_outputs(compiled), *compiled.ctx.saved])


def _find_outputs(compiled: CompiledGraph) -> list[fx.Node]:
    """Return the forward's outputs; all outputs if the graph has no backward."""
    results = graph.outputs(compiled.gm.graph)[: compiled.ctx.facts.num_fwd_outputs or None]
    return [n for n in results if isinstance(n, fx.Node)]


class _Columns:
    """The columns of a picture. Forward nodes create columns, backward nodes are put into them."""

    def __init__(self, forward: list[fx.Node]) -> None:
        self.modules: list[str] = []
        self._by_origin: dict[object, int] = {}
        for node in forward:
            path = graph.module_path(node)
            if not self.modules or self.modules[-1] != path:
                self.modules.append(path)
            column, sequence = len(self.modules) - 1, node.meta.get("seq_nr")
            steps = () if sequence is None else ((path, sequence), ("", sequence))
            self._by_origin.update(dict.fromkeys((node.name, path, *steps), column))

    def find(self, node: fx.Node) -> int:
        """Return the column of a forward node with the same name, autograd step or module."""
        path, sequence = graph.module_path(node), node.meta.get("seq_nr")
        carried = node.meta.get(COPIED_VALUE)
        for origin in (node.name, carried, (path, sequence), path or None, ("", sequence)):
            if origin in self._by_origin:
                return self._by_origin[origin]
        return max(len(self.modules) - 1, 0)


class _Drawing:
    def __init__(self, compiled: CompiledGraph) -> None:
        self.ctx, plan = compiled.ctx, compiled.plan
        self.crossing = set(self.ctx.saved)
        self.forward = find_forward_nodes(compiled)
        self.drawn = [n for n in compiled.gm.graph.nodes if self._is_drawn(n)]
        drawn = set(self.drawn)
        self.operands = {n: _find_operands(n, drawn) for n in self.drawn}
        computed = graph.ancestors(_find_outputs(compiled))
        columns = _Columns([n for n in self.drawn if n in computed])
        self.modules = columns.modules
        self.column: dict[fx.Node, int] = {}
        for node in self.drawn:
            terms = [self.column[n] for n in self.operands[node] if n not in self.forward]
            is_sum = self._is_gradient_sum(node) and terms
            self.column[node] = min(terms) if is_sum else columns.find(node)
        self.decisions = {n.name: d for n, d in self.ctx.decisions.items()}
        saved = describe_operands(compiled)
        self.saved = {s.name: s for s in saved}
        self.saved_tensors = {t.name: s for s in saved for t in s.tensors}
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

    def _is_gradient_sum(self, node: fx.Node) -> bool:
        is_sum = node.target is torch.ops.aten.add.Tensor and node not in self.forward
        return is_sum and not graph.module_path(node)

    def operator(self, node: fx.Node) -> DrawnOperator:
        column = self.column[node]
        module = self.modules[column] if self._is_gradient_sum(node) else graph.module_path(node)
        return DrawnOperator(
            id=node.name,
            label=node.meta.get(INPUT_NAME) or _make_label(node),
            kind=self._find_kind(node),
            module=module,
            column=column,
            backward=node not in self.forward,
            details={name: text for name, text in self._list_details(node) if text},
        )

    def edges(self) -> Iterator[Edge]:
        counted = set()
        for node in self.drawn:
            for source in self.operands[node]:
                crosses = source in self.crossing and node not in self.forward
                saved = self.saved_tensors.get(source.name)
                first = crosses and source not in counted and saved is not None and saved.bytes
                if first:
                    counted.add(source)
                yield Edge(source.name, node.name, crosses, graph.nbytes(source) if first else 0)

    def _find_kind(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input"
        if is_dequantized_saved_value(node):
            return "dequantize"
        if COPIED_VALUE in node.meta and node not in self.forward:
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

    def _list_details(self, node: fx.Node) -> Iterator[tuple[str, str]]:
        value = graph.value(node)
        yield "operator", str(graph.operator_of(node).target)
        if value is not None:
            yield "shape", graph.shape_text(value)
            yield "dtype", graph.dtype_text(value.dtype)
        yield from _describe_quantization(node)
        yield "role", node.meta.get(ROLE, "")
        yield from self._describe_saving(node)
        linear = self.linears.get(graph.module_path(node))
        if linear is not None and kind(node) is Kind.GEMM:
            yield "in high precision because", linear.reason
        yield "source", find_source_line(node)

    def _describe_saving(self, node: fx.Node) -> Iterator[tuple[str, str]]:
        name = node.meta.get(COPIED_VALUE, node.name) if node not in self.forward else node.name
        saved = self.saved.get(name) or self.saved_tensors.get(node.name)
        if saved is not None:
            yield "saves", saved.name if saved.name != node.name else ""
            yield "in keep_exact", saved.value
            yield "saved as", saved.saved_as
            yield "saved bytes", f"{saved.bytes:,}"
            if saved.expected_error:
                yield "expected gradient error", f"{saved.expected_error:.2%}"
        decision = self.decisions.get(saved.name if saved else name)
        if decision is not None:
            reason = decision.reason
            yield "in the backward", f"recomputed: {reason}" if decision.recomputed else reason


def _find_operands(node: fx.Node, drawn: set[fx.Node]) -> list[fx.Node]:
    """Return the drawn nodes that a node reads, directly or through nodes that are not drawn."""
    found = graph.ancestors(node.all_input_nodes, passes=lambda n: n not in drawn)
    return sorted(found & drawn)


def _make_label(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "gradient of an output" if compat.is_tangent(node) else str(node.target)
    return "attention" if kind(node) is Kind.ATTENTION else short_operator_name(node)


def _describe_quantization(node: fx.Node) -> Iterator[tuple[str, str]]:
    texts = {
        fp8.quantize.default: slice(2, 3),
        fp8.dequantize.default: slice(2, 3),
        fp8.scale.default: slice(1, 2),
        fp8.scaled_mm.default: slice(7, 9),
    }
    if node.target in texts:
        found = [parse(str(text)) for text in node.args[texts[node.target]]]
        yield "format", " × ".join(how.format.name for how in found)
        names = {TENSOR: "one for the tensor", ROW: "one for each row"}
        scales = (names.get(how.block) or f"one for {block_text(how.block)}" for how in found)
        yield "scales", " × ".join(scales)


def find_source_line(node: fx.Node) -> str:
    """Return the innermost line of the user's code that created a node, or ''.

    For example `model.py:54  q = self.q(x)`.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    frame = ([f for f in frames if not f["file"].startswith(_TORCH)] or frames)[-1]
    file = Path(frame["file"])
    if "site-packages" in file.parts:
        name = frame["file"].rsplit("site-packages/", 1)[-1]
    else:
        name = str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
    return f"{name}:{frame['line']}  {frame['code'].strip()}"
