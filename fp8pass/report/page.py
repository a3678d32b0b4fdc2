"""What the page shows, out of an explanation."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

import fp8pass
from fp8pass.config import Config
from fp8pass.debug import PassRecord
from fp8pass.explain import by_bytes, folded, mib
from fp8pass.partition import CompiledGraph
from fp8pass.plan import FrontierPoint, Linear, Plan, RuleSummary, SavedTensor
from fp8pass.report.diffs import ModuleDiff, module_diffs
from fp8pass.report.folding import fold
from fp8pass.report.picture import KINDS, draw
from fp8pass.report.timeline import timeline

if TYPE_CHECKING:
    from fp8pass.diagnose import Diagnosis
    from fp8pass.explain import Explanation

_FOLDER = Path(__file__).parent
_MOST_EXPENSIVE = 8


@dataclass(frozen=True)
class Row:
    """What is the same in `count` places, of which `module` is the pattern."""

    module: str
    count: int
    item: Any


@dataclass(frozen=True)
class Choice:
    """What another memory budget would give, beside the plan at hand."""

    point: FrontierPoint
    saves_bytes: int
    adds_seconds: float
    chosen: bool


@dataclass(frozen=True)
class GraphSection:
    """One graph of the page."""

    number: int
    plan: Plan
    linears: list[Row]
    saved: list[Row]
    scalars: list[SavedTensor]
    rules: list[Row]
    passes: list[tuple[PassRecord, list[ModuleDiff]]]
    choices: list[Choice]


def write_report(explanation: Explanation, path: Path, diagnosis: Diagnosis | None) -> None:
    """Write the page to `path`."""
    path.write_text(render(explanation, diagnosis), encoding="utf-8")


def render(explanation: Explanation, diagnosis: Diagnosis | None = None) -> str:
    """The page's HTML, with everything it needs in it."""
    environment = Environment(
        loader=PackageLoader("fp8pass.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # as they come, not by name
    environment.filters.update(mib=mib, share=_share)
    sections = [section(i, g) for i, g in enumerate(explanation.graphs)]
    return environment.get_template("template.html.j2").render(
        explanation=explanation,
        sections=sections,
        expensive=most_expensive(sections),
        high_precision=reasons(explanation.graphs),
        flops=sum(g.plan.flops for g in explanation.graphs),
        fp8_flops=sum(g.plan.fp8_flops for g in explanation.graphs),
        options=options(explanation.config),
        diagnosis=diagnosis,
        kinds=KINDS,
        made={
            "fp8pass": fp8pass.__version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        },
        data=page_data(explanation, diagnosis),
        asset=asset,
    )


def asset(name: str) -> Markup:
    """A file of the page, to be put into it as it is."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


def section(number: int, compiled: CompiledGraph) -> GraphSection:
    """What is shown of one graph."""
    plan = compiled.plan
    return GraphSection(
        number=number,
        plan=plan,
        linears=_linear_rows(plan.linears),
        saved=_saved_rows(s for s in plan.saved if s.shape != "scalar"),
        scalars=[s for s in plan.saved if s.shape == "scalar"],
        rules=_rule_rows(plan.rules),
        passes=[(record, module_diffs(record)) for record in compiled.passes],
        choices=list(_choices(plan)),
    )


def _linear_rows(linears: Iterable[Linear]) -> list[Row]:
    keyed = (
        (y.module, (y.rows, y.in_features, y.out_features, y.fp8, y.reason), y) for y in linears
    )
    return [Row(*row) for row in folded(keyed)]


def _saved_rows(saved: Iterable[SavedTensor]) -> list[Row]:
    keyed = ((s.module, (s.op, s.shape, s.dtype, s.kept_as, s.bytes, s.reason), s) for s in saved)
    return [Row(*row) for row in folded(keyed)]


def _rule_rows(rules: Iterable[RuleSummary]) -> list[Row]:
    keyed = (
        (r.module, (r.operators, round(r.case_1, 6), round(r.case_2, 6), r.reason), r)
        for r in rules
    )
    return [Row(*row) for row in folded(keyed)]


def _choices(plan: Plan) -> Iterator[Choice]:
    """The frontier from the most to the least memory, beside this plan."""
    here = plan.point
    if here is None:
        return
    for point in reversed(by_bytes({*plan.frontier, here})):
        saves, adds = here.bytes - point.bytes, point.seconds - here.seconds
        yield Choice(point, saves, adds, point == here)


def most_expensive(sections: Iterable[GraphSection]) -> list[Row]:
    """What takes most of the kept bytes, over all graphs."""
    rows = [row for s in sections for row in s.saved if row.item.bytes]
    return sorted(rows, key=lambda r: r.count * r.item.bytes, reverse=True)[:_MOST_EXPENSIVE]


def reasons(graphs: Iterable[CompiledGraph]) -> list[tuple[str, int]]:
    """Why linear layers stay in high precision, and how many for each reason."""
    return Counter(y.reason for g in graphs for y in g.plan.high_precision).most_common()


def options(config: Config) -> dict[str, Any]:
    """What was asked for besides the defaults."""
    default = Config()
    given = {f.name: getattr(config, f.name) for f in fields(Config) if f.name != "compiler"}
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def page_data(explanation: Explanation, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """What the page draws: pictures, the timeline, memory against time, errors."""
    return {
        "kinds": KINDS,
        "pictures": [asdict(fold(draw(g))) for g in explanation.graphs],
        "timeline": [asdict(m) for m in timeline(explanation.graphs)],
        "frontiers": [
            {
                "points": [asdict(p) for p in by_bytes(g.plan.frontier)],
                "chosen": asdict(g.plan.point) if g.plan.point else None,
            }
            for g in explanation.graphs
        ],
        "errors": json.loads(diagnosis.to_json())["layers"] if diagnosis else [],
    }


def _share(part: float, whole: float) -> str:
    """A part as a percentage, `n/a` of nothing."""
    return f"{part / whole:.0%}" if whole and math.isfinite(whole) else "n/a"
