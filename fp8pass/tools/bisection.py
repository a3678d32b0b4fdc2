"""`fp8pass.bisect`: find the linear layers and saved tensors that cause a large gradient error."""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.compat.attributes import set_attributes
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.optim.shards import whole
from fp8pass.option_checks import ConfigError, is_whole
from fp8pass.passes.runner import log
from fp8pass.plan import Plan
from fp8pass.tools import running
from fp8pass.tools.culprit_search import CulpritSearch
from fp8pass.tools.folding import format_paths
from fp8pass.tools.output import Result, make_name, make_table

# By kind of a unit: the option that keeps units exact, that is out of low-bit formats.
OPTIONS = {"linear": "skip", "saved": "keep_exact"}


@dataclass(frozen=True)
class Unit:
    """A linear layer or saved tensor that an option can keep exact, that is out of low-bit formats.

    Attributes:
        kind: `linear` for a linear layer with all its uses, `saved` for a tensor saved for the
            backward.
        name: path of the layer, or name of the saved value.
        module: path of the layer, or of the module that computes the saved value.
    """

    kind: str
    name: str
    module: str

    @property
    def fix(self) -> str:
        """The entry of `skip` or `keep_exact` that keeps this unit exact."""
        return glob.escape(self.name)


@dataclass(frozen=True)
class Culprit(Unit):
    """A linear layer or saved tensor that causes much of the error by itself.

    Attributes:
        error_before: error of the gradients if only the earlier culprits are exact.
        error_after: error of the gradients if the earlier culprits and this culprit are exact.
    """

    error_before: float
    error_after: float


@dataclass(repr=False)
class Bisection(Result):
    """Result of `bisect`: the causes of a gradient error.

    Print this object, or use `culprits`, `suggested` and `to_json()`. Errors are ‖wrong - exact‖₂ /
    ‖exact‖₂ over all gradients, where recipe `exact` computes the exact gradients. The error is
    infinite if a gradient is not finite.

    Attributes:
        config: the configuration that was examined.
        error: error of the gradients with this configuration.
        culprits: the units that cause most of the error, in the order found.
        units: number of linear layers and saved tensors that the configuration puts in low-bit
            formats.
        probes: number of compilations during the search.
        spread: True if the search stopped early: many units cause the remaining error, and no
            single unit stands out.
        parts: paths of the compiled parts, or () if the whole model is compiled. Names of units are
            relative to these paths.
    """

    config: Config
    error: float
    culprits: list[Culprit] = field(default_factory=list)
    units: int = 0
    probes: int = 0
    spread: bool = True
    parts: tuple[str, ...] = ()

    @property
    def remaining(self) -> float:
        """The error of the gradients if all culprits are exact."""
        return self.culprits[-1].error_after if self.culprits else self.error

    @property
    def suggested(self) -> dict[str, Any]:
        """The options `skip` and `keep_exact` of `config`, with an entry added for each culprit."""
        return make_options(self.culprits, self.config)

    def _summary(self) -> str:
        if not self.culprits:
            return f"gradient error {self.error:.3g}, no culprit found"
        names = ", ".join(c.name for c in self.culprits)
        return f"gradient error {self.error:.3g}; {self.remaining:.3g} with {names} exact"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
        return {
            "error": self.error,
            "remaining": self.remaining,
            "culprits": [asdict(c) | {"fix": c.fix} for c in self.culprits],
            "suggested": self.suggested,
            "units": self.units,
            "probes": self.probes,
            "spread": self.spread,
            "parts": self.parts,
        }

    def _parts(self) -> Iterator[Any]:
        if self.culprits:
            columns = "kind", "error before", "error if exact"
            table = make_table("causes of the gradient error", "name", *columns)
            for c in self.culprits:
                errors = f"{c.error_before:.3g}", f"{c.error_after:.3g}"
                table.add_row(make_name(c.name), c.kind, *errors)
            yield table
        if not self.units:
            yield (
                "Nothing to bisect: no linear layer runs in FP8, and no saved tensor is in low "
                "bits. fp8pass.explain(model, ...) shows why."
            )
            return
        yield (
            f"Relative error of the gradients: {self.error:.3g}, with {self.units} linear layers "
            f"and saved tensors in low-bit formats. The search took {self.probes} compilations."
        )
        if self.remaining and self.spread:
            other = "other layer" if self.culprits else "layer"
            yield f"No {other} or saved tensor stands out: many of them cause the error."
        elif self.remaining:
            yield "There may be more culprits: pass a larger number as most=."
        if self.culprits:
            if self.parts:
                yield (
                    f"Names are relative to the compiled parts {format_paths(self.parts)}. "
                    "Identical parts share one entry."
                )
            yield f"To run the culprits in high precision, add these options: {self.suggested!r}"


def bisect(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    config: Config | None = None,
    most: int = 4,
) -> Bisection:
    """Find the linear layers and saved tensors that cause a large gradient error.

    Compiles `model` about log2(n) times for each culprit, where n is the number of linear layers
    and saved tensors. Each time, some layers and tensors are exact, and the model runs one forward
    and backward, op by op. If only parts of the model are compiled, only these parts run in low-bit
    formats. A `memory_budget` in bytes must be large enough for the tensors that become exact.
    Parameters, gradients, buffers and random number generators are restored.

    `bisect` examines the total error of the gradients, as training sees it. In contrast, `diagnose`
    measures the error that each layer adds to exact gradients.

    Args:
        model: a module. If it is compiled with `backend="fp8pass"`, its options are used.
        loss_fn: `loss_fn(model, batch)` returns the loss, for example `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`. Gradients of tensors in the batch are compared, too, if the
            tensors require a gradient.
        config: the configuration to examine. Default: the model's own, or else the default recipe.
        most: the largest number of culprits to look for.

    Returns:
        A Bisection: `print` it, or use `.culprits`, `.suggested`, `.to_json()`.

    Raises:
        ConfigError: `most` is not a positive integer.
        TypeError: `model` is not a module, `config` not a `Config`, or the loss not a scalar.
        ValueError: no parameter gets a gradient, or gradients in recipe `exact` are not finite.
    """
    if not is_whole(most) or most < 1:
        raise ConfigError(
            f"most, the number of culprits to look for, must be at least 1, got {most!r}."
        )
    config = running.check_configuration("bisect", model, config)
    with _show_progress() as progress:
        trials = Trials(model, loss_fn, batch, replace(config, compiler="eager"), progress)
        search = CulpritSearch(len(trials.units), trials.error)
        found = search.culprits(most)
        steps = [search.error(frozenset(found[:n])) for n in range(len(found) + 1)]
    culprits = [
        Culprit(**asdict(trials.units[index]), error_before=before, error_after=after)
        for index, (before, after) in zip(found, pairwise(steps), strict=True)
    ]
    return Bisection(
        config,
        steps[0],
        culprits,
        units=len(trials.units),
        probes=trials.compilations,
        spread=len(found) < most,
        parts=tuple(map(graph.clean_path, running.find_compiled_parts(model))),
    )


@contextmanager
def _show_progress() -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal.

    Yield `advance(total)`, which moves the bar by one of `total` steps.
    """
    console = Console(stderr=True)
    columns = TextColumn("bisecting"), BarColumn(bar_width=24), MofNCompleteColumn()
    disable = not console.is_terminal
    elapsed = TimeElapsedColumn()
    with Progress(*columns, elapsed, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)

        def advance(total: int) -> None:
            done = int(bar.tasks[0].completed)
            bar.update(task, advance=1, total=max(total, done + 2))

        yield advance


def find_units(plans: Iterable[Plan]) -> list[Unit]:
    """Return the units of all plans, in forward order."""
    found: dict[Unit, None] = {}
    for plan in plans:
        placed: list[tuple[int, Unit]] = [
            (place, Unit("linear", y.module, y.module))
            for place, y in enumerate(plan.linears, start=1)
            if y.fp8 or y.simulated
        ]
        # Plans list saved tensors in the order of the backward, so reverse them.
        placed += [
            (s.place, Unit("saved", s.value, s.module))
            for s in reversed(plan.saved)
            if not s.saved_as.startswith("exact")
        ]
        found.update((unit, None) for _, unit in sorted(placed, key=lambda x: x[0]))
    return list(found)


def make_options(units: Iterable[Unit], config: Config) -> dict[str, Any]:
    """Return the `skip` and `keep_exact` of `config`, with an entry added for each unit."""
    options: dict[str, Any] = {}
    for unit in units:
        name = OPTIONS[unit.kind]
        options[name] = (*options.get(name, getattr(config, name)), unit.fix)
    return options


class Trials:
    """Measures the error of the gradients if some units of a model are exact.

    Each measurement compiles the model again, and runs one step from the same state.

    Raises:
        TypeError: `loss_fn` does not return a scalar tensor.
        ValueError: no parameter gets a gradient, or gradients in recipe `exact` are not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        batch: Any,
        config: Config,
        progress: Callable[[int], None],
    ) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.config, self.progress = config, progress
        self.units: list[Unit] = []
        self.compilations = 0
        with _silence():
            self.exact = self._compute_gradients(Backend(Config.recipe("exact", compiler="eager")))
        found = [x for x in self.exact if x is not None]
        if not found:
            raise ValueError(
                "No parameter gets a gradient, so there is nothing to compare: set requires_grad."
            )
        if not all(bool(whole(x).isfinite().all()) for x in found):
            raise ValueError(
                "Gradients are not finite in recipe 'exact' either, so fp8pass is not the cause. "
                "Check the model and the batch."
            )
        graphs: list[CompiledGraph] = []
        self._start = measure_relative_error(
            self._compute_gradients(Backend(config, graphs.append)), self.exact
        )
        self.units = find_units(g.plan for g in graphs)

    def error(self, exact: frozenset[int]) -> float:
        """Measure the relative error if the units with these indices are exact."""
        if not exact:
            return self._start
        options = make_options((self.units[i] for i in sorted(exact)), self.config)
        with _silence():
            found = self._compute_gradients(Backend(replace(self.config, **options)))
        return measure_relative_error(found, self.exact)

    def _compute_gradients(self, backend: Backend) -> list[Tensor | None]:
        self.compilations += 1
        found = running.run_step(self.model, self.loss_fn, self.batch, backend)
        self.progress(4 + len(self.units).bit_length())
        return found


def measure_relative_error(wrong: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """Return ‖wrong - exact‖₂ / ‖exact‖₂ over all tensors; infinity if it is not finite."""
    difference = norm = 0.0
    for w, e in zip(wrong, exact, strict=True):
        if w is not None and e is not None:
            right = whole(e).double()  # gather shards, because all ranks need the same error
            difference += float((whole(w).double() - right).square().sum())
            norm += float(right.square().sum())
    error = math.sqrt(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


@contextmanager
def _silence() -> Iterator[None]:
    with set_attributes([(log, "disabled", True)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
