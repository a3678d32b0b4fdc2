"""The sampled version of a compiled graph: run op by op, measuring every tensor it quantizes.

A Dynamo graph is compiled twice, as usual and with `Sampler` as its inner compiler, and the step
decides which of the two runs. The passes give both the same graphs, so that both compute the same
numbers, up to the rounding of values that generated code keeps in registers. Each version has a
backward of its own, so that forward and backward are always of the same version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.codegen.lowering import lower
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dialect.quantization import block_text
from fp8pass.graph.names import operator_name
from fp8pass.graph.patterns import (
    is_quantized_operand,
    is_quantized_saved_value,
    quantization_of,
)
from fp8pass.graph.tags import OPERAND_OF
from fp8pass.stability.monitor.statistics import TensorName, measure

fp8 = torch.ops.fp8pass

# Forwards of a graph that may still have a backward: blocks times micro-batches that wait at once.
MOST_FORWARDS = 4096
# After so many forwards, references to memory that has been freed are dropped.
COMPACTED_EVERY = 64


class Sink(Protocol):
    """The receiver of a sampler's measurements: a `Monitor`."""

    def module_of(self, weight: Tensor) -> str | None:
        """Path in the model of the module that has a weight; None if unknown."""

    def saw(self, weight: Tensor) -> None:
        """Note that a sampled forward runs with a weight as it is now."""

    def record(self, prefix: str, name: TensorName, totals: Tensor) -> None:
        """Add the statistics of one tensor in the part of the model with the path `prefix`."""


class Sampler:
    """An inner compiler for `compile_fx`: interprets the halves of one Dynamo graph, and measures.

    Attributes:
        trains: whether the graph turned out to have a backward.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.trains = False
        # A graph may serve many blocks that are compiled on their own.
        self._forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self._count = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The graph as a callable on a list of inputs."""
        half = compat.half_of(kwargs)
        if half == "inference":
            return compat.interpret(gm)
        self.trains = True
        for gemm, operator in OPERATORS.items():
            if operator.multiplies:  # so that the GPU's GEMM runs, not the emulated one
                lower(gm, only=gemm)
        interpreter = MeasuringInterpreter(gm, self.sink)

        def run(arguments: list[Any]) -> Any:
            if half == "backward":
                interpreter.prefix = self._prefix_of_backward(arguments)
                return interpreter.boxed_run(arguments)
            interpreter.prefix = interpreter.find_prefix(arguments)
            for index, _ in interpreter.weights[:1]:
                self.sink.saw(arguments[index])
            given = _memory(arguments)
            results = interpreter.boxed_run(arguments)
            self._note(Forward(interpreter.prefix, given, _memory(results) - given))
            return results

        return compat.interpret(gm, run)

    def _note(self, forward: Forward) -> None:
        """Remember a forward. Many never have a backward, and must not hold what they ran with."""
        self._forwards.append(forward)
        self._count += 1
        if self._count % COMPACTED_EVERY == 0:
            shared: dict[frozenset[compat.StorageWeakRef], frozenset[compat.StorageWeakRef]] = {}
            compacted = [x.without_freed(shared) for x in self._forwards]
            self._forwards = deque(compacted, maxlen=MOST_FORWARDS)

    def _prefix_of_backward(self, arguments: Sequence[Any]) -> str:
        """The path of the forward that shares most memory with a backward, or of the last one."""
        given = _memory(arguments)
        found = max(
            reversed(self._forwards),
            key=lambda x: (len(given & x.results), len(given & x.arguments)),
            default=None,
        )
        if found and not given & (found.results | found.arguments):
            self._forwards.remove(found)  # saved tensors were copied: take forwards in reverse
        return found.prefix if found else ""


@dataclass(frozen=True)
class Forward:
    """A forward whose backward may follow, in any order and more than once.

    Attributes:
        prefix: the path of the part of the model that ran.
        arguments: the memory of its inputs.
        results: the memory that it made, for its caller and for its backward.
    """

    prefix: str
    arguments: frozenset[compat.StorageWeakRef]
    results: frozenset[compat.StorageWeakRef]

    def without_freed(
        self, shared: dict[frozenset[compat.StorageWeakRef], frozenset[compat.StorageWeakRef]]
    ) -> Forward:
        """The forward without memory that has been freed; equal sets are one, from `shared`."""
        arguments, results = (
            frozenset(x for x in memory if not x.expired())
            for memory in (self.arguments, self.results)
        )
        return Forward(self.prefix, shared.setdefault(arguments, arguments), results)


def _memory(values: Sequence[Any]) -> frozenset[compat.StorageWeakRef]:
    return frozenset(compat.weak_storage(x) for x in values if isinstance(x, Tensor))


class MeasuringInterpreter(fx.Interpreter):
    """Runs one graph, and measures the tensors that it quantizes."""

    def __init__(self, gm: fx.GraphModule, sink: Sink) -> None:
        super().__init__(gm)
        self.sink = sink
        self.prefix = ""
        self.names = quantized_by(gm.graph)
        self.weights = _weights(gm.graph)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; measures the operand of a quantize node."""
        names = self.names.get(n, ())
        if names:
            x, scale = (self.env[operand] for operand in n.all_input_nodes)
            totals = measure(x, scale, quantization_of(n).format, _group(n, x))
            for name in names:
                self.sink.record(self.prefix, name, totals)
        return super().run_node(n)

    def find_prefix(self, arguments: Sequence[Any]) -> str:
        """The path of the part of the model that runs with these arguments.

        It is the path of a weight's module in the model without its path in the graph.
        """
        for index, module in self.weights:
            path = self.sink.module_of(arguments[index])
            if path is not None and path.endswith(module):
                return path.removesuffix(module).rstrip(".")
        return ""


def quantized_by(g: fx.Graph) -> dict[fx.Node, list[TensorName]]:
    """The tensors that each quantize node of a graph quantizes, by name.

    An operand of several layers has several names. If a module saves several values of the same
    operator, all but the first are numbered.
    """
    found: dict[fx.Node, list[TensorName]] = {}
    counts: dict[tuple[str, str], int] = {}
    for node in g.nodes:
        if is_quantized_operand(node):
            names: list[tuple[str, str]] = list(node.meta.get(OPERAND_OF, ()))
        elif is_quantized_saved_value(node) and node.args[3:] in ((), (0,)):
            # Codes that are packed in several planes are measured at the first plane.
            module, tensor = graph.module_path(node), f"saved {operator_name(_value(node))}"
            number = counts[module, tensor] = counts.get((module, tensor), 0) + 1
            names = [(module, tensor if number == 1 else f"{tensor} {number}")]
        else:
            continue
        how, dtype = quantization_of(node), graph.tensor(_value(node)).dtype
        if not how.format.lossless:
            scales = block_text(how.block)
            found[node] = [TensorName(*n, scales, how.format.name, dtype) for n in names]
    return found


def _value(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _group(node: fx.Node, x: Tensor) -> int:
    """Number of elements of a row that share a scale."""
    return quantization_of(node).block[1] or x.shape[-1]


def _weights(g: fx.Graph) -> list[tuple[int, str]]:
    """Positions of the inputs that are weights of linear layers, with the layers' paths."""
    placeholders = [n for n in g.nodes if n.op == "placeholder"]
    return [
        (placeholders.index(weight), module)
        for node in g.nodes
        if node.op == "call_function"  # codes that a graph is given come from no weight in it
        for module, operand in node.meta.get(OPERAND_OF, ())
        if operand == "weight" and (weight := graph.source(_value(node))) in placeholders
    ]
