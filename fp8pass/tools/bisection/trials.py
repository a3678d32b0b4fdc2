"""The error of a model's gradients with some of its units exact, measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fp8pass import compat
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.optim.shards import whole
from fp8pass.passes.runner import log
from fp8pass.tools.bisection.units import Unit, options_for, units_of
from fp8pass.tools.running import checked_loss, compiled_as, fresh_gradients, unchanged


class Trials:
    """Runs one step of a model, from the same state every time, with some of its units exact.

    Attributes:
        units: the units in low bits, in the order in which they run.
        compilations: the number of compilations so far.

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
        self.model, self.module = model, compat.original_of(model)
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
        """The gradients of the parameters, and of the batch's tensors that require one."""
        self.compilations += 1
        with (
            fresh_gradients(self.module, self.batch) as leaves,
            unchanged(self.module),
            compiled_as(self.model, backend) as program,
        ):
            loss = checked_loss(self.loss_fn, program, self.batch)
            if loss.requires_grad:
                loss.backward()
            self.progress(4 + len(self.units).bit_length())
            return [x.grad for x in leaves]


def _check_gradients(exact: list[Tensor | None]) -> None:
    found = [x for x in exact if x is not None]
    if not found:
        raise ValueError("There is nothing to compare: no parameter gets a gradient.")
    if not all(bool(whole(x).isfinite().all()) for x in found):
        raise ValueError(
            "Gradients are not finite in recipe 'exact' either: not fp8pass makes them so, but the "
            "model or the batch."
        )


def relative_error(wrong: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """‖wrong - exact‖₂ / ‖exact‖₂ of all tensors together; infinite where it is not finite."""
    difference = norm = 0.0
    for w, e in zip(wrong, exact, strict=True):
        if w is not None and e is not None:
            right = whole(e).double()  # of all shards: ranks have to decide alike
            difference += float((whole(w).double() - right).square().sum())
            norm += float(right.square().sum())
    error = math.sqrt(difference / norm if norm else difference)
    return error if math.isfinite(error) else math.inf


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress logs and warnings of a compilation, which the first one gave."""
    log.disabled, before = True, log.disabled
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before
