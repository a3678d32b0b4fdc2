"""The sampled version of a compiled graph: run op by op, measuring every tensor it quantizes.

A Dynamo graph is compiled twice, as usual and with `Sampler` as its inner compiler, and the step
decides which of the two runs. The passes give both the same graphs, so that the sampled one has
the numbers of the other, up to the rounding of what generated code keeps in registers. As each has
a backward of its own, a backward is always of the version that its forward was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.codegen.lowering import lower
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.names import operator_name
from fp8pass.graph.tags import OPERAND_OF
from fp8pass.monitor.statistics import Quantized, measure

fp8 = torch.ops.fp8pass


class Sink(Protocol):
    """What a sampler tells of what it measured."""

    def module_of(self, weight: Tensor) -> str | None:
        """Path in the model of the module that has a weight, None where that is unknown."""

    def record(self, prefix: str, name: Quantized, totals: Tensor) -> None:
        """Add the statistics of one tensor in a part of the model that `prefix` leads to."""


class Sampler:
    """An inner compiler for `compile_fx`: interprets the halves of one Dynamo graph, and measures.

    Attributes:
        trains: whether the graph turned out to have a backward.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.trains = False
        # Where in the model the forwards lie whose backward has not run. One graph may serve many
        # blocks that are compiled on their own; their backwards run in the opposite order.
        self._prefixes: list[str] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The graph as a callable on a list of inputs."""
        half = compat.half_of(kwargs)
        if half == "inference":
            return compat.interpret(gm)
        self.trains = True
        lower(gm, only=fp8.scaled_mm.default)  # the GPU's GEMM, not an emulated one
        compat.draw_from_seeds(gm)
        recorder = Recorder(gm, self.sink)

        def run(arguments: list[Any]) -> Any:
            if half == "backward":
                recorder.prefix = self._prefixes.pop() if self._prefixes else ""
            else:
                recorder.prefix = recorder.find_prefix(arguments)
                self._prefixes.append(recorder.prefix)
            return recorder.boxed_run(arguments)

        return compat.boxed(run)


class Recorder(fx.Interpreter):
    """Runs one graph, and measures what it quantizes."""

    def __init__(self, gm: fx.GraphModule, sink: Sink) -> None:
        super().__init__(gm)
        self.sink = sink
        self.prefix = ""
        self.names = quantized_by(gm.graph)
        self._weights = _weights(gm.graph)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; what a quantize node reads is measured."""
        names = self.names.get(n, ())
        if names:
            x, scale = (self.env[operand] for operand in n.all_input_nodes)
            totals = measure(x, scale, FORMATS[names[0].format], _group(n, x))
            for name in names:
                self.sink.record(self.prefix, name, totals)
        return super().run_node(n)

    def find_prefix(self, arguments: Sequence[Any]) -> str:
        """The path from the model to the part of it that runs with these arguments.

        That is what the model's name of a weight has before the name that the graph has for it.
        """
        for index, module in self._weights:
            path = self.sink.module_of(arguments[index])
            if path is not None and path.endswith(module):
                return path.removesuffix(module).rstrip(".")
        return ""


def quantized_by(g: fx.Graph) -> dict[fx.Node, list[Quantized]]:
    """What each quantize node of a graph quantizes, an operand of several layers by all its names.

    Of several values that one module saves of one operator, all but the first are numbered.
    """
    found: dict[fx.Node, list[Quantized]] = {}
    counts: dict[tuple[str, str], int] = {}
    for node in g.nodes:
        if graph.is_call(node, fp8.quantize.default):
            names: list[tuple[str, str]] = list(node.meta.get(OPERAND_OF, ()))
        elif graph.is_call(node, fp8.quantize_groups.default) and node.args[4:] in ((), (0,)):
            # Codes that are packed in several planes are measured where they begin.
            module, tensor = graph.module_path(node), f"saved {operator_name(_value(node))}"
            number = counts[module, tensor] = counts.get((module, tensor), 0) + 1
            names = [(module, tensor if number == 1 else f"{tensor} {number}")]
        else:
            continue
        format, dtype = str(node.args[2]), graph.tensor(_value(node)).dtype
        if not FORMATS[format].lossless:
            found[node] = [Quantized(*n, _scales(node), format, dtype) for n in names]
    return found


def _value(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _scales(node: fx.Node) -> str:
    """What shares a scale, for people."""
    if graph.is_call(node, fp8.quantize_groups.default):
        return f"1×{node.args[3]}"
    return "row" if graph.tensor(node.args[1]).ndim else "tensor"  # type: ignore[arg-type]


def _group(node: fx.Node, x: Tensor) -> int:
    """How many elements of a row share a scale."""
    is_grouped = graph.is_call(node, fp8.quantize_groups.default)
    return int(node.args[3]) if is_grouped else x.shape[-1]  # type: ignore[arg-type]


def _weights(g: fx.Graph) -> list[tuple[int, str]]:
    """Inputs of a graph that are weights of linear layers, with the paths of those."""
    placeholders = [n for n in g.nodes if n.op == "placeholder"]
    return [
        (placeholders.index(weight), module)
        for node in g.nodes
        for module, operand in node.meta.get(OPERAND_OF, ())
        if operand == "weight" and (weight := graph.source(_value(node))) in placeholders
    ]
