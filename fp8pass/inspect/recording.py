"""Run one step of a model, and record its joint graphs before and after the passes, with inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, graph
from fp8pass.compilation import Compilation, Inputs
from fp8pass.config import Config
from fp8pass.inspect.running import fresh_gradients, is_sharded, unchanged
from fp8pass.partition import Partitioner
from fp8pass.passes import Context, Pass
from fp8pass.passes.materialize_plan import materialize_plan
from fp8pass.saving.decision import Decision


def record_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, config: Config
) -> list[Record]:
    """Run `loss_fn(model, batch).backward()`; a record of each graph whose backward ran.

    Parameters, buffers, gradients and random number generators are left as they were.
    """
    records: list[Record] = []
    module = compat.original_of(model)
    # What FSDP2 gathers it frees again, under the tensors that were recorded.
    backend = _recording(replace(config, compiler="eager"), records, copies=is_sharded(module))
    compiled = torch.compile(module, backend=backend)
    with (
        fresh_gradients(module, batch),
        unchanged(module),
        compat.uncompiled(module),
        compat.fresh_compilation(),
        torch.enable_grad(),
    ):
        loss_fn(compiled, batch).backward()
    return [r for r in records if r.complete]


@dataclass
class Record:
    """One joint graph at three points of the pipeline, and the inputs it ran on.

    Attributes:
        exact: the graph before any pass.
        planned: the graph before `materialize_plan`.
        rewritten: the graph after `materialize_plan`.
        ctx: the context of the passes, about the nodes of `planned`.
        decisions: the decisions about the nodes of `planned`.
        inputs: real tensors by placeholder.
    """

    exact: fx.GraphModule
    planned: fx.GraphModule
    rewritten: fx.GraphModule
    ctx: Context
    decisions: dict[fx.Node, Decision]
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the backward ran."""
        return all(name in self.inputs for name in _input_names(self.exact))

    @property
    def arguments(self) -> list[Any]:
        """The arguments of the joint graphs."""
        return [self.inputs[name] for name in _input_names(self.exact)]

    def exact_values(self) -> dict[str, Any]:
        """The value of every node before the passes, by name."""
        interpreter = ValueRecorder(self.exact)
        interpreter.run(*self.arguments)
        return interpreter.values


class Recorder:
    """Observes the passes over one joint graph.

    Attributes:
        record: the joint graph, as soon as the plan is materialized.
    """

    def __init__(self) -> None:
        self.record: Record | None = None
        self._exact: fx.GraphModule | None = None
        self._planned: tuple[fx.GraphModule, Context, dict[fx.Node, Decision]] | None = None

    def before(self, pass_: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        """Copy the graph before the first pass, and before `materialize_plan`."""
        if self._exact is None:
            self._exact = graph.copy_of(gm)
        if pass_ is materialize_plan:
            copies: dict[fx.Node, fx.Node] = {}
            planned = graph.copy_of(gm, copies)
            decisions = {copies[n]: d for n, d in ctx.decisions.items()}
            self._planned = planned, replace(ctx, facts=ctx.facts.of_copy(copies)), decisions

    def after(self, pass_: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        """Add the record after `materialize_plan`: later passes only join GEMMs of layers."""
        if pass_ is materialize_plan and self._planned and self._exact:
            rewritten = graph.copy_of(gm)
            for module in (self._exact, rewritten):
                compat.draw_from_seeds(module)
            planned, planned_ctx, decisions = self._planned
            self.record = Record(self._exact, planned, rewritten, planned_ctx, decisions)


def _recording(config: Config, records: list[Record], *, copies: bool) -> Callable[..., Any]:
    """A backend that fills `records`, with copies of inputs if they are freed after the step."""

    def recorded(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone() if copies else value.detach()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        recorder = Recorder()
        compilation = Compilation(config, Inputs.of(example_inputs))

        def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            names = _input_names(gm)
            run = compat.interpret(gm)
            if compat.half_of(kwargs) == "inference":
                return run
            record = recorder.record
            assert record is not None
            if compat.half_of(kwargs) == "forward":  # a backward may be compiled much later
                records.append(record)

            def recording(arguments: list[Any]) -> Any:
                # If a graph runs several times: the last forward, whose backward runs first.
                if not record.complete:
                    given = zip(names, arguments, strict=True)
                    inputs = ((name, recorded(x)) for name, x in given if _is_input(name))
                    record.inputs.update(inputs)
                return run(arguments)

            return compat.boxed(recording)

        return compat.compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            config_patches={"custom_partitioner_fn": Partitioner(compilation, recorder)},
        )

    return backend


def _is_input(name: str) -> bool:
    return "primals" in name or "tangents" in name


def _input_names(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]


class ValueRecorder(fx.Interpreter):
    """Runs a graph and keeps every value, by name."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        value = super().run_node(n)
        self.values[n.name] = value
        return value
