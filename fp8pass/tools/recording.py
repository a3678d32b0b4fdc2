"""Record the joint graphs of one training step, before and after the passes, with their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat, graph
from fp8pass.activation_memory.decision import Decision
from fp8pass.compiler import Captured
from fp8pass.config import AddedPass, Config
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten
from fp8pass.graph.tags import IS_TRANSPOSED, ORIGINAL_GATHER, REPLACED_GEMM, original_name
from fp8pass.hooks import weights_by_path
from fp8pass.passes import JOINT_PASSES, Context, Requests
from fp8pass.passes.joint.materialize_plan import materialize_plan
from fp8pass.tools import running


def record_step(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, config: Config
) -> list[Record]:
    """Run `loss_fn(model, batch).backward()`, and record each run of a graph that has a backward.

    Parameters, buffers, gradients and random number generators are restored.
    """
    records: list[Record] = []
    backend = _make_backend(replace(config, compiler="eager"), records, compat.original_of(model))
    running.run_step(model, loss_fn, batch, backend)
    return [r for r in records if r.complete]


@dataclass
class Record:
    """One run of a joint graph: the graph at three points of the pipeline, and its inputs."""

    exact: fx.GraphModule  # before any pass
    planned: fx.GraphModule  # before `materialize_plan`
    rewritten: fx.GraphModule  # after `materialize_plan`
    ctx: Context  # for the nodes of `planned`
    decisions: dict[fx.Node, Decision]  # about the nodes of `planned`
    module: str = ""  # path of the module that ran, to which paths in the graph are relative
    inputs: dict[str, Any] = field(default_factory=dict)  # by placeholder's name

    @property
    def complete(self) -> bool:
        return all(name in self.inputs for name in _list_inputs(self.exact))

    def path(self, node: fx.Node) -> str:
        return ".".join(
            filter(None, (self.module, graph.module_path(graph.skip_views_and_casts(node))))
        )

    def run(self, interpreter: fx.Interpreter) -> None:
        """Run a graph on copies of inputs that it overwrites. All runs use equal random numbers."""
        written = {
            node.args[0].name
            for node in self.exact.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        names = _list_inputs(self.exact)
        given = [self.inputs[n].clone() if n in written else self.inputs[n] for n in names]
        with torch.random.fork_rng():
            interpreter.run(*given)

    def exact_values(self) -> dict[str, Any]:
        """Run the graph from before the passes, and return the values of all nodes by name."""
        interpreter = fx.Interpreter(self.exact, garbage_collect_values=False)
        self.run(interpreter)
        return {node.name: value for node, value in interpreter.env.items()}

    def planned_values(self, exact: dict[str, Any]) -> dict[fx.Node, Any]:
        """Return the exact values of the nodes of `planned`. `exact` has exact values by name.

        The values of views and copies that passes added are computed from these values.
        """
        values: dict[fx.Node, Any] = {}
        for node in self.planned.graph.nodes:
            if (name := node.meta.get(ORIGINAL_GATHER, original_name(node))) in exact:
                values[node] = arrange_as(node, exact[name])
            elif _moves_data(node) and all(n in values for n in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                with compat.real_tensors():
                    values[node] = node.target(*args, **kwargs)
        return values


def arrange_as(node: fx.Node, value: Any) -> Any:
    """Transpose and flatten the value of a GEMM to the layout of `node`, which replaced it."""
    if REPLACED_GEMM not in node.meta or not isinstance(value, Tensor):
        return value
    value = value.mT if IS_TRANSPOSED in node.meta else value
    return value.flatten(0, -2) if value.ndim > graph.tensor(node).ndim else value


def _moves_data(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        kind(node) in (Kind.VIEW, Kind.MOVEMENT) or node.target is aten.clone.default
    )


class Recorder:
    """Records the runs of one joint graph.

    `passes` copy the graph. `compile` replaces Inductor, and records the inputs of each run. With
    `copies`, it copies the inputs, because their memory is freed after the run.
    """

    def __init__(self, config: Config, records: list[Record], *, copies: bool) -> None:
        self.config, self.records, self.copies = config, records, copies
        self.module = ""  # path of the module that runs the graph
        self._graphs: dict[str, Any] = {}  # fields of `Record`
        self._waiting: list[Record] = []  # forwards whose backward has not run

    @property
    def passes(self) -> tuple[AddedPass, ...]:
        """The passes of `config`, and passes that copy the graph."""
        return (
            ("before", JOINT_PASSES[0].__name__, self._copy_exact),
            # Copy the graph here, because later passes merge the GEMMs of several layers.
            ("after", materialize_plan.__name__, self._copy_rewritten),
            *self.config.passes,
            ("before", materialize_plan.__name__, self._copy_planned),
        )

    def _copy_exact(self, gm: fx.GraphModule, ctx: Context) -> None:
        self._graphs["exact"] = graph.copy_module(gm)
        compat.match_generated_code(self._graphs["exact"])

    def _copy_planned(self, gm: fx.GraphModule, ctx: Context) -> None:
        copies: dict[fx.Node, fx.Node] = {}
        self._graphs["planned"] = graph.copy_module(gm, copies)
        self._graphs["decisions"] = {copies[n]: d for n, d in ctx.decisions.items()}
        facts = ctx.facts.map_to_copy(copies)
        self._graphs["ctx"] = replace(ctx, config=self.config, facts=facts)

    def _copy_rewritten(self, gm: fx.GraphModule, ctx: Context) -> None:
        self._graphs["rewritten"] = graph.copy_module(gm)
        compat.match_generated_code(self._graphs["rewritten"])

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Return a function that runs a forward, backward or inference graph op by op."""
        names, half, run = _list_inputs(gm), compat.half_of(kwargs), compat.interpret(gm)
        if half == "inference":
            return run
        record = self._record_backward if half == "backward" else self._record_forward

        def record_run(arguments: list[Any]) -> Any:
            given = zip(names, arguments, strict=True)
            record({n: x for n, x in given if "primals" in n or "tangents" in n})
            return run(arguments)

        return compat.box(record_run)

    def _record_forward(self, inputs: dict[str, Any]) -> None:
        run = Record(**self._graphs, module=self.module, inputs=self._detach(inputs))
        self.records.append(run)
        self._waiting.append(run)

    def _record_backward(self, inputs: dict[str, Any]) -> None:
        """Add the inputs of a backward to the record of its forward.

        Backwards run in reverse order, so the forward is the last one that read the same tensors
        and numbers. Later forwards have no backward: their results are unused, or
        `torch.utils.checkpoint` ran them again.
        """
        while self._waiting:
            run = self._waiting.pop()
            shared = run.inputs.keys() & inputs.keys()
            if self.copies or all(_is_same(run.inputs[name], inputs[name]) for name in shared):
                run.inputs.update(self._detach(inputs))
                return

    def _detach(self, inputs: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: x.detach() for name, x in inputs.items() if isinstance(x, Tensor)}
        copied = {name: x.clone() for name, x in tensors.items()} if self.copies else tensors
        return inputs | copied


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.data_ptr() == b.data_ptr()
    return bool(a == b)


def _make_backend(config: Config, records: list[Record], module: nn.Module) -> Callable[..., Any]:
    owners = running.find_owners(module)
    # FSDP2 frees gathered parameters after a module has run.
    copies = running.is_sharded(module)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        compat.rename_self(gm)
        weights = weights_by_path(gm)
        recorder = Recorder(config, records, copies=copies)
        captured = Captured(gm, tuple(example_inputs), patches={})
        recorded = replace(config, passes=recorder.passes)
        separate = Requests(separate_adapters=True)
        program = captured.compile_version(recorded, recorder.compile, separate)

        def run_located(*args: Any) -> Any:
            recorder.module = running.find_module_of_run(
                weights(args), running.find_owners(module) if copies else owners
            )
            return program(*args)

        return run_located

    return backend


def _list_inputs(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "placeholder"]
