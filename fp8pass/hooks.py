"""Hooks that observe or extend a compilation. The compiler does not import the code behind them."""

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
    """One run of a compiled graph's forward.

    Attributes:
        weights: parameters that it ran with, by the paths of their modules in the graph.
        checkpointed: whether `torch.utils.checkpoint` runs it again in the backward, from outside
            of compiled code, so that its saved tensors are freed after the forward.
    """

    weights: dict[str, torch.Tensor] = field(repr=False)
    checkpointed: bool


@dataclass
class CompiledGraph:
    """One compiled graph, as hooks get it.

    Attributes:
        passes: the graph before and after each pass; the passes on the forward and the backward
            graph follow when these are compiled.
        gm: the graph after all its passes, the joint one where there is a backward.
        ctx: the context of the passes, with decisions about the nodes of `gm`.
        runs: the runs of its forward. Equal blocks, compiled one by one or around a graph break,
            share a graph.
        inputs: names of the Dynamo graph's inputs, as the model has them, if they were recorded.
        stock: what PyTorch's own partitioner saves of the graph, if that was recorded.
    """

    passes: list[PassRecord]
    gm: fx.GraphModule
    ctx: Context
    runs: list[GraphRun] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    stock: StockPartition | None = None

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self.ctx.plan

    @property
    def runs_kept(self) -> int:
        """Count the runs whose saved tensors stay until the backward."""
        return sum(not run.checkpointed for run in self.runs)


class CompileVersion(Protocol):
    """Compiles another version of the graph that is being compiled. Hooks are not called for it."""

    def __call__(self, config: Config, inner_compile: Callable[..., Any] | None = None) -> Program:
        """Compile with `config`, and with `inner_compile` instead of Inductor if it is given."""


# Replaces the program that runs a graph. The compiled graph is None if it came from a cache.
Wrap = Callable[[Program, CompiledGraph | None], Program]


class Hooks(Protocol):
    """Functions that a `Backend` calls for each graph that it compiles.

    A class that inherits from this one overrides what it needs. Backends share compiled code only
    if their hooks are equal.

    Attributes:
        records: whether graphs are recorded before and after each pass, and whether the plan gets
            the figures that only reports show.
    """

    records: bool = False

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap | None:
        """Prepare for the graph `gm` of Dynamo. Return a function that wraps its program, or None.

        Other versions of the graph are compiled here, before the one that runs in most steps,
        because Dynamo keeps what the last compilation reports.
        """
        return None

    def after_passes(self, compiled: CompiledGraph) -> None:
        """Look at a graph after the passes of its list, before code is generated from it."""
        return None

    def while_compiling(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager that is active while Inductor compiles `what`."""
        return nullcontext()


Observer = Callable[[CompiledGraph], None]


@dataclass(frozen=True)
class Observing(Hooks):
    """Calls `observer` with each compiled graph, and notes the graph's inputs and runs."""

    observer: Observer
    records = True

    def before_compile(
        self, gm: fx.GraphModule, config: Config, compile_version: CompileVersion
    ) -> Wrap:
        """Return a function that notes the names of the inputs and each run of the program."""
        weights = weights_by_path(gm)
        names = [compat.input_name(n) for n in gm.graph.nodes if n.op == "placeholder"]

        def wrap(program: Program, compiled: CompiledGraph | None) -> Program:
            if compiled:
                compiled.inputs = [graph.clean_path(name) for name in names]

            def run(*args: Any) -> Any:
                if compiled:
                    compiled.runs.append(GraphRun(weights(args), compat.is_checkpointing()))
                return program(*args)

            return run

        return wrap

    def after_passes(self, compiled: CompiledGraph) -> None:
        """Call the observer."""
        self.observer(compiled)


def weights_by_path(
    gm: fx.GraphModule,
) -> Callable[[Sequence[Any]], dict[str, torch.Tensor]]:
    """Return a function that picks the parameters from the arguments of a Dynamo graph.

    The function returns them by the paths of their modules.
    """
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    paths = [(i, graph.module_path(n)) for i, n in enumerate(inputs)]
    return lambda args: {path: args[i] for i, path in paths if isinstance(args[i], nn.Parameter)}
