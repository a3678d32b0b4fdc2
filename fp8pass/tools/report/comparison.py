"""Compare two explanations of a model by module: saved bytes, formats and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fp8pass import graph
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.tools.explanation_data import ExplanationData
from fp8pass.tools.folding import fold_rows


@dataclass
class ModuleCosts:
    bytes: int = 0  # saved for the backward
    formats: Counter[str] = field(default_factory=Counter)  # saved bytes by format, without scalars
    fp8: tuple[str, ...] = ()  # the GEMMs of a linear layer that run in FP8
    seconds: float = 0.0  # time of all operators, by a roofline

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for equal costs, apart from rounding errors of seconds."""
        return self.bytes, tuple(self.formats.items()), self.fp8, f"{self.seconds:.6e}"


@dataclass(frozen=True)
class ComparedRow:
    """`count` modules with equal costs, and the costs of one of them."""

    module: str
    count: int
    ours: ModuleCosts
    theirs: ModuleCosts

    @property
    def more_bytes(self) -> int:
        """Saved bytes of all `count` modules, `theirs` minus `ours`."""
        return self.count * (self.theirs.bytes - self.ours.bytes)

    @property
    def more_seconds(self) -> float:
        """Seconds of all `count` modules, `theirs` minus `ours`."""
        return self.count * (self.theirs.seconds - self.ours.seconds)


@dataclass(frozen=True)
class Comparison:
    ours: ExplanationData
    theirs: ExplanationData
    rows: list[ComparedRow]

    @property
    def seconds(self) -> tuple[float, float]:
        """Times of all operators of a step, in `ours` and in `theirs`."""
        ours = sum(r.count * r.ours.seconds for r in self.rows)
        return ours, sum(r.count * r.theirs.seconds for r in self.rows)


def compare(ours: ExplanationData, theirs: ExplanationData) -> Comparison:
    """Compare two explanations. Rows are sorted by their difference in bytes, then in time.

    Raises:
        ValueError: the explanations are about different models.
    """
    if _list_linears(ours) != _list_linears(theirs):
        raise ValueError(
            "Only explanations of the same model can be compared, but "
            f"{ours.model} and {theirs.model} have different linear layers."
        )
    left, right = _sum_costs(ours), _sum_costs(theirs)
    pairs = {m: (left.get(m, ModuleCosts()), right.get(m, ModuleCosts())) for m in left | right}
    folded = fold_rows((m, (a.key(), b.key()), (a, b)) for m, (a, b) in pairs.items())
    rows = [ComparedRow(row.module, row.count, *row.item) for row in folded]
    rows.sort(key=lambda r: (abs(r.more_bytes), abs(r.more_seconds)), reverse=True)
    return Comparison(ours, theirs, rows)


def _sum_costs(explanation: ExplanationData) -> dict[str, ModuleCosts]:
    totals: dict[str, ModuleCosts] = {}
    for compiled in explanation.graphs:
        modules = fold_rows((path, (), path) for path in explanation.modules_of(compiled))
        prefix = ", ".join(row.module for row in modules)

        def costs_of(path: str, prefix: str = prefix) -> ModuleCosts:
            return totals.setdefault(f"{prefix}.{path}".strip("."), ModuleCosts())

        for node in compiled.gm.graph.nodes:
            if seconds := recompute_seconds(node):
                costs_of(graph.module_path(node)).seconds += len(compiled.runs) * seconds
        for s in compiled.plan.saved:
            if size := compiled.runs_kept * s.bytes:
                costs = costs_of(s.module)
                costs.bytes += size
                if not s.is_scalar:
                    costs.formats[s.saved_as] += size
        for linear in compiled.plan.linears:
            costs = costs_of(linear.module)
            costs.fp8 = linear.fp8 or costs.fp8
    return totals


def _list_linears(explanation: ExplanationData) -> set[tuple[str, int, int]]:
    linears = (y for g in explanation.graphs for y in g.plan.linears)
    return {(y.module, y.in_features, y.out_features) for y in linears}
