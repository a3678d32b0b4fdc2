"""The data of the page, from an explanation."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from torch import fx

from fp8pass import __version__, hardware
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.flops import flops, is_expensive, is_fp8_gemm
from fp8pass.passes.runner import PassRecord
from fp8pass.plan import FrontierPoint, Plan, SavedTensor
from fp8pass.tools.folding import (
    folded,
    folded_linears,
    folded_rules,
    folded_saved,
    path_pattern,
)
from fp8pass.tools.report.comparison import compare, recipe_of
from fp8pass.tools.report.diffs import ModuleDiff, module_diffs
from fp8pass.tools.report.folding import fold
from fp8pass.tools.report.picture import KINDS, draw
from fp8pass.tools.report.sources import source_line
from fp8pass.tools.report.timeline import timeline
from fp8pass.tools.tables import by_bytes, mib, remarks, short_name

if TYPE_CHECKING:
    from fp8pass.tools.diagnosis import Diagnosis
    from fp8pass.tools.explanation_data import ExplanationData

FP8_LINEAR = "linear layers in FP8"

_FOLDER = Path(__file__).parent
_MOST_EXPENSIVE = 8  # rows

# Plans whose memory differs by less than this share are shown once.
_SAME_MEMORY = 0.005


@dataclass(frozen=True)
class FoldedRow:
    """An item of a plan that is the same in `count` modules.

    Attributes:
        module: pattern of the modules' paths.
        count: number of modules.
        item: the item of the first of them.
        source: the line of the model that it comes from.
    """

    module: str
    count: int
    item: Any
    source: str = ""


@dataclass(frozen=True)
class BudgetChoice:
    """The plan of another memory budget, compared with the chosen one."""

    point: FrontierPoint
    saves_bytes: int
    lowers_peak: int
    adds_seconds: float
    chosen: bool


@dataclass(frozen=True)
class GraphSection:
    """One graph of the page."""

    number: int
    runs: int
    modules: str
    plan: Plan
    linears: list[FoldedRow]
    saved: list[FoldedRow]
    scalars: list[SavedTensor]
    rules: list[FoldedRow]
    passes: list[tuple[PassRecord, list[ModuleDiff]]]
    choices: list[BudgetChoice]


def write_report(
    explanation: ExplanationData,
    path: Path,
    diagnosis: Diagnosis | None,
    beside: ExplanationData | None,
) -> None:
    """Write the page to `path`."""
    path.write_text(render(explanation, diagnosis, beside), encoding="utf-8")


def render(
    explanation: ExplanationData,
    diagnosis: Diagnosis | None = None,
    beside: ExplanationData | None = None,
) -> str:
    """The page's HTML, with everything it needs in it; `beside` is what it is compared with.

    Raises:
        ValueError: `beside` is of another model.
    """
    environment = Environment(
        loader=PackageLoader("fp8pass.tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # keys in their order, not sorted
    environment.filters.update(
        mib=mib, share=_share, seconds=_seconds, short=short_name, flop=_flop
    )
    environment.filters.update(recipe=_recipe, ms=_milliseconds)
    sections = [section(i, g, explanation.modules_of(g)) for i, g in enumerate(explanation.graphs)]
    return environment.get_template("template.html.j2").render(
        explanation=explanation,
        sections=sections,
        expensive=most_expensive(sections),
        high_precision=reasons(explanation.graphs),
        operations=operations(explanation.graphs),
        options=options(explanation.config),
        diagnosis=diagnosis,
        comparison=compare(explanation, beside) if beside else None,
        kinds=KINDS,
        fp8_linear=FP8_LINEAR,
        rates_of=hardware.RATES_OF,
        remarks=remarks(explanation).split("\n"),
        made={
            "fp8pass": __version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        },
        data=page_data(explanation, diagnosis),
        asset=asset,
    )


def asset(name: str) -> Markup:
    """A file that is put into the page as it is."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


def section(number: int, compiled: CompiledGraph, modules: list[str]) -> GraphSection:
    """The data of one graph, whose paths start from `modules`."""
    plan = compiled.plan
    sources = {n.name: source_line(n) for n in compiled.gm.graph.nodes}
    return GraphSection(
        number=number,
        runs=len(compiled.runs),
        modules=path_pattern(modules) if any(modules) else "",
        plan=plan,
        linears=[FoldedRow(*row) for row in folded_linears(plan.linears)],
        saved=_saved_rows(plan.saved, sources),
        scalars=[s for s in plan.saved if s.is_scalar],
        rules=[FoldedRow(*row) for row in folded_rules(plan.rules)],
        passes=[(record, module_diffs(record)) for record in compiled.passes],
        choices=list(_choices(plan)),
    )


def _saved_rows(saved: Iterable[SavedTensor], sources: dict[str, str]) -> list[FoldedRow]:
    """The kept tensors, the largest first; `sources` has lines of the model by node name."""
    rows = [FoldedRow(*row, source=sources[row[2].name]) for row in folded_saved(saved, sources)]
    return sorted(rows, key=lambda r: r.count * r.item.bytes, reverse=True)


def _choices(plan: Plan) -> Iterator[BudgetChoice]:
    """This plan, and those of the frontier that keep less, from the most to the least memory."""
    here = plan.point
    if here is None:
        return
    less = [p for p in plan.frontier if p.bytes < (1 - _SAME_MEMORY) * here.bytes]
    for point in (here, *reversed(by_bytes(less))):
        yield BudgetChoice(
            point,
            saves_bytes=here.bytes - point.bytes,
            lowers_peak=here.peak_bytes - point.peak_bytes,
            adds_seconds=point.seconds - here.seconds,
            chosen=point is here,
        )


def most_expensive(sections: Iterable[GraphSection]) -> list[FoldedRow]:
    """The tensors that take most of the kept bytes, over all graphs."""
    rows = [row for s in sections for row in s.saved if row.item.bytes]
    return sorted(rows, key=lambda r: r.count * r.item.bytes, reverse=True)[:_MOST_EXPENSIVE]


def reasons(graphs: Iterable[CompiledGraph]) -> list[FoldedRow]:
    """The linear layers in high precision, those of one reason folded."""
    keyed = ((y.module, (y.reason,), y) for g in graphs for y in g.plan.high_precision)
    return [FoldedRow(*row) for row in folded(keyed)]


def operations(graphs: Iterable[CompiledGraph]) -> dict[str, float]:
    """Floating point operations of a step by kind of operator, the largest number first."""
    total: dict[str, float] = {}
    for compiled in graphs:
        for node in filter(is_expensive, compiled.gm.graph.nodes):
            label = _operation_label(node)
            total[label] = total.get(label, 0.0) + flops(node)
    return dict(sorted(total.items(), key=lambda x: x[1], reverse=True))


def _operation_label(node: fx.Node) -> str:
    if is_fp8_gemm(node):
        return FP8_LINEAR
    if kind(node) is Kind.ATTENTION:
        return "attention, in high precision"
    return "other matrix products, in high precision"


def options(config: Config) -> dict[str, Any]:
    """The options that differ from the defaults."""
    default = Config()
    given = {f.name: getattr(config, f.name) for f in fields(Config) if f.name != "compiler"}
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def page_data(explanation: ExplanationData, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """The data of drawings: pictures, the timeline, memory against time, errors."""
    return {
        "kinds": KINDS,
        "pictures": [asdict(fold(draw(g))) for g in explanation.graphs],
        "timeline": [asdict(m) for m in timeline(explanation.graphs)],
        "choices": [[asdict(c) for c in _choices(g.plan)] for g in explanation.graphs],
        "errors": json.loads(diagnosis.to_json())["layers"] if diagnosis else [],
    }


def _flop(count: float) -> str:
    """A number of operations, `868 MFLOP`."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} TFLOP"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _recipe(config: Config) -> str:
    """A configuration as its recipe, and what differs from that: `coat, memory_budget=0.5`."""
    name, changes = recipe_of(config)
    return ", ".join((name, *(f"{option}={value!r}" for option, value in changes.items())))


def _share(part: float, whole: float) -> str:
    """A part as a percentage; `n/a` if the whole is zero or infinite."""
    return f"{part / whole:.0%}" if whole and math.isfinite(whole) else "n/a"
