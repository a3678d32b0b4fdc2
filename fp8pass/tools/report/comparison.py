"""Two explanations of a model side by side: what each recipe or budget keeps, by module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fp8pass import graph
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.compilation import CompiledGraph
from fp8pass.config import RECIPES, Config
from fp8pass.tools.explanation_data import ExplanationData
from fp8pass.tools.folding import folded, path_pattern


@dataclass
class ModuleCosts:
    """What one module keeps and computes in a step.

    Attributes:
        bytes: kept for the backward.
        formats: bytes by what they are kept as.
        fp8: the products of a linear layer that run in FP8.
        seconds: of all operators, forward and backward, by the roofline.
    """

    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    fp8: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class ComparedRow:
    """The costs of `count` modules that are alike in both explanations, those of one module."""

    module: str
    count: int
    ours: ModuleCosts
    theirs: ModuleCosts

    @property
    def more_bytes(self) -> int:
        """By how much all these modules keep more in the second explanation."""
        return self.count * (self.theirs.bytes - self.ours.bytes)

    @property
    def more_seconds(self) -> float:
        """By how much all these modules take longer in the second explanation."""
        return self.count * (self.theirs.seconds - self.ours.seconds)


@dataclass(frozen=True)
class Comparison:
    """Two explanations of a model, `ours` and `theirs`, by module."""

    ours: ExplanationData
    theirs: ExplanationData
    rows: list[ComparedRow]

    @property
    def seconds(self) -> tuple[float, float]:
        """Of all operators of a step, for both."""
        pairs = [(r.count * r.ours.seconds, r.count * r.theirs.seconds) for r in self.rows]
        return sum(x for x, _ in pairs), sum(x for _, x in pairs)


def compare(ours: ExplanationData, theirs: ExplanationData) -> Comparison:
    """Both explanations, the modules that differ most in bytes, then in time, first.

    Raises:
        ValueError: they are of different models.
    """
    if _modules(ours) != _modules(theirs):
        raise ValueError(
            "Only explanations of the same model can be shown side by side: "
            f"{ours.model} and {theirs.model} have different linear layers."
        )
    left, right = costs_by_module(ours), costs_by_module(theirs)
    pairs = {m: (left.get(m, ModuleCosts()), right.get(m, ModuleCosts())) for m in left | right}
    rows = [
        ComparedRow(module, count, *pair)
        for module, count, pair in folded((m, _key(*pair), pair) for m, pair in pairs.items())
    ]
    rows.sort(key=lambda r: (abs(r.more_bytes), abs(r.more_seconds)), reverse=True)
    return Comparison(ours, theirs, rows)


def recipe_of(config: Config) -> tuple[str, dict[str, object]]:
    """The recipe that a configuration is nearest to, and the options in which it differs."""
    found = {}
    for name in RECIPES:
        recipe = Config.recipe(name, compiler=config.compiler)
        options = {k: v for k, v in vars(config).items() if v != getattr(recipe, k)}
        found[name] = options
    nearest = min(found, key=lambda name: (len(found[name]), name != "coat"))
    return nearest, found[nearest]


def costs_by_module(explanation: ExplanationData) -> dict[str, ModuleCosts]:
    """The costs of each module of all runs of all graphs, in the order of the graphs."""
    costs: dict[str, ModuleCosts] = {}
    for compiled in explanation.graphs:
        above = path_pattern(explanation.modules_of(compiled))
        prefix = "" if above == "the top level" else above
        for path, own in _costs(compiled):
            module = f"{prefix}.{path}".strip(".")
            _add(costs.setdefault(module, ModuleCosts()), own)
    return costs


def _costs(compiled: CompiledGraph) -> Iterator[tuple[str, ModuleCosts]]:
    """What each operator, kept value and linear layer adds to its module."""
    for node in compiled.gm.graph.nodes:
        if seconds := recompute_seconds(node):
            yield graph.module_path(node), ModuleCosts(seconds=len(compiled.runs) * seconds)
    for s in compiled.plan.saved:
        if kept := compiled.runs_kept * s.bytes:
            yield s.module, ModuleCosts(kept, {} if s.is_scalar else {s.kept_as: kept})
    for linear in compiled.plan.linears:
        yield linear.module, ModuleCosts(fp8=linear.fp8)


def _add(total: ModuleCosts, more: ModuleCosts) -> None:
    total.bytes += more.bytes
    total.seconds += more.seconds
    total.fp8 = more.fp8 or total.fp8
    for name, count in more.formats.items():
        total.formats[name] = total.formats.get(name, 0) + count


def _key(ours: ModuleCosts, theirs: ModuleCosts) -> tuple[object, ...]:
    """Equal for modules that are alike, whose sums of seconds may differ in the last bit."""
    return tuple(
        (c.bytes, tuple(c.formats.items()), c.fp8, f"{c.seconds:.6e}") for c in (ours, theirs)
    )


def _modules(explanation: ExplanationData) -> set[tuple[str, int, int]]:
    linears = (y for g in explanation.graphs for y in g.plan.linears)
    return {(y.module, y.in_features, y.out_features) for y in linears}
