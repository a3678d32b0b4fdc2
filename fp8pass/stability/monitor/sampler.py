"""Versions of each graph: normal, sampled (measures quantized tensors), careful (high precision).

A Dynamo graph is compiled normally, and with `Sampler` as its inner compiler. The sampled version
runs op by op. It computes the same numbers, except that fused code does not round intermediate
values. Each version has its own backward graph, so the forward and the backward of a step match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import compat, graph, hardware
from fp8pass.codegen.lowering import lower
from fp8pass.config import Config
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dialect.quantization import block_text
from fp8pass.graph.names import operator_name
from fp8pass.graph.patterns import is_quantized_operand, is_quantized_saved_value, quantization_of
from fp8pass.graph.tags import OPERAND_OF
from fp8pass.hooks import CompiledGraph, CompileVersion, Hooks, Program, Wrap
from fp8pass.option_checks import ConfigError
from fp8pass.stability.monitor.monitor import Monitor
from fp8pass.stability.monitor.statistics import TensorName, measure

fp8 = torch.ops.fp8pass

# Maximum number of remembered forwards: one for each pair of a block and a micro-batch in flight.
MOST_FORWARDS = 4096
# After this number of forwards, the sampler drops references to freed memory.
COMPACT_EVERY = 64


class Sampler:
    """Inner compiler for `compile_fx` that interprets a graph and measures its tensors.

    Attributes:
        trains: whether the graph has a backward; known after compilation.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.trains = False
        # Blocks may share a graph, which then runs one forward for each block.
        self._forwards: deque[SampledForward] = deque(maxlen=MOST_FORWARDS)
        self._count = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind = compat.half_of(kwargs)
        if kind == "inference":
            return compat.interpret(gm)
        self.trains = True
        for gemm, operator in OPERATORS.items():
            if operator.multiplies:  # run the GPU's GEMM instead of an emulation
                lower(gm, only=gemm)
        interpreter = MeasuringInterpreter(gm, self.monitor)

        def run(arguments: list[Any]) -> Any:
            if kind == "backward":
                interpreter.prefix = self._find_forward_prefix(arguments)
                return interpreter.boxed_run(arguments)
            interpreter.prefix = interpreter.find_prefix(arguments)
            for index, _ in interpreter.weights[:1]:
                self.monitor.saw(arguments[index])
            memory = _collect_memory(arguments)
            results = interpreter.boxed_run(arguments)
            self._add(SampledForward(interpreter.prefix, memory, _collect_memory(results) - memory))
            return results

        return compat.interpret(gm, run)

    def _add(self, forward: SampledForward) -> None:
        """Remember a forward by weak references, because many forwards never have a backward."""
        self._forwards.append(forward)
        self._count += 1
        if self._count % COMPACT_EVERY == 0:
            shared: dict[frozenset[compat.StorageWeakRef], frozenset[compat.StorageWeakRef]] = {}
            compacted = [x.drop_freed(shared) for x in self._forwards]
            self._forwards = deque(compacted, maxlen=MOST_FORWARDS)

    def _find_forward_prefix(self, arguments: Sequence[Any]) -> str:
        """Return the path of the forward that ran before the backward with these `arguments`.

        This is the forward that shares the most memory with the arguments. If no forward shares
        memory with them, it is the last remembered forward.
        """
        memory = _collect_memory(arguments)
        found = max(
            reversed(self._forwards),
            key=lambda x: (len(memory & x.results), len(memory & x.arguments)),
            default=None,
        )
        if found and not memory & (found.results | found.arguments):
            self._forwards.remove(found)  # saved tensors were copied, so assume reverse order
        return found.prefix if found else ""


@dataclass(frozen=True)
class SampledForward:
    """A forward whose backwards may still run, in any order and more than once."""

    prefix: str  # path of the part of the model that ran
    arguments: frozenset[compat.StorageWeakRef]
    # Memory that the forward allocated for outputs and saved tensors.
    results: frozenset[compat.StorageWeakRef]

    def drop_freed(
        self, shared: dict[frozenset[compat.StorageWeakRef], frozenset[compat.StorageWeakRef]]
    ) -> SampledForward:
        """Drop freed storages. `shared` maps equal sets of storages to one set object."""
        arguments, results = (
            frozenset(x for x in memory if not x.expired())
            for memory in (self.arguments, self.results)
        )
        return SampledForward(self.prefix, shared.setdefault(arguments, arguments), results)


def _collect_memory(values: Sequence[Any]) -> frozenset[compat.StorageWeakRef]:
    return frozenset(compat.weak_storage(x) for x in values if isinstance(x, Tensor))


class MeasuringInterpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, monitor: Monitor) -> None:
        super().__init__(gm)
        self.monitor = monitor
        self.prefix = ""
        self.names = find_quantized(gm.graph)
        self.weights = _find_weights(gm.graph)

    def run_node(self, n: fx.Node) -> Any:
        """Measure the operand of a quantize node."""
        names = self.names.get(n, ())
        if names:
            x, scale = (self.env[operand] for operand in n.all_input_nodes)
            how = quantization_of(n)
            rows, columns = how.block
            if rows > 1:  # blocks of several rows: repeat their scales for each row
                scale = scale.repeat_interleave(rows, -2)
            totals = measure(x, scale, how.format, columns or x.shape[-1])
            for name in names:
                self.monitor.record(self.prefix, name, totals)
        return super().run_node(n)

    def find_prefix(self, arguments: Sequence[Any]) -> str:
        """Return the path of the module that runs. Paths in the graph are relative to it."""
        for index, module in self.weights:
            path = self.monitor.module_of(arguments[index])
            if path is not None and path.endswith(module):
                return path.removesuffix(module).rstrip(".")
        return ""


def find_quantized(g: fx.Graph) -> dict[fx.Node, list[TensorName]]:
    """Name the tensors of each quantize node.

    An operand of several layers has several names. If a module saves several results of one
    operator, the names of all except the first have a number.
    """
    found: dict[fx.Node, list[TensorName]] = {}
    counts: dict[tuple[str, str], int] = {}
    for node in g.nodes:
        if is_quantized_operand(node):
            names: list[tuple[str, str]] = list(node.meta.get(OPERAND_OF, ()))
        elif is_quantized_saved_value(node) and node.args[3:] in ((), (0,)):
            # A tensor packed into several planes has several quantize nodes.
            module, tensor = graph.module_path(node), f"saved {operator_name(_operand(node))}"
            number = counts[module, tensor] = counts.get((module, tensor), 0) + 1
            names = [(module, tensor if number == 1 else f"{tensor} {number}")]
        else:
            continue
        how, dtype = quantization_of(node), graph.tensor(_operand(node)).dtype
        if not how.format.lossless:
            scales = block_text(how.block)
            found[node] = [TensorName(*n, scales, how.format.name, dtype) for n in names]
    return found


def _operand(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _find_weights(g: fx.Graph) -> list[tuple[int, str]]:
    """Return a pair for each linear weight: the index of its input, and the layer's path."""
    placeholders = g.find_nodes(op="placeholder")
    return [
        (placeholders.index(weight), module)
        for node in g.nodes
        if node.op == "call_function"  # a weight that is a quantized input is not in the graph
        for module, operand in node.meta.get(OPERAND_OF, ())
        if operand == "weight"
        and (weight := graph.skip_views_and_casts(_operand(node))) in placeholders
    ]


@dataclass(frozen=True)
class Versions(Hooks):
    """Compiles the versions of each graph that has a backward."""

    monitor: Monitor

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap | None:
        """Compile the sampled version, and with `Monitor.fallback` the careful version."""
        if not torch.is_grad_enabled():
            return None
        monitor, sampler = self.monitor, Sampler(self.monitor)
        sampled = compile_version(config, sampler)
        if not sampler.trains:
            return None
        careful: Program | None = None
        if monitor.fallback:
            careful = compile_version(
                replace(config, skip=(*config.skip_patterns, *monitor.fallback))
            )

        def wrap(normal: Program, compiled: CompiledGraph | None) -> Program:
            return dispatch(monitor, sampled, careful or normal, normal)

        return wrap


def dispatch(monitor: Monitor, sampled: Program, careful: Program, normal: Program) -> Program:
    """Run the version that the monitor selects for each step."""

    def run(*args: object) -> object:
        if hardware.launches_at_once():
            raise ConfigError(
                "capture_step replays one version of the model, and a Monitor selects the version "
                "of each step: use either capture_step or a Monitor."
            )
        if monitor.falls_back:
            return careful(*args)
        samples = monitor.sampling and not compat.in_shape_inference()
        return sampled(*args) if samples else normal(*args)

    return run
