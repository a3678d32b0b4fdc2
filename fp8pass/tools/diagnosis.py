"""`fp8pass.diagnose`: the gradient error of every layer, measured and predicted.

Runs a model's joint graph before and after the passes on real data. The second run replaces forward
values, and gradients that enter a layer, by the exact values of the first run. So a layer's error
does not include errors of later layers, as in Table 13 of the paper AGoQ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from fp8pass import graph
from fp8pass.config import Config
from fp8pass.dialect.accumulation import hardware_accumulation
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.tags import ROLE, original_name
from fp8pass.tools.output import Result, make_figure, make_name, make_table
from fp8pass.tools.prediction import Predictor
from fp8pass.tools.recording import Record, arrange_as, record_step
from fp8pass.tools.running import check_configuration

LAYER_KINDS = (Kind.GEMM, Kind.CONVOLUTION, Kind.ATTENTION)

# The table marks measured errors that exceed the predicted error by this factor.
FAR_ABOVE = 3.0

# BF16 rounding and correlations between errors cause relative errors up to this size.
NEGLIGIBLE_ERROR = 0.01


@dataclass(frozen=True)
class LayerError:
    """The error of one gradient that one layer computes.

    Attributes:
        module: path of the module in the model.
        entry: the layer's path in the compiled part, as an entry for the option `skip`. Layers of
            identical parts have the same entry.
        gradient: the tensor that the gradient belongs to: `weight`, `input`, `attention q`,
            `attention k`, `attention v`, or `attention operand` for another operand of attention.
        shape: shape of the gradient, as text.
        mean_absolute: mean absolute error.
        relative: ‖wrong - exact‖₂ / ‖exact‖₂.
        predicted: relative error that the error rules predict for the values of the batch. None if
            no rule could be derived, which happens only with the rules off (`error_tolerance=inf`).
    """

    module: str
    entry: str
    gradient: str
    shape: str
    mean_absolute: float
    relative: float
    predicted: float | None

    @property
    def far_above(self) -> bool:
        """Whether the error is too large for the rules to explain it; true for NaN."""
        explained = FAR_ABOVE * max(self.predicted or 0.0, NEGLIGIBLE_ERROR)
        return not self.relative <= explained


@dataclass(repr=False)
class Diagnosis(Result):
    """The gradient errors of a model's layers. Print this object, or use `layers`, `to_json()`."""

    config: Config
    layers: list[LayerError] = field(default_factory=list)

    @property
    def suspicious(self) -> list[LayerError]:
        """The errors that are far above the predicted error."""
        return [y for y in self.layers if y.far_above]

    @property
    def suggested_skip(self) -> tuple[str, ...]:
        """Entries for `skip` that leave the suspicious layers in high precision."""
        return tuple(dict.fromkeys(y.entry for y in self.suspicious if y.entry))

    def _summary(self) -> str:
        if not self.layers:
            return "no gradient has an error"
        worst = max(self.layers, key=lambda y: y.relative)
        return (
            f"errors of {len(self.layers)} gradients, {len(self.suspicious)} far above the "
            f"predicted error; largest {worst.relative:.3g} in {worst.module or 'the top level'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as JSON-ready data."""
        return {
            "layers": [asdict(y) | {"far_above": y.far_above} for y in self.layers],
            "suggested_skip": self.suggested_skip,
        }

    def plot(self, path: str | Path) -> None:
        """Draw measured and predicted errors into an image file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not write files of this extension.
        """
        figure = make_figure("plot", figsize=(8, 0.25 * len(self.layers) + 1.5))
        axes = figure.subplots()
        names = [f"{y.module} {y.gradient}" for y in self.layers]
        axes.barh(names, [y.relative for y in self.layers], label="measured")
        axes.plot([y.predicted or 0.0 for y in self.layers], names, "k|", label="predicted")
        axes.invert_yaxis()
        axes.set_xlabel("relative gradient error")
        axes.legend()
        figure.savefig(path, dpi=120)

    def _parts(self) -> Iterable[Any]:
        if not self.layers:
            yield (
                "No gradient has an error: no linear layer runs in FP8, and no saved tensor that a "
                "gradient depends on is in low-bit formats. fp8pass.explain(model, ...) shows why."
            )
            return
        columns = "gradient of", "mean abs.", "relative", "predicted", ""
        made = make_table("gradient error by layer", "module", *columns)
        for y in self.layers:
            predicted = "no rule" if y.predicted is None else f"{y.predicted:.4f}"
            numbers = f"{y.mean_absolute:.2e}", f"{y.relative:.4f}", predicted
            tensor = f"{y.gradient} {y.shape}"
            made.add_row(make_name(y.module), tensor, *numbers, "!" if y.far_above else "")
        yield made
        if self.suspicious:
            yield "! marks errors far above the predicted error."
        if self.suggested_skip:
            yield f"To leave these layers in high precision: skip={self.suggested_skip!r}"


def diagnose(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    config: Config | None = None,
) -> Diagnosis:
    """Measure the gradient error that each layer of `model` adds on a batch of data.

    A layer that runs several times has one entry for each run. If only parts of the model are
    compiled, only their layers are measured. Runs one forward and backward; parameters, gradients,
    buffers and random number generators are restored.

    Predicted errors include the error of FP8 accumulation. Measured errors include this error only
    on a GPU with FP8 tensor cores, or within `fp8pass.testing.hardware_accumulation()`, because
    other devices accumulate in FP32.

    Args:
        model: a module. If it is compiled with `backend="fp8pass"`, its options are used.
        loss_fn: `loss_fn(model, batch)` returns the loss, for example `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`.
        config: the configuration to diagnose. Default: the model's own, or else the default recipe.

    Returns:
        A Diagnosis: `print` it, or use `.layers`, `.suspicious`, `.plot()`, `.to_json()`.

    Raises:
        TypeError: `model` is not a module, `config` not a `Config`, or the loss not a scalar.
    """
    config = check_configuration("diagnose", model, config)
    records = record_step(model, loss_fn, batch, config)
    return Diagnosis(config, [error for record in records for error in measure_errors(record)])


def measure_errors(record: Record) -> Iterable[LayerError]:
    exact = record.exact_values()
    rules = Rules(record.planned.graph, record.ctx.config, record.ctx.facts)
    predictor = Predictor(rules, record.decisions, record.planned_values(exact))
    predictor.run(record.planned.graph)
    # Layers end at GEMMs, attention, and outputs of non-linear regions.
    ends = {n for region in rules.regions for n in region.outputs}
    ends |= {n for n in rules.backward if kind(n) in LAYER_KINDS}
    names = {original_name(n) for n in ends & rules.backward}
    regions = {original_name(n): i for i, r in enumerate(rules.regions) for n in r.nodes}
    interpreter = LocalErrorInterpreter(record.rewritten, exact, names, regions)
    with hardware_accumulation(emulate=False):
        record.run(interpreter)
    for node, (mean_absolute, relative) in interpreter.errors.items():
        expected = predictor.backward.get(original_name(node), 0.0)
        if not relative and not expected:
            continue  # exact
        yield LayerError(
            record.path(node),
            graph.module_path(graph.skip_views_and_casts(node)),
            _describe(node, record),
            graph.shape_text(graph.tensor(node)),
            mean_absolute,
            relative,
            expected,
        )


def _describe(node: fx.Node, record: Record) -> str:
    """Return the field `gradient` of a `LayerError`, e.g. `weight` or `attention q`."""
    if kind(node) is Kind.ATTENTION:  # fused operators return all gradients as a tuple
        position = int(node.args[1]) if graph.is_getitem(node) else 3  # type: ignore[arg-type]
        return f"attention {'qkv'[position] if position < 3 else 'operand'}"
    if ROLE in node.meta:
        return "weight" if node.meta[ROLE] == "wgrad" else "input"
    shapes = {graph.shape_text(graph.tensor(n)) for n in record.ctx.facts.parameters}
    return "weight" if graph.shape_text(graph.tensor(node)) in shapes else "input"


class LocalErrorInterpreter(fx.Interpreter):
    """Runs a rewritten graph with exact inputs for each layer, and records each layer's errors.

    Args:
        gm: the rewritten graph.
        exact: the exact value of each node, by name.
        ends: names of the gradients that layers compute.
        regions: index of each node's non-linear region, by name. Gradients within a region are not
            replaced by exact values.
    """

    def __init__(
        self, gm: fx.GraphModule, exact: dict[str, Any], ends: set[str], regions: dict[str, int]
    ) -> None:
        super().__init__(gm)
        self.exact, self.ends, self.regions = exact, ends, regions
        self.backward = graph.tangent_dependent(gm.graph)
        self.errors: dict[fx.Node, tuple[float, float]] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """Replace gradients from other layers by exact values."""
        return fx.map_arg((n.args, n.kwargs), lambda operand: self._find_operand(operand, n))

    def _find_operand(self, operand: fx.Node, user: fx.Node) -> Any:
        name, region = original_name(operand), self.regions.get(original_name(operand))
        inside = region is not None and region == self.regions.get(original_name(user))
        given = self.env[operand]
        # Nodes that a pass added have no exact value.
        measured = name in self.ends and name in self.exact and isinstance(given, Tensor)
        is_end = measured and operand in self.backward
        return arrange_as(operand, self.exact[name]) if is_end and not inside else given

    def run_node(self, n: fx.Node) -> Any:
        """Record a node's error. Replace forward values by exact values."""
        value, name = super().run_node(n), original_name(n)
        if n.op != "call_function" or name not in self.exact:
            return value
        if n not in self.backward:
            return arrange_as(n, self.exact[name])
        if name in self.ends and isinstance(value, Tensor) and value.is_floating_point():
            self.errors[n] = _measure_difference(value, arrange_as(n, self.exact[name]))
        return value


def _measure_difference(value: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the mean absolute error, and the relative L2 error (absolute if `exact` is zero)."""
    wrong, right = value.double(), exact.double()
    norm = float(right.norm())
    error = float((wrong - right).norm())
    return float((wrong - right).abs().mean()), error / norm if norm else error
