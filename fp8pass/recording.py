"""Run one step of a model; keep its joint graphs before and after the passes, and real inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, debug
from fp8pass.config import Config
from fp8pass.explain import unchanged
from fp8pass.partition import Inputs, Partitioner, copy_of, cut
from fp8pass.passes import JOINT_PASSES, Context
from fp8pass.passes.decision import Decision
from fp8pass.passes.materialize import materialize_plan


def record_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, config: Config
) -> list[Record]:
    """Run `loss_fn(model, batch).backward()`; a record of each graph whose backward ran.

    Parameters, buffers, gradients and random number generators are left as they were.
    """
    records: list[Record] = []
    module = getattr(model, "_orig_mod", model)
    compiled = torch.compile(module, backend=_recording(replace(config, compiler="eager"), records))
    with (
        fresh_gradients(module, batch),
        unchanged(module),
        compat.fresh_compilation(),
        torch.enable_grad(),
    ):
        loss_fn(compiled, batch).backward()
    return [r for r in records if r.complete]


@contextmanager
def fresh_gradients(module: nn.Module, batch: Any) -> Iterator[list[Tensor]]:
    """The tensors that gradients are left on, without any here; those they had are put back."""
    leaves = [*module.parameters(), *_leaves(batch)]
    gradients = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    try:
        yield leaves
    finally:
        for x, gradient in zip(leaves, gradients, strict=True):
            x.grad = gradient


def _leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch that gradients would be left on."""
    tensors = torch.utils._pytree.tree_leaves(batch)
    return [x for x in tensors if isinstance(x, Tensor) and x.is_leaf and x.requires_grad]


@dataclass
class Record:
    """One joint graph and what it ran on.

    Attributes:
        exact: before any pass.
        planned: before its materialization, with `ctx` and `decisions` about its nodes.
        rewritten: after all passes.
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
        """What the joint graphs are called with."""
        return [self.inputs[name] for name in _input_names(self.exact)]

    def exact_values(self) -> dict[str, Any]:
        """The value of every node before the passes, by name."""
        exact = Exact(self.exact)
        exact.run(*self.arguments)
        return exact.values


class RecordingPartitioner(Partitioner):
    """A partitioner that keeps the joint graph before, between and after the passes."""

    def __init__(self, config: Config, inputs: Inputs, records: list[Record]) -> None:
        super().__init__(config, inputs)
        self.records = records
        self.record: Record | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward module."""
        ctx = self.context(gm, **kwargs)
        exact, copies = copy_of(gm), dict[fx.Node, fx.Node]()
        debug.run_passes(JOINT_PASSES[: JOINT_PASSES.index(materialize_plan)], gm, ctx)
        planned = copy_of(gm, copies)
        decisions = {copies[n]: d for n, d in ctx.decisions.items()}
        planned_ctx = replace(
            ctx,
            parameters=frozenset(copies[n] for n in ctx.parameters),
            held=frozenset(copies[n] for n in ctx.held),
            activations=frozenset(copies[n] for n in ctx.activations),
        )
        debug.run_passes([materialize_plan], gm, ctx)
        rewritten = copy_of(gm)
        for graph_to_run in (exact, rewritten):
            compat.draw_from_seeds(graph_to_run)
        self.record = Record(exact, planned, rewritten, planned_ctx, decisions)
        self.records.append(self.record)
        return cut(gm, ctx)


def _recording(config: Config, records: list[Record]) -> Callable[..., Any]:
    """A backend that fills `records`."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        partitioner = RecordingPartitioner(config, Inputs.of(example_inputs), records)

        def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            names = _input_names(gm)
            run = compat.interpret(gm)
            if compat.is_inference_compile(kwargs):
                return run
            record = partitioner.record
            assert record is not None

            def recording(arguments: list[Any]) -> Any:
                # Of a graph that runs several times, the last forward, whose backward is the first.
                if not record.complete:
                    given = zip(names, arguments, strict=True)
                    inputs = ((name, _detached(x)) for name, x in given if _is_input(name))
                    record.inputs.update(inputs)
                return run(arguments)

            return compat.boxed(recording)

        return compat.compile_fx(
            gm,
            list(example_inputs),
            inner_compile=inner_compile,
            config_patches={"custom_partitioner_fn": partitioner},
        )

    return backend


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_input(name: str) -> bool:
    return "primals" in name or "tangents" in name


def _input_names(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]


class Exact(fx.Interpreter):
    """Runs a graph and keeps every value, by name."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        value = super().run_node(n)
        self.values[n.name] = value
        return value
