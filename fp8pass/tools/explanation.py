"""`fp8pass.explain`: show fp8pass's decisions about a model, and the reasons, without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8pass import compat, graph, hardware
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.passes import Requests
from fp8pass.plan import Plan
from fp8pass.tools import running
from fp8pass.tools.diagnosis import Diagnosis
from fp8pass.tools.explanation_data import ExplanationData, describe_operands
from fp8pass.tools.folding import format_paths
from fp8pass.tools.output import make_figure
from fp8pass.tools.saved_bytes import saved_bytes
from fp8pass.tools.tables import format_totals, make_tables, sort_points

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class Explanation(ExplanationData):
    """The decisions of fp8pass about a model.

    Print this object, `save` it as a page, or use `graphs`.
    """

    def save(
        self,
        path: str | Path,
        diagnosis: Diagnosis | None = None,
        *,
        beside: Explanation | None = None,
    ) -> None:
        """Write the explanation as one HTML page that works offline (docs/report.md).

        Args:
            path: the file to write.
            diagnosis: result of `fp8pass.diagnose`, to compare measured and predicted errors.
            beside: explanation of the same model with another recipe or budget, to compare the
                saved bytes and the time of each module.

        Raises:
            TypeError: `diagnosis` or `beside` has the wrong type.
            ValueError: `beside` is the explanation of another model, or `path` is a JSON file.
        """
        if Path(path).suffix == ".json":
            raise ValueError("save writes HTML. For JSON call explanation.to_json(path).")
        # The report needs jinja2, which takes time to import.
        from fp8pass.tools.report import render

        if diagnosis is not None and not isinstance(diagnosis, Diagnosis):
            raise TypeError(
                "diagnosis must be a return value of fp8pass.diagnose, got "
                f"{type(diagnosis).__name__}. Pass another explanation as beside=."
            )
        if beside is not None and not isinstance(beside, Explanation):
            raise TypeError(
                "beside must be a return value of fp8pass.explain, got "
                f"{type(beside).__name__}. Write beside=fp8pass.explain(model, ..., config=...)."
            )
        Path(path).write_text(render(self, diagnosis, beside), encoding="utf-8")

    def plot_frontier(self, path: str | Path) -> None:
        """Plot saved memory against added time into an image file, with a line for each graph.

        Raises:
            ValueError: the explanation has no frontier, or matplotlib does not support the file's
                extension.
            ImportError: matplotlib is not installed.
        """
        plans = {n: g.plan for n, g in enumerate(self.graphs) if g.plan.frontier}
        if not plans:
            raise ValueError("No frontier to plot: call fp8pass.explain(..., frontier=True).")
        figure = make_figure("plot_frontier")
        axes = figure.add_subplot(
            xlabel="saved for the backward, MiB",
            ylabel=f"added by recomputation, ms per step, {hardware.RATES_OF}",
        )
        for number, plan in plans.items():
            points = sort_points(plan.frontier)
            x, y = [p.bytes / 2**20 for p in points], [p.seconds * 1e3 for p in points]
            (line,) = axes.plot(x, y, marker=".", label=f"graph {number}")
            if plan.point:
                chosen = plan.point.bytes / 2**20, plan.point.seconds * 1e3
                axes.plot(*chosen, marker="*", markersize=14, color=line.get_color(), ls="none")
        axes.legend(title="★ this plan")
        figure.savefig(path)

    def _parts(self) -> Iterator[Any]:
        for number, compiled in enumerate(self.graphs):
            runs = len(compiled.runs)
            plan = replace(compiled.plan, saved=describe_operands(compiled))
            notes = ["inference"] * plan.inference + [plan.note] * bool(plan.note)
            notes += [f"GEMMs are emulated: {plan.emulated}"] * bool(plan.emulated)
            notes += [f"runs {runs}×"] * (runs > 1)
            of = f" of {format_paths(modules)}" if any(modules := self.modules_of(compiled)) else ""
            title = f"graph {number}{of}{' (' + ', '.join(notes) + ')' if notes else ''}"
            yield from make_tables(title, plan)
        yield format_totals(self)


def _measure_in_eager(
    explanation: Explanation, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:  # the stance also applies to functions that the model itself compiles
        with torch.compiler.set_stance("force_eager"), _record_linears(module) as linears:
            explanation.eager_bytes = saved_bytes(module, *args, **kwargs)
    except AssertionError:
        # torch.cond, scan and map need Dynamo, which rejects the hooks that record linear layers.
        with torch.compiler.set_stance("default", force_backend="eager"):
            explanation.eager_bytes = saved_bytes(module, *args, **kwargs)
    else:
        explanation.linears = linears
        explanation.owners |= linears


@contextmanager
def _record_linears(model: nn.Module) -> Iterator[dict[int, str]]:
    """Record each `nn.Linear` that runs. Yield a mapping of the ids of its parameters to its path.

    With FSDP2, these are the gathered parameters. Layers that compute their weight are left out.
    """
    found: dict[int, str] = {}
    paths: dict[nn.Module, str] = {
        m: graph.clean_path(n) for n, m in model.named_modules() if isinstance(m, nn.Linear)
    }

    def note(layer: nn.Module, args: Any) -> None:
        own = dict(layer.named_parameters(recurse=False))
        if "weight" in own:
            found.update((id(p), paths[layer]) for p in own.values())

    hooks = [layer.register_forward_pre_hook(note) for layer in paths]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _count_convolutions(model: nn.Module) -> tuple[int, float]:
    layers = [m for m in model.modules() if isinstance(m, CONVOLUTIONS)]
    own = {p for layer in layers for p in layer.parameters()}
    total = sum(p.numel() for p in model.parameters())
    return len(layers), sum(p.numel() for p in own) / total if total else 0.0


def _name_projections(model: nn.Module, plan: Plan) -> None:
    """Name the projections of each `nn.MultiheadAttention`, which share a path in the plan.

    Up to three GEMMs project queries, keys and values. The output projection, which follows, has a
    third of their output features.
    """
    modules = [
        f".{graph.clean_path(path)}"
        for path, m in model.named_modules()
        if isinstance(m, nn.MultiheadAttention)
    ]
    outputs: Counter[str] = Counter()
    for i, y in enumerate(plan.linears):
        if any(path.endswith(f".{y.module}") for path in modules):
            is_last = outputs[y.module] == 3 * y.out_features
            outputs[y.module] = 0 if is_last else outputs[y.module] + y.out_features
            plan.linears[i] = replace(y, projection="out_proj" if is_last else "in_proj")


def explain(
    model: nn.Module,
    *args: Any,
    config: Config | None = None,
    frontier: bool = False,
    rules: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Explain what fp8pass would do to `model` if the model is called with these arguments.

    Runs one forward of the model in eager mode, and one through the rewritten graphs, op by op,
    with gradients enabled. If only parts of the model are compiled, only these parts are rewritten.
    Buffers and random number generators are restored; parameters and gradients do not change.

    Args:
        model: a module. If it is compiled with `backend="fp8pass"`, its options are used.
        *args: arguments of the model.
        config: the configuration to explain. Default: the model's own, or else the default recipe.
        frontier: also compute the plans of other memory budgets. This solves about ten more
            mixed-integer programs for each graph.
        rules: also show how much each non-linear region amplifies errors of stored values, as a
            number and as a formula.
        **kwargs: keyword arguments of the model, besides `config`, `frontier` and `rules`.

    Raises:
        TypeError: `model` is not a module, or `config` not a `Config`.
        ValueError: the model is on the meta device.

    Returns:
        An Explanation: `print` it, `.save("report.html")` it, or use `.graphs`, `.to_json()` and
        `.plot_frontier()`.
    """
    config = running.check_configuration("explain", model, config)
    running.check_arguments(explain, model, kwargs)
    parts = running.find_compiled_parts(model)
    module = model if parts else compat.original_of(model)
    explanation = Explanation(config, type(module).__name__, tuple(map(graph.clean_path, parts)))
    explanation.is_compiled = bool(parts) or running.is_compiled(model)
    explanation.owners = running.find_owners(module)
    explanation.convolutions, explanation.convolution_share = _count_convolutions(module)
    requests = Requests(frontier=frontier, rules=rules)
    backend = Backend(replace(config, compiler="eager"), explanation.graphs.append, requests)
    with running.restore_state(module):
        with compat.run_uncompiled(module), torch.enable_grad():
            _measure_in_eager(explanation, module, args, kwargs)
        with running.compile_as(model, backend) as program:
            explanation.saved_bytes = saved_bytes(program, *args, **kwargs)
    for compiled in explanation.graphs:
        _name_projections(module, compiled.plan)
    return explanation
