"""`fp8pass.explain`: what was decided about a model, and why, without training it."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fp8pass import compat, measure
from fp8pass.backend import Backend
from fp8pass.config import Config, split_options
from fp8pass.partition import CompiledGraph
from fp8pass.plan import FrontierPoint, Linear, Plan, RuleSummary, SavedTensor

if TYPE_CHECKING:
    from fp8pass.diagnose import Diagnosis


@dataclass
class Explanation:
    """What fp8pass does to a model; print it, `save` it as a page, or look at `graphs`.

    Attributes:
        config: what was asked for.
        model: name of the model's class.
        eager_bytes: what the model keeps for its backward without any compiler, measured.
        graphs: what was compiled, in order.
    """

    config: Config
    model: str = ""
    eager_bytes: int = 0
    graphs: list[CompiledGraph] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward over all graphs, parameters not counted."""
        return sum(g.plan.saved_bytes for g in self.graphs)

    @property
    def stock_bytes(self) -> int:
        """Bytes that stock `torch.compile` would keep for the same graphs."""
        return sum(g.plan.stock_bytes or 0 for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs' code, as JSON-ready data."""
        return {
            "config": {name: _json_ready(x) for name, x in vars(self.config).items()},
            "saved_bytes": self.saved_bytes,
            "stock_bytes": self.stock_bytes,
            "eager_bytes": self.eager_bytes,
            "graphs": [
                g.plan.to_dict() | {"pass_seconds": {p.name: p.seconds for p in g.passes}}
                for g in self.graphs
            ],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The explanation as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def save(self, path: str | Path, diagnosis: Diagnosis | None = None) -> None:
        """Write everything as one HTML page that needs no network: see `fp8pass.report`.

        Args:
            path: of the file.
            diagnosis: what `fp8pass.diagnose` measured, to be shown beside what was predicted.
        """
        # Here rather than above: templates take time to import, which compiling need not wait for.
        from fp8pass.report import write_report

        write_report(self, Path(path), diagnosis)

    def plot_frontier(self, path: str | Path) -> None:
        """Write a PNG of memory against added time, a line for each graph, this plan marked.

        Raises:
            ValueError: there is no frontier to plot.
            ImportError: matplotlib is not installed.
        """
        plans = {n: g.plan for n, g in enumerate(self.graphs) if g.plan.frontier}
        if not plans:
            raise ValueError("No frontier to plot: call fp8pass.explain(..., frontier=True).")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot_frontier needs matplotlib: pip install matplotlib", name="matplotlib"
            ) from error
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(
            xlabel="kept for the backward, MiB", ylabel="added by recomputation, ms a step"
        )
        for number, plan in plans.items():
            points = by_bytes(plan.frontier)
            x, y = [p.bytes / 2**20 for p in points], [p.seconds * 1e3 for p in points]
            (line,) = axes.plot(x, y, marker=".", label=f"graph {number}")
            if plan.point:
                chosen = plan.point.bytes / 2**20, plan.point.seconds * 1e3
                axes.plot(*chosen, marker="*", markersize=14, color=line.get_color(), ls="none")
        axes.legend(title="★ this plan")
        figure.savefig(path, format="png")

    def __str__(self) -> str:
        console = Console(width=150, file=io.StringIO())
        for part in self._parts():
            console.print(part)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def _parts(self) -> Iterator[Any]:
        for number, report in enumerate(self.graphs):
            title = f"graph {number}" + (f" ({report.plan.note})" if report.plan.note else "")
            yield _linears_table(title, report.plan.linears)
            if report.plan.saved:
                yield _saved_table(title, report.plan)
            if report.plan.frontier:
                yield _frontier_table(title, report.plan)
            if report.plan.rules:
                yield _rules_table(title, report.plan.rules)
        yield _totals(self)


def explain(
    model: nn.Module,
    *args: Any,
    config: Config | None = None,
    frontier: bool = False,
    rules: bool = False,
    **kwargs: Any,
) -> Explanation:
    """What fp8pass would do to `model` called with these arguments.

    Runs one forward of the model as it is, and one through the rewritten graphs, op by op, with
    gradients enabled; buffers and random number generators are put back afterwards, parameters and
    their gradients not touched.

    Args:
        model: a module, or one compiled with `backend="fp8pass"`, whose options are then used.
        *args: arguments of the model.
        config: what to explain instead of the model's own options or the default recipe.
        frontier: also trace memory against time: what other memory budgets would give. Solves some
            ten more programs for each graph.
        rules: also show the error rules: how much each non-linear region amplifies errors of what
            is stored, as a number and as a formula.
        **kwargs: keyword arguments of the model, besides `config`, `frontier` and `rules`.

    Raises:
        ValueError: the model is on the meta device.

    Returns:
        An Explanation: `print` it, `.save("report.html")` it, or use `.graphs`, `.to_json()` and
        `.plot_frontier()`.
    """
    config = config or configuration_of(model)
    module = getattr(model, "_orig_mod", model)
    explanation = Explanation(config, type(module).__name__)
    wanted = {"frontier": frontier, "rules": rules}
    extras = frozenset(name for name, asked in wanted.items() if asked)
    backend = Backend(replace(config, compiler="eager"), explanation.graphs.append, extras)
    compiled = torch.compile(module, backend=backend)
    with unchanged(module), torch.enable_grad():
        explanation.eager_bytes = measure.saved_bytes(module, *args, **kwargs)
        with compat.fresh_compilation():
            compiled(*args, **kwargs)
    return explanation


def configuration_of(model: nn.Module) -> Config:
    """The configuration a model was compiled with, the default one if it was not."""
    compiled_with, options = compat.backend_of(model)
    if options:
        return split_options(options, compat.list_options())[0]
    return compiled_with.config if isinstance(compiled_with, Backend) else Config()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put buffers and random number generators back after running a module.

    Raises:
        ValueError: it cannot run, as its parameters have no values.
    """
    without = [name for name, p in module.named_parameters() if p.is_meta]
    if without:
        raise ValueError(
            f"{without[0]} and {len(without) - 1} more parameters are on the meta device, where "
            "nothing can run. Give them memory with model.to_empty(device='cpu'), or make the "
            "model with fewer layers: equal ones are treated alike."
        )
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


def folded(rows: Iterable[tuple[str, tuple[Any, ...], Any]]) -> list[tuple[str, int, Any]]:
    """Rows (path, key, item) that differ only in the layer's number, as (path, count, item)."""
    groups: dict[tuple[str, tuple[Any, ...]], list[tuple[str, Any]]] = {}
    for path, key, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", path), key), []).append((path, item))
    return [
        (pattern if len(members) > 1 else members[0][0], len(members), members[0][1])
        for (pattern, _), members in groups.items()
    ]


def folded_linears(linears: Iterable[Linear]) -> list[tuple[str, int, Linear]]:
    """Linear layers, equal ones put together."""
    return folded(
        (y.module, (y.rows, y.in_features, y.out_features, y.fp8, y.reason), y) for y in linears
    )


def folded_saved(
    saved: Iterable[SavedTensor], sources: Mapping[str, str] | None = None
) -> list[tuple[str, int, SavedTensor]]:
    """Kept tensors but scalars, equal ones put together; of `sources`, lines by name, too."""
    sources = sources or {}
    return folded(
        (s.module, (s.op, s.shape, s.dtype, s.kept_as, s.bytes, s.reason, sources.get(s.name)), s)
        for s in saved
        if not s.is_scalar
    )


def folded_rules(rules: Iterable[RuleSummary]) -> list[tuple[str, int, RuleSummary]]:
    """Error rules, those of equal regions put together."""

    def key(r: RuleSummary) -> tuple[Any, ...]:
        return r.operators, round(r.case_1, 6), round(r.case_2, 6), r.reason, len(r.inputs)

    return folded((r.module, key(r), r) for r in rules)


def _linears_table(title: str, linears: list[Linear]) -> Table:
    table = Table(title=f"{title}: linear layers", title_justify="left")
    for column in ("module", "×", "rows", "in → out", "FP8 GEMMs", "high precision because"):
        table.add_column(column)
    for path, count, y in folded_linears(linears):
        sizes = f"{y.in_features} → {y.out_features}"
        table.add_row(path, str(count), y.rows, sizes, " ".join(y.fp8) or "none", y.reason)
    return table


def _saved_table(title: str, plan: Plan) -> Table:
    table = Table(title=f"{title}: kept for the backward", title_justify="left")
    columns = ("module", "×", "operator", "shape", "kept as", "MiB exact", "MiB kept", "grad error")
    for column in (*columns, "reason"):
        table.add_column(column, justify="right" if "MiB" in column else "left")

    scalars = [s for s in plan.saved if s.is_scalar]
    for path, count, s in folded_saved(plan.saved):
        exact, kept = mib(count * s.bytes_exact), mib(count * s.bytes)
        error = f"{s.expected_error:.1%}" if s.expected_error else ""
        shape = f"{s.dtype} {s.shape}"
        table.add_row(path, str(count), s.op, shape, s.kept_as, exact, kept, error, s.reason)
    if scalars:
        kept = mib(sum(s.bytes for s in scalars))
        table.add_row(
            "(all)", str(len(scalars)), "", "scalars", "exact", kept, kept, "", "scales, seeds"
        )
    return table


def _rules_table(title: str, rules: list[RuleSummary]) -> Table:
    """Amplification of errors by region; Case 1 recomputes all but the inputs, Case 2 reads it."""
    table = Table(title=f"{title}: error rules", title_justify="left")
    for column in (
        "module",
        "×",
        "operators",
        "inputs",
        "case 1",
        "case 2",
        "formula, or why none",
    ):
        table.add_column(column)

    for path, count, r in folded_rules(rules):
        numbers = ("", "") if r.reason else (f"{r.case_1:.2f}", f"{r.case_2:.2f}")
        names = " ".join(r.operators), " ".join(r.inputs)
        table.add_row(path, str(count), *names, *numbers, r.reason or r.bound)
    return table


def _frontier_table(title: str, plan: Plan) -> Table:
    """What each budget gives; shares are of what is kept without one, the peak an estimate."""
    table = Table(title=f"{title}: memory against time", title_justify="left")
    for column in ("MiB kept", "of unlimited", "peak MiB", "added ms", "grad error"):
        table.add_column(column, justify="right")
    table.add_column("")
    points = by_bytes({*plan.frontier, *([plan.point] if plan.point else [])})
    for p in points:
        share = f"{p.bytes / max(points[-1].bytes, 1):.0%}"
        mark = "◀ this plan" if p == plan.point else ""
        numbers = mib(p.peak_bytes), f"{p.seconds * 1e3:.3g}", f"{p.error:.1%}"
        table.add_row(mib(p.bytes), share, *numbers, mark)
    return table


def _json_ready(value: Any) -> Any:
    """An option's value as data that JSON has: no infinity, no tuples."""
    return str(value) if value == math.inf else json.loads(json.dumps(value))


def by_bytes(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Points of a frontier from the least to the most memory."""
    return sorted(points, key=lambda p: (p.bytes, p.seconds))


def _totals(explanation: Explanation) -> str:
    linears = [y for g in explanation.graphs for y in g.plan.linears]
    fp8 = sum(1 for y in linears if y.fp8)
    kept, stock = explanation.saved_bytes, explanation.stock_bytes
    share = f" ({kept / stock:.0%})" if stock else ""
    uses = [use for g in explanation.graphs for use in g.plan.kernels]
    programs, generated = (_summed(u.programs for u in uses), _summed(u.generated for u in uses))
    kernels = f"{_counted(programs, ', ')}, in {sum(u.launches for u in uses)} launches"
    return (
        f"{fp8} of {len(linears)} linear layers in FP8. Kept for the backward: {mib(kept)} MiB"
        f"; stock torch.compile would keep {mib(stock)} MiB{share}."
        f"\nKernels: {kernels if programs else 'none'}. Matrices quantized by generated code: "
        f"{_counted(generated, '; ') or 'none'}.{_merged(explanation)}"
    )


def _merged(explanation: Explanation) -> str:
    merged = [layers for g in explanation.graphs for layers in g.plan.merged]
    if not merged:
        return ""
    gemms = "one GEMM" if len(merged) == 1 else f"{len(merged)} GEMMs"
    return f" Input gradients of {sum(map(len, merged))} layers come from {gemms}."


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(c) for c in counts), Counter()))


def _counted(counts: dict[str, int], separator: str) -> str:
    return separator.join(f"{n} × {name}" for name, n in counts.items())


def mib(count: int) -> str:
    """Bytes in MiB, with as many digits as tell."""
    size = count / 2**20
    if 0 < abs(size) < 0.001:
        return "<0.001"
    return f"{size:,.1f}" if abs(size) >= 100 else f"{size:.3g}"
