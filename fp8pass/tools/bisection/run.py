"""`bisect`: measures, searches, and shows how far it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import Config, ConfigError
from fp8pass.tools.bisection.result import Bisection, Culprit
from fp8pass.tools.bisection.search import Search
from fp8pass.tools.bisection.trials import Trials
from fp8pass.tools.running import checked_configuration, compiled_parts


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
    saved tensors exact, and runs one forward and backward each time, op by op. Where only parts of
    the model are compiled, only those are. `diagnose` measures
    the error that each layer adds to exact gradients; this is the error of the gradients that
    training gets. A `memory_budget` in bytes must have room for the tensors that become exact.
    Parameters, their gradients, buffers and random number generators are left as they were.

    Args:
        model: a module, or one compiled with `backend="fp8pass"`, whose options are then used.
        loss_fn: `loss_fn(model, batch)` gives the loss, as `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`; gradients of its tensors count where they require one.
        config: the configuration to examine, instead of the model's own or the default recipe.
        most: the largest number of culprits to look for.

    Returns:
        A Bisection: `print` it, or use `.culprits`, `.suggested`, `.to_json()`.

    Raises:
        ConfigError: `most` is no positive integer.
        TypeError: `model` is no module or `config` no `Config`.
        ValueError: the model has no gradients to compare: none at all, or, in recipe `exact`, some
            that are not finite.
    """
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"most, how many culprits to look for, must be at least 1, got {most!r}.")
    config = checked_configuration("bisect", model, config)
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
        parts=tuple(map(graph.clean_path, compiled_parts(model))),
    )


@contextmanager
def _progress_bar() -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; yields `advance(total)`, which takes the expected compilations."""
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
