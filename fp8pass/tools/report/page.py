"""Compute the data of the report's page from an explanation, and render the page as HTML."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from torch import fx

from fp8pass import __version__, hardware
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.flops import flops, is_expensive, is_fp8_gemm
from fp8pass.graph.names import shorten_operator
from fp8pass.graph.tags import INPUT_NAME
from fp8pass.option_checks import bytes_text
from fp8pass.plan import Plan
from fp8pass.tools import folding
from fp8pass.tools.explanation_data import describe_operands
from fp8pass.tools.output import pick_unit
from fp8pass.tools.report.comparison import compare
from fp8pass.tools.report.diffs import diff_modules
from fp8pass.tools.report.picture import OPERATOR_KINDS, draw, find_source_line
from fp8pass.tools.report.repeated_layers import fold
from fp8pass.tools.report.timeline import trace_timeline
from fp8pass.tools.running import find_recipe
from fp8pass.tools.tables import format_remarks, sort_points

if TYPE_CHECKING:
    from fp8pass.tools.diagnosis import Diagnosis
    from fp8pass.tools.explanation_data import ExplanationData

FP8_LINEAR = "linear layers in FP8"

_FOLDER = Path(__file__).parent
_MOST_EXPENSIVE = 8  # rows of a table

# A plan of the frontier is listed only if it needs less memory by more than this share.
_SAME_MEMORY = 0.005


def render(
    explanation: ExplanationData,
    diagnosis: Diagnosis | None = None,
    other: ExplanationData | None = None,
) -> str:
    """Return the page's HTML with all styles, scripts and data.

    If `other` is given, the page compares `explanation` with `other`.

    Raises:
        ValueError: `other` explains another model.
    """
    environment = Environment(
        loader=PackageLoader("fp8pass.tools.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # jinja2 sorts keys by default
    environment.filters.update(
        size=format_size,
        budget=format_budget,
        share=_format_share,
        time=format_time,
        short=shorten_operator,
        flop=_format_flop,
        recipe=_format_recipe,
    )
    graphs = explanation.graphs
    sections = [_make_section(i, g, explanation.modules_of(g)) for i, g in enumerate(graphs)]
    saved = (row for s in sections for row in s["saved"] if row.item.bytes)
    default = vars(Config(compiler=explanation.config.compiler))
    reasons = ((y.module, (y.reason,), y) for g in graphs for y in g.plan.high_precision)
    return environment.get_template("template.html.j2").render(
        explanation=explanation,
        sections=sections,
        has_budgets=any(s["choices"] for s in sections),
        expensive=folding.sort_by_bytes(saved)[:_MOST_EXPENSIVE],
        high_precision=folding.fold_rows(reasons),
        operations=count_operations(graphs),
        options={k: x for k, x in vars(explanation.config).items() if x != default[k]},
        diagnosis=diagnosis,
        comparison=compare(explanation, other) if other else None,
        kinds=OPERATOR_KINDS,
        fp8_linear=FP8_LINEAR,
        rates_of=hardware.RATES_OF,
        remarks=format_remarks(explanation).split("\n"),
        made={
            "fp8pass": __version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        },
        data=page_data(explanation, diagnosis),
        asset=lambda name: Markup((_FOLDER / name).read_text(encoding="utf-8")),
    )


def page_data(explanation: ExplanationData, diagnosis: Diagnosis | None) -> dict[str, Any]:
    return {
        "kinds": OPERATOR_KINDS,
        "pictures": [asdict(fold(draw(g))) for g in explanation.graphs],
        "timeline": [asdict(p) for p in trace_timeline(explanation.graphs)],
        "stock": [asdict(p) for p in trace_timeline(explanation.graphs, stock=True)],
        "choices": [list(_list_choices(g.plan)) for g in explanation.graphs],
        "errors": json.loads(diagnosis.to_json())["layers"] if diagnosis else [],
    }


def _make_section(number: int, compiled: CompiledGraph, modules: list[str]) -> dict[str, Any]:
    plan = compiled.plan
    nodes = {n.name: n for n in compiled.gm.graph.nodes}
    sources = {name: find_source_line(n) for name, n in nodes.items()}
    saved = (
        replace(s, module=nodes[s.name].meta.get(INPUT_NAME) or s.module)
        for s in describe_operands(compiled)
    )
    return {
        "number": number,
        "runs": len(compiled.runs),
        "modules": folding.format_paths(modules) if any(modules) else "",
        "plan": plan,
        "linears": folding.fold_linears(plan.linears),
        "saved": folding.fold_saved(saved, sources),
        "scalars": [s for s in plan.saved if s.is_scalar],
        "rules": folding.fold_rules(plan.rules),
        "passes": [(record, diff_modules(record)) for record in compiled.passes],
        "choices": list(_list_choices(plan)),
    }


def _list_choices(plan: Plan) -> Iterator[dict[str, Any]]:
    here = plan.point
    if here is None:
        return
    less = [p for p in plan.frontier if p.bytes < (1 - _SAME_MEMORY) * here.bytes]
    for point in (here, *reversed(sort_points(less))):
        yield {
            "point": asdict(point),
            "saves_bytes": here.bytes - point.bytes,
            "peak_change": point.peak_bytes - here.peak_bytes,
            "adds_seconds": point.seconds - here.seconds,
            "chosen": point is here,
        }


def count_operations(graphs: Iterable[CompiledGraph]) -> dict[str, float]:
    """Return FLOPs by kind of operator, the largest first."""
    total: Counter[str] = Counter()
    for compiled in graphs:
        for node in filter(is_expensive, compiled.gm.graph.nodes):
            total[_label_operation(node)] += flops(node)  # type: ignore[assignment]
    return dict(total.most_common())


def _label_operation(node: fx.Node) -> str:
    if is_fp8_gemm(node):
        return FP8_LINEAR
    if kind(node) is Kind.ATTENTION:
        return "attention, in high precision"
    return "other matrix products, in high precision"


def _format_flop(count: float) -> str:
    """Format a count, e.g. `868 MFLOP`."""
    size, unit = pick_unit(count, {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1})
    return f"{size:.3g} {unit}FLOP"


def format_size(count: float) -> str:
    """Format bytes, e.g. `-1.5 MiB`."""
    return f"{'-' * (count < 0)}{bytes_text(abs(count))}"


def format_budget(count: int) -> str:
    """Format bytes, rounded up, as a value of `memory_budget`, e.g. `1.012GiB`."""
    size, unit = pick_unit(count, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})
    return f"{math.ceil(1000 * size) / 1000:.10g}{unit}"


def format_time(seconds: float) -> str:
    """Format seconds, e.g. `12.3 µs`."""
    size, unit = pick_unit(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6})
    return f"{size:.3g} {unit}"


def _format_recipe(config: Config) -> str:
    """Format a configuration, e.g. `coat, memory_budget=0.5`."""
    name, changes = find_recipe(config)
    return ", ".join((name, *(f"{option}={value!r}" for option, value in changes.items())))


def _format_share(part: float, whole: float) -> str:
    """Format a percentage; `n/a` if the whole is zero or infinite."""
    return f"{part / whole:.0%}" if whole and math.isfinite(whole) else "n/a"
