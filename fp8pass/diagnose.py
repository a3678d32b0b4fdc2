"""`fp8pass.diagnose`: the gradient error of every layer, measured beside what the rules predict.

The joint graph of a model is run twice on real data: as it is, and rewritten. In the second run
every value of the forward and every gradient that enters a layer is replaced by the exact one, so
that what a layer gets wrong is its own error and not that of the layers behind it (as in AGoQ,
Table 13).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from fp8pass import compat, debug, graph
from fp8pass.config import Config
from fp8pass.explain import configuration_of, unchanged
from fp8pass.partition import Inputs, Partitioner, copy_of, cut
from fp8pass.passes import JOINT_PASSES, Context
from fp8pass.passes.classify import Kind, kind
from fp8pass.passes.decision import Decision
from fp8pass.passes.error_rules import Rules
from fp8pass.passes.linear import ROLE
from fp8pass.passes.materialize import materialize_plan
from fp8pass.prediction import Predictor, original_name

LAYERS = (Kind.GEMM, Kind.CONVOLUTION, Kind.ATTENTION)

# An error this many times the predicted one is worth a look.
FAR_ABOVE = 3.0

# Below this BF16's own rounding, and how gradients correlate with activations, decide.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class LayerError:
    """The error of one gradient that one layer computes.

    Attributes:
        module: path of the module.
        gradient: what it is of: `weight`, `input`, or `attention q`, `k`, `v`.
        shape: as text.
        mean_absolute: mean absolute error.
        relative: ‖wrong - exact‖₂ / ‖exact‖₂.
        predicted: the same by the error rules, for the moments that the batch showed; None where
            nothing could be derived, but the rules are switched off.
    """

    module: str
    gradient: str
    shape: str
    mean_absolute: float
    relative: float
    predicted: float | None

    @property
    def far_above(self) -> bool:
        """Whether the rules do not explain the error."""
        return self.relative > FAR_ABOVE * max(self.predicted or 0.0, NEGLIGIBLE)


@dataclass
class Diagnosis:
    """The gradient errors of a model's layers; print it, or look at `layers`."""

    config: Config
    layers: list[LayerError] = field(default_factory=list)

    @property
    def suspicious(self) -> list[LayerError]:
        """Those whose error is far above what the rules predict."""
        return [y for y in self.layers if y.far_above]

    @property
    def suggested_skip(self) -> tuple[str, ...]:
        """Entries for `skip` that would keep the suspicious layers in high precision."""
        return tuple(dict.fromkeys(y.module for y in self.suspicious if y.module))

    def to_json(self, path: str | Path | None = None) -> str:
        """The errors as JSON text, also written to `path` if one is given."""
        data = {
            "layers": [asdict(y) | {"far_above": y.far_above} for y in self.layers],
            "suggested_skip": self.suggested_skip,
        }
        text = json.dumps(data, indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draw measured and predicted errors into an image file (needs matplotlib)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 0.25 * len(self.layers) + 1.5), layout="constrained")
        axes = figure.subplots()
        names = [f"{y.module} {y.gradient}" for y in self.layers]
        axes.barh(names, [y.relative for y in self.layers], label="measured")
        axes.plot([y.predicted or 0.0 for y in self.layers], names, "k|", label="predicted")
        axes.invert_yaxis()
        axes.set_xlabel("relative gradient error")
        axes.legend()
        figure.savefig(path, dpi=120)

    def __str__(self) -> str:
        table = Table(title="gradient error by layer", title_justify="left")
        for column in ("module", "gradient", "shape", "mean abs.", "relative", "predicted", ""):
            table.add_column(column)
        for y in self.layers:
            predicted = "no rule" if y.predicted is None else f"{y.predicted:.4f}"
            numbers = f"{y.mean_absolute:.2e}", f"{y.relative:.4f}", predicted
            table.add_row(y.module, y.gradient, y.shape, *numbers, "!" if y.far_above else "")
        console = Console(width=150, file=io.StringIO())
        console.print(table)
        if self.suspicious:
            console.print(f"Far above prediction; to leave them out: skip={self.suggested_skip!r}")
        return console.file.getvalue()  # type: ignore[attr-defined]


def diagnose(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    config: Config | None = None,
) -> Diagnosis:
    """Measure the gradient error that each layer of `model` adds on a batch of data.

    Runs one forward and backward; parameters, their gradients, buffers and random number
    generators are left as they were.

    Args:
        model: a module, or one compiled with `backend="fp8pass"`, whose options are then used.
        loss_fn: `loss_fn(model, batch)` gives the loss, as `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`.
        config: what to diagnose instead of the model's own options or the default recipe.

    Returns:
        A Diagnosis: `print` it, or use `.layers`, `.suspicious`, `.plot()`, `.to_json()`.
    """
    config = replace(config or configuration_of(model), compiler="eager")
    module = getattr(model, "_orig_mod", model)
    records: list[Record] = []
    compiled = torch.compile(module, backend=_recording(config, records))
    gradients = {p: p.grad for p in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        with unchanged(module), compat.fresh_compilation(), torch.enable_grad():
            loss_fn(compiled, batch).backward()
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    layers = [error for record in records if record.complete for error in errors_of(record)]
    return Diagnosis(config, layers)


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
        return all(str(n.target) in self.inputs for n in _placeholders(self.exact))


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
        debug.run_passes([p for p in JOINT_PASSES if p is not materialize_plan], gm, ctx)
        planned = copy_of(gm, copies)
        decisions = {copies[n]: d for n, d in ctx.decisions.items()}
        planned_ctx = replace(
            ctx,
            parameters=frozenset(copies[n] for n in ctx.parameters),
            held=frozenset(copies[n] for n in ctx.held),
            activations=frozenset(copies[n] for n in ctx.activations),
        )
        debug.run_passes([materialize_plan], gm, ctx)
        self.record = Record(exact, planned, copy_of(gm), planned_ctx, decisions)
        self.records.append(self.record)
        return cut(gm, ctx)


def _recording(config: Config, records: list[Record]) -> Callable[..., Any]:
    """A backend that fills `records`."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        partitioner = RecordingPartitioner(config, Inputs.of(example_inputs), records)

        def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            names = [str(n.target) for n in _placeholders(gm)]
            run = compat.interpret(gm)
            if compat.is_inference_compile(kwargs):
                return run
            record = partitioner.record
            assert record is not None

            def recording(arguments: list[Any]) -> Any:
                given = zip(names, arguments, strict=True)
                record.inputs.update((name, _detached(x)) for name, x in given if _is_input(name))
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


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def errors_of(record: Record) -> Iterable[LayerError]:
    """Measured and predicted errors of one graph's gradients, those that are exact left out."""
    arguments = [record.inputs[str(n.target)] for n in _placeholders(record.exact)]
    exact = Exact(record.exact)
    exact.run(*arguments)
    values = {
        n: exact.values[original_name(n)]
        for n in record.planned.graph.nodes
        if original_name(n) in exact.values
    }
    rules = Rules(record.planned.graph, record.ctx)
    predictor = Predictor(rules, record.decisions, values)
    predictor.run(record.planned.graph)
    predicted = predictor.backward
    forced = Forced(record.rewritten, exact.values, _layer_outputs(rules))
    forced.run(*arguments)
    for node, (mean_absolute, relative) in forced.errors.items():
        expected = predicted.get(original_name(node), 0.0)
        if not relative and not expected:
            continue  # exact
        yield LayerError(
            graph.module_path(graph.source(node)),
            _describe(node, record),
            graph.shape_text(graph.tensor(node)),
            mean_absolute,
            relative,
            expected,
        )


def _layer_outputs(rules: Rules) -> set[str]:
    """Names of gradients at which one layer ends and the next begins.

    Those are results of GEMMs and attention, and what a region hands on.
    """
    ends = {n for region in rules.regions for n in region.outputs}
    ends |= {n for n in rules.backward if kind(n) in LAYERS}
    return {original_name(n) for n in ends & rules.backward}


def _describe(node: fx.Node, record: Record) -> str:
    """What a gradient is of: a weight, a layer's input, an operand of attention."""
    if kind(node) is Kind.ATTENTION:
        return f"attention {_attention_operand(node)}"
    if ROLE in node.meta:
        return "weight" if node.meta[ROLE] == "wgrad" else "input"
    shapes = {graph.shape_text(graph.tensor(n)) for n in record.ctx.parameters}
    return "weight" if graph.shape_text(graph.tensor(node)) in shapes else "input"


def _attention_operand(node: fx.Node) -> str:
    """Which operand a gradient of attention is of; those of fused operators come as a tuple."""
    position = int(node.args[1]) if graph.is_getitem(node) else None  # type: ignore[arg-type]
    return "operand" if position is None or position > 2 else "qkv"[position]


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


class Forced(fx.Interpreter):
    """Runs a rewritten graph, setting layers' inputs to the exact values and noting the errors."""

    def __init__(self, gm: fx.GraphModule, exact: dict[str, Any], ends: set[str]) -> None:
        super().__init__(gm)
        self.exact, self.ends = exact, ends
        self.backward = graph.tangent_dependent(gm.graph)
        self.errors: dict[fx.Node, tuple[float, float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node, the exact one where there is one."""
        value, name = super().run_node(n), original_name(n)
        if n.op != "call_function" or name not in self.exact:
            return value
        if n not in self.backward:
            return self.exact[name]
        if name in self.ends and isinstance(value, Tensor) and value.is_floating_point():
            self.errors[n] = _difference(value, self.exact[name])
            return self.exact[name]
        return value


def _difference(value: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean absolute and relative L2 error."""
    wrong, right = value.double(), exact.double()
    norm = float(right.norm())
    error = float((wrong - right).norm())
    return float((wrong - right).abs().mean()), error / norm if norm else error
