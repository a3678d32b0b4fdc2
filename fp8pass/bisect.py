"""`fp8pass.bisect`: the linear layers and saved tensors that a large gradient error comes from.

Say u1 ... un are what is in low bits, in the order in which it runs, and E(i) the error of all
gradients with the first i of them exact. Errors that are independent add in squares, so that what
comes after i up to j causes E²(i) - E²(j), whatever lies between. Halving the range that causes
most, again and again, leads to the largest single one in log2(n) compilations. Ranges that cause
less than a culprit has to are left alone: it takes few to see that there is none. A range that
makes an infinite error finite holds what overflows.

Large errors do not add: with all gradients wrong anyway, whichever unit becomes exact last seems to
cause everything. So the search goes on with what it found exact, since several may have to be, and
names in the end what the error depends on where all else that was found is exact.
"""

from __future__ import annotations

import glob
import heapq
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.backend import Backend
from fp8pass.config import Config, ConfigError
from fp8pass.debug import log
from fp8pass.diagnose import finite
from fp8pass.explain import configuration_of, unchanged
from fp8pass.partition import CompiledGraph
from fp8pass.plan import Plan
from fp8pass.recording import fresh_gradients

# A culprit causes at least this share of the squared error, and so many times what the others do on
# average.
SHARE, TIMES = 0.25, 10.0

OPTIONS = {"linear": "skip", "saved": "keep_exact"}


@dataclass(frozen=True)
class Unit:
    """What can be made exact by itself.

    Attributes:
        kind: `linear`, all uses of a layer, or `saved`, a tensor kept for the backward.
        name: path of the layer, or name of the value.
        module: path of the module.
    """

    kind: str
    name: str
    module: str

    @property
    def fix(self) -> str:
        """The entry of `skip` or `keep_exact` that makes it exact."""
        return glob.escape(self.name)


@dataclass(frozen=True)
class Culprit(Unit):
    """A linear layer or saved tensor that causes much of the error by itself.

    Attributes:
        error_before: of the gradients, with the culprits found before it exact.
        error_after: the same with this one exact, too.
    """

    error_before: float
    error_after: float


@dataclass
class Bisection:
    """Where a gradient error comes from; print it, or look at `culprits`.

    Errors are of all gradients together, relative to those of recipe `exact`: ‖wrong - exact‖₂ /
    ‖exact‖₂, infinite where they are not finite.

    Attributes:
        config: what was examined.
        error: of the gradients.
        culprits: what causes most of it, in the order found.
        units: how many linear layers and saved tensors are not exact.
        probes: how often the model was compiled.
        spread: whether no other unit stands out: what remains, or all, comes from many.
    """

    config: Config
    error: float
    culprits: list[Culprit] = field(default_factory=list)
    units: int = 0
    probes: int = 0
    spread: bool = True

    @property
    def remaining(self) -> float:
        """The error with the culprits exact."""
        return self.culprits[-1].error_after if self.culprits else self.error

    @property
    def suggested(self) -> dict[str, Any]:
        """Options that keep the culprits exact, besides what the configuration has there."""
        return options_for(self.culprits, self.config)

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, also written to `path` if one is given."""
        data = {
            "error": self.error,
            "remaining": self.remaining,
            "culprits": [asdict(c) | {"fix": c.fix} for c in self.culprits],
            "suggested": self.suggested,
            "units": self.units,
            "probes": self.probes,
            "spread": self.spread,
        }
        text = json.dumps(finite(data), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def __str__(self) -> str:
        console = Console(width=150, file=io.StringIO())
        if self.culprits:
            console.print(self._table())
        for line in self._conclusions():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return console.file.getvalue()  # type: ignore[attr-defined]

    def _table(self) -> Table:
        table = Table(title="what the gradient error comes from", title_justify="left")
        for column in ("", "name", "error before", "with it exact"):
            table.add_column(column)
        for c in self.culprits:
            errors = f"{c.error_before:.3g}", f"{c.error_after:.3g}"
            table.add_row(c.kind, escape(c.name), *errors)
        return table

    def _conclusions(self) -> Iterator[str]:
        if not self.units:
            yield "Nothing to bisect: no linear layer runs in FP8, no saved tensor is in low bits."
            return
        yield (
            f"Relative error of the gradients: {self.error:.3g}, with {self.units} linear layers "
            f"and saved tensors in low bits. Took {self.probes} compilations."
        )
        if self.remaining and self.spread:
            yield f"No single one {'else ' * bool(self.culprits)}stands out: the error is spread."
        elif self.remaining:
            yield "There may be more: raise most."
        if self.culprits:
            yield f"To keep them exact, add to options: {self.suggested!r}"


def bisect(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    config: Config | None = None,
    most: int = 4,
) -> Bisection:
    """Find the linear layers and saved tensors that a large gradient error comes from.

    Compiles `model` about log2(n) times for each culprit, with groups of its n linear layers and
    saved tensors exact, and runs one forward and backward each time, op by op. Where `diagnose` has
    the error that each layer adds to exact gradients, this is the error of the gradients that
    training gets. A `memory_budget` in bytes has to have room for what is exact. Parameters, their
    gradients, buffers and random number generators are left as they were.

    Args:
        model: a module, or one compiled with `backend="fp8pass"`, whose options are then used.
        loss_fn: `loss_fn(model, batch)` gives the loss, as `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`; gradients of its tensors count where they require one.
        config: what to examine instead of the model's own options or the default recipe.
        most: how many culprits to look for.

    Returns:
        A Bisection: `print` it, or use `.culprits`, `.suggested`, `.to_json()`.

    Raises:
        ConfigError: `most` is no positive integer.
        TypeError: `model` is no module or `config` no `Config`.
        ValueError: the model has no gradients to compare: none at all, or, in recipe `exact`, some
            that are not finite.
    """
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"most is how many culprits to look for, 1 or more; got {most!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"bisect takes a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(config, Config | None):
        raise TypeError(
            f"config is a fp8pass.Config, got {type(config).__name__}. For a recipe by name: "
            "config=fp8pass.Config.recipe('coat')."
        )
    config = config or configuration_of(model)
    with _progress_bar() as progress:
        trials = Trials(model, loss_fn, batch, replace(config, compiler="eager"), progress)
        search = Search(len(trials.units), trials.error)
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
    )


class Trials:
    """Runs one step of a model, from the same state every time, with some of its units exact.

    Attributes:
        units: what is in low bits, in the order in which it runs.
        compilations: how many there were.

    Raises:
        TypeError: `loss_fn` gives no loss.
        ValueError: there are no finite gradients to compare with.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        batch: Any,
        config: Config,
        progress: Callable[[int], None],
    ) -> None:
        self.module = getattr(model, "_orig_mod", model)
        self.loss_fn, self.batch = loss_fn, batch
        self.config, self.progress = config, progress
        self.units: list[Unit] = []
        self.compilations = 0
        with _quiet():
            self.exact = self._gradients(Backend(Config.recipe("exact", compiler="eager")))
        _check_gradients(self.exact)
        graphs: list[CompiledGraph] = []
        self._start = self._error(Backend(config, graphs.append))
        self.units = units_of(g.plan for g in graphs)

    def error(self, exact: frozenset[int]) -> float:
        """Relative error of the gradients with the numbered units exact."""
        if not exact:
            return self._start
        units = [self.units[i] for i in sorted(exact)]
        with _quiet():
            return self._error(Backend(replace(self.config, **options_for(units, self.config))))

    def _error(self, backend: Backend) -> float:
        return relative_error(self._gradients(backend), self.exact)

    def _gradients(self, backend: Backend) -> list[Tensor | None]:
        """Of the parameters, and of tensors of the batch that require them."""
        self.compilations += 1
        compiled = torch.compile(self.module, backend=backend)
        with (
            fresh_gradients(self.module, self.batch) as leaves,
            unchanged(self.module),
            compat.fresh_compilation(),
            torch.enable_grad(),
        ):
            loss = self.loss_fn(compiled, self.batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(
                    f"loss_fn must give the loss, a tensor of one element, as lambda m, b: "
                    f"m(**b).loss does; it gave {given}."
                )
            if loss.requires_grad:
                loss.backward()
            self.progress(4 + len(self.units).bit_length())
            return [x.grad for x in leaves]


def _check_gradients(exact: list[Tensor | None]) -> None:
    found = [x for x in exact if x is not None]
    if not found:
        raise ValueError("There is nothing to compare: no parameter gets a gradient.")
    if not all(bool(x.isfinite().all()) for x in found):
        raise ValueError(
            "Gradients are not finite in recipe 'exact' either: not fp8pass makes them so, but the "
            "model or the batch."
        )


def relative_error(wrong: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """‖wrong - exact‖₂ / ‖exact‖₂ of all tensors together; infinite where it is not finite."""
    difference = norm = 0.0
    for w, e in zip(wrong, exact, strict=True):
        if w is not None and e is not None:
            difference += float((w.double() - e.double()).square().sum())
            norm += float(e.double().square().sum())
    error = math.sqrt(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


def units_of(plans: Iterable[Plan]) -> list[Unit]:
    """The linear layers and saved tensors in low bits, in the order in which they run."""
    found: dict[Unit, None] = {}
    for plan in plans:
        placed: list[tuple[int, Unit]] = [
            (place, Unit("linear", y.module, y.module))
            for place, y in enumerate(plan.linears, start=1)
            if y.fp8
        ]
        # Reversed, since the backward asks for what ran last first.
        placed += [
            (s.place, Unit("saved", s.value, s.module))
            for s in reversed(plan.saved)
            if not s.kept_as.startswith("exact")
        ]
        found.update((unit, None) for _, unit in sorted(placed, key=lambda x: x[0]))
    return list(found)


def options_for(units: Iterable[Unit | Culprit], config: Config) -> dict[str, Any]:
    """Options that make `units` exact besides what the configuration keeps so."""
    fixes: dict[str, Any] = {}
    for unit in units:
        option = OPTIONS[unit.kind]
        fixes[option] = (*fixes.get(option, getattr(config, option)), unit.fix)
    return fixes


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what a compilation has to say: the first one said it."""
    log.disabled, before = True, log.disabled
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


@contextmanager
def _progress_bar() -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; yields `advance(total)`, with how many compilations are expected."""
    console = Console(stderr=True)
    columns = TextColumn("bisecting"), BarColumn(bar_width=24), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)

        def advance(total: int) -> None:
            done = int(bar.tasks[0].completed)
            bar.update(task, advance=1, total=max(total, done + 2))

        yield advance


class Search:
    """Finds the units that cause an error by themselves.

    Args:
        units: how many there are.
        error: of the numbered units exact, relative; it is asked for once for each set.
    """

    def __init__(self, units: int, error: Callable[[frozenset[int]], float]) -> None:
        self.units = units
        self.error = cache(error)

    def culprits(self, most: int) -> list[int]:
        """At most so many units, in the order found; fewer if no other one stands out."""
        found: list[int] = []
        while len(found) < most and (unit := self._culprit(frozenset(found))) is not None:
            found.append(unit)
        return self._needed(found)

    def _needed(self, found: list[int]) -> list[int]:
        """Without units that make little difference beside the others.

        With an infinite error left none does, but each is needed to get rid of it.
        """
        if math.isinf(self.error(frozenset(found))):
            return found
        for unit in reversed(found):
            others = frozenset(found) - {unit}
            if self._fall(others, others | {unit}) < self._threshold(others):
                found = [u for u in found if u != unit]
        return found

    def _threshold(self, exact: frozenset[int]) -> float:
        """The squared error that a culprit causes at least, with the units in `exact` exact."""
        others = self.units - len(exact) - 1
        return max(SHARE, TIMES / (TIMES + others)) * self.error(exact) ** 2

    def _culprit(self, exact: frozenset[int]) -> int | None:
        """The unit that causes most of what is left with `exact`, None if none stands out."""
        threshold = self._threshold(exact)
        if not threshold:
            return None

        def caused(start: int, end: int) -> float:
            return self._fall(exact.union(range(start)), exact.union(range(end)))

        ranges = [(-caused(0, self.units), 0, self.units)]  # a heap: the largest first
        while True:
            minus_caused, start, end = heapq.heappop(ranges)
            if -minus_caused < threshold:
                return None
            if end - start == 1:
                return start
            middle = (start + end) // 2
            for half in ((start, middle), (middle, end)):
                heapq.heappush(ranges, (-caused(*half), *half))

    def _fall(self, before: frozenset[int], after: frozenset[int]) -> float:
        """By how much the squared error falls; both may be infinite."""
        a, b = self.error(before), self.error(after)
        return 0.0 if a == b else a**2 - b**2
