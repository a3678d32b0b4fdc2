"""The interface of hooks, which observe or extend a compilation.

The compiler imports this interface, but not the modules that implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from fp8pass import compat, graph
from fp8pass.activation_memory.stock import StockPartition
from fp8pass.config import Config
from fp8pass.passes.context import Context
from fp8pass.passes.runner import PassRecord
from fp8pass.plan import Plan

Program = Callable[..., Any]


@dataclass(frozen=True)
class GraphRun:
    """One run of a compiled graph's forward."""

    # The weights, by their module paths in the graph.
    weights: dict[str, torch.Tensor] = field(repr=False)
    # Whether `torch.utils.checkpoint` wraps the compiled code, and repeats the run in the backward.
    checkpointed: bool


@dataclass
class CompiledGraph:
    """One compiled graph, as passed to hooks."""

    # Records of the joint or inference passes, then of the lowering passes.
    passes: list[PassRecord]
    gm: fx.GraphModule  # the joint or inference graph, after its passes
    ctx: Context  # contains the decisions about the nodes of `gm`
    # The runs of the forward. Equal blocks that are compiled one by one share a graph, which runs
    # once for each block.
    runs: list[GraphRun] = field(default_factory=list)
    # The partition by PyTorch's own partitioner; None if not recorded.
    stock: StockPartition | None = None

    @property
    def plan(self) -> Plan:
        return self.ctx.plan

    @property
    def runs_kept(self) -> int:
        """The number of runs whose saved tensors stay in memory until the backward."""
        return sum(not run.checkpointed for run in self.runs)


class CompileVersion(Protocol):
    """Compiles another version of the current graph. Calls no hook except `while_compiling`."""

    def __call__(self, config: Config, inner_compile: Callable[..., Any] | None = None) -> Program:
        """Compile with `config`. If `inner_compile` is given, it is called instead of Inductor."""


# Takes a graph's program and returns the program to run instead. The second argument is None if the
# program comes from a cache.
Wrap = Callable[[Program, CompiledGraph | None], Program]


class Hooks(Protocol):
    """Functions that a `Backend` calls for each graph that it compiles.

    A subclass overrides the methods that it needs. Backends share compiled code only if their hooks
    are equal.
    """

    # Whether to record each pass, and to store in the plan the numbers that reports show.
    records: bool = False

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap | None:
        """Prepare for the compilation of `gm`. Return a function that wraps the program, or None.

        Other versions of the graph must be compiled here, before the main version, because Dynamo
        keeps only the information that the last compilation reports.
        """
        return None

    def after_passes(self, compiled: CompiledGraph) -> None:
        """Observe a graph after its joint or inference passes."""
        return None

    def while_compiling(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that is active while Inductor compiles `what`."""
        return nullcontext()


Observer = Callable[[CompiledGraph], None]


@dataclass(frozen=True)
class Observing(Hooks):
    """Calls `observer` with each compiled graph, and records the graph's runs."""

    observer: Observer
    records = True

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap:
        weights = weights_by_path(gm)

        def wrap(program: Program, compiled: CompiledGraph | None) -> Program:
            def run(*args: Any) -> Any:
                if compiled:
                    compiled.runs.append(GraphRun(weights(args), compat.is_checkpointing()))
                return program(*args)

            return run

        return wrap

    def after_passes(self, compiled: CompiledGraph) -> None:
        self.observer(compiled)


def weights_by_path(
    gm: fx.GraphModule,
) -> Callable[[Sequence[Any]], dict[str, torch.Tensor]]:
    """Return a function that maps the arguments of a Dynamo graph to parameters by module path."""
    inputs = gm.graph.find_nodes(op="placeholder")
    paths = [(i, graph.module_path(n)) for i, n in enumerate(inputs)]
    return lambda args: {path: args[i] for i, path in paths if isinstance(args[i], nn.Parameter)}
