"""Run one step of a model, and record its joint graphs before and after the passes, with inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, graph
from fp8pass.activation_memory.decision import Decision
from fp8pass.compilation import Compilation, Inputs
from fp8pass.config import Config
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten
from fp8pass.graph.tags import GATHERED_AS, STANDS_FOR, TURNED, original_name
from fp8pass.hooks import weights_by_path
from fp8pass.partition import Partitioner
from fp8pass.passes import Context, Pass
from fp8pass.passes.joint.materialize_plan import materialize_plan
from fp8pass.tools.running import (
    checked_loss,
    compiled_as,
    fresh_gradients,
    is_sharded,
    module_of_run,
    owners_of,
    unchanged,
)


def record_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, config: Config
) -> list[Record]:
    """Run `loss_fn(model, batch).backward()`; a record of each run of a graph that had a backward.

    Where only parts of the model are compiled, only those are here. Parameters, buffers, gradients
    and random number generators are left as they were.
    """
    records: list[Record] = []
    module = compat.original_of(model)
    backend = _recording(replace(config, compiler="eager"), records, module)
    with (
        fresh_gradients(module, batch),
        unchanged(module),
        compiled_as(model, backend) as program,
    ):
        loss = checked_loss(loss_fn, program, batch)
        if loss.requires_grad:
            loss.backward()
    return [r for r in records if r.complete]


@dataclass
class Record:
    """One run of a joint graph: the graph at three points of the pipeline, and the run's inputs.

    Attributes:
        exact: the graph before any pass.
        planned: the graph before `materialize_plan`.
        rewritten: the graph after `materialize_plan`.
        ctx: the context of the passes, about the nodes of `planned`.
        decisions: the decisions about the nodes of `planned`.
        module: path of the module that it ran in, from which the graph's own paths start.
        inputs: real tensors by placeholder.
    """

    exact: fx.GraphModule
    planned: fx.GraphModule
    rewritten: fx.GraphModule
    ctx: Context
    decisions: dict[fx.Node, Decision]
    module: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the backward ran."""
        return all(name in self.inputs for name in _input_names(self.exact))

    def path(self, node: fx.Node) -> str:
        """The path of a node's module in the model."""
        return ".".join(filter(None, (self.module, graph.module_path(graph.source(node)))))

    def run(self, interpreter: fx.Interpreter) -> None:
        """Run one of the joint graphs on the inputs, always with the same random numbers.

        Buffers that the step writes to, which the inputs are, stay as they are.
        """
        written = {
            node.args[0].name
            for node in self.exact.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        names = _input_names(self.exact)
        given = [self.inputs[n].clone() if n in written else self.inputs[n] for n in names]
        with torch.random.fork_rng():
            interpreter.run(*given)

    def exact_values(self) -> dict[str, Any]:
        """The value of every node before the passes, by name."""
        interpreter = ValueRecorder(self.exact)
        self.run(interpreter)
        return interpreter.values

    def planned_values(self, exact: dict[str, Any]) -> dict[fx.Node, Any]:
        """The same by node of `planned`, with those of views and copies that passes added."""
        values: dict[fx.Node, Any] = {}
        for node in self.planned.graph.nodes:
            if (name := node.meta.get(GATHERED_AS, original_name(node))) in exact:
                values[node] = arranged_as(node, exact[name])
            elif _only_moves(node) and all(n in values for n in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with compat.real_tensors():
                    values[node] = node.target(*args, **kwargs)
        return values


def arranged_as(node: fx.Node, value: Any) -> Any:
    """The value of a GEMM as what replaced it has it: turned, or a matrix instead of a batch."""
    if STANDS_FOR not in node.meta or not isinstance(value, Tensor):
        return value
    value = value.mT if TURNED in node.meta else value
    return value.flatten(0, -2) if value.ndim > graph.tensor(node).ndim else value


def _only_moves(node: fx.Node) -> bool:
    """Whether an operator computes nothing: a view, or a copy."""
    return node.op == "call_function" and (
        kind(node) in (Kind.VIEW, Kind.MOVEMENT) or node.target is aten.clone.default
    )


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
                compat.match_generated_code(module)
            planned, planned_ctx, decisions = self._planned
            self.record = Record(self._exact, planned, rewritten, planned_ctx, decisions)


class Runs:
    """The runs of one graph: the inputs of forwards, each joined by those of its backward.

    Args:
        records: gets a record of each run, in the order of the forwards.
        copies: whether inputs are freed after the step.
    """

    def __init__(self, records: list[Record], *, copies: bool) -> None:
        self.records, self.copies = records, copies
        self.module = ""
        self._waiting: list[Record] = []

    def forward(self, record: Record, inputs: dict[str, Any]) -> None:
        """A forward ran, of the graph that `record` is about."""
        run = replace(record, module=self.module, inputs=self._kept(inputs))
        self.records.append(run)
        self._waiting.append(run)

    def backward(self, inputs: dict[str, Any]) -> None:
        """A backward ran: of the last forward of these inputs, since autograd runs them in reverse.

        Forwards behind it have no backward of their own: their results were not used, or
        `torch.utils.checkpoint` ran them again.
        """
        while self._waiting:
            run = self._waiting.pop()
            shared = run.inputs.keys() & inputs.keys()
            if self.copies or all(_same(run.inputs[name], inputs[name]) for name in shared):
                run.inputs.update(self._kept(inputs))
                return

    def _kept(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: self._tensor(x) for name, x in inputs.items()}

    def _tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone() if self.copies else value.detach()


def _same(a: Any, b: Any) -> bool:
    """Whether two inputs are one: tensors in the same memory, or equal numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr()
    return bool(a == b)


def _recording(config: Config, records: list[Record], module: nn.Module) -> Callable[..., Any]:
    """A backend that fills `records` with the runs of parts of `module`."""
    owners = owners_of(module)
    # What FSDP2 gathers it frees again, under the tensors that were recorded. What a module runs
    # with are then other parameters, which it has only meanwhile.
    copies = is_sharded(module)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        compat.rename_self(gm)
        recorder, runs = Recorder(), Runs(records, copies=copies)
        compilation = Compilation(config, Inputs.of(example_inputs))

        def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            names, half = _input_names(gm), compat.half_of(kwargs)
            run = compat.interpret(gm)
            if half == "inference":
                return run

            def recording(arguments: list[Any]) -> Any:
                given = zip(names, arguments, strict=True)
                inputs = {name: x for name, x in given if _is_input(name)}
                if half == "backward":
                    runs.backward(inputs)
                else:
                    assert recorder.record is not None
                    runs.forward(recorder.record, inputs)
                return run(arguments)

            return compat.box(recording)

        program: Any = compat.compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            config_patches={"custom_partitioner_fn": Partitioner(compilation, recorder)},
        )
        weights = weights_by_path(gm)

        def located(*args: Any) -> Any:
            of_run = owners_of(module) if copies else owners
            runs.module = module_of_run(weights(args), of_run)
            return program(*args)

        return located

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
