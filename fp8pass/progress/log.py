"""Log compilations: one line for each training graph, warnings, a spinner."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text

from fp8pass import compat, graph
from fp8pass.hooks import CompiledGraph, Hooks
from fp8pass.plan import Plan
from fp8pass.progress.gain import slowdown_warning

log = logging.getLogger("fp8pass")

# This share of the weights of a graph may stay in high precision without a warning.
ROUTINE_SHARE = 0.05


@dataclass(frozen=True)
class CompileLog(Hooks):
    """Logs one line for each graph with a backward, and each kind of warning once for each model.

    In distributed training only the first rank logs. A graph from PyTorch's caches has no plan, and
    so gets no line.
    """

    def after_passes(self, compiled: CompiledGraph) -> None:
        """Log the plan."""
        plan = compiled.plan
        if plan.inference or not plan.linears or is_later_rank():
            log.debug("%s", plan.summary())
            return
        _inform(plan.summary())
        _warn_once("precision", unexpected_precision(plan))
        _warn_once("gain", slowdown_warning([plan], device_of(compiled)))

    @contextmanager
    def while_compiling(self, what: str) -> Iterator[None]:
        """Show `what` with a spinner while the context is open, if stderr is a terminal."""
        console = Console(stderr=True)
        if not console.is_terminal or is_later_rank():
            yield
            return
        with console.status(Text(f"fp8pass: {what} …")):
            yield


def unexpected_precision(plan: Plan) -> str:
    """Return a warning about weights that unexpectedly stay in high precision, or ''."""
    share = plan.unexpected_share
    if share <= ROUTINE_SHARE:
        return ""
    first = max(plan.unexpected, key=lambda y: y.weights)
    return (
        f"{share:.0%} of the weights of a graph unexpectedly stay in high precision, for example "
        f"{first.module or 'the top level'}: {first.reason}. fp8pass.explain(model, ...) lists "
        "them."
    )


def device_of(compiled: CompiledGraph) -> torch.device | None:
    """Return the device of a graph's weights, or None without weights."""
    weights = compiled.ctx.facts.weights
    return next((graph.tensor(node).device for node in weights), None)


# The kinds of warnings that were logged, for each call of `torch.compile`.
_warned: compat.WeakIdKeyDictionary = compat.WeakIdKeyDictionary()


def _warn_once(kind: str, text: str) -> None:
    """Log a warning, unless one of its kind was logged for another graph of the same model."""
    call = compat.compile_call()
    before: set[str] = _warned.setdefault(call, set()) if call is not None else set()
    if text and kind not in before:
        before.add(kind)
        log.warning("%s", text)


def _inform(line: str) -> None:
    """Log a line. Print it on stderr where logging is not set up and shows warnings only."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"fp8pass: {line}", file=sys.stderr)


def is_later_rank() -> bool:
    """Whether this process is a rank of distributed training other than the first."""
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    )
