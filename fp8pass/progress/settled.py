"""One line about a model that trains, when all of it is compiled.

A model may be many graphs: blocks that are compiled one by one, parts between graph breaks. Nobody
says which is the last. When one runs again with the same parameters a second forward has begun, and
all graphs of the first one are there. Hooks of autograd would tell sooner, but compiled autograd
traces them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fp8pass import compat
from fp8pass.compilation import Compilation
from fp8pass.config import Config
from fp8pass.plan import Plan
from fp8pass.progress.gain import doubt
from fp8pass.progress.spinner import is_later_rank

log = logging.getLogger("fp8pass")

# So much of the weights may stay in high precision without a warning.
ROUTINE_SHARE = 0.05


# Where a parameter is. Not a reference to it, nor a weak one: PyTorch moves DTensors and codes to
# another device by swapping them, which it refuses of what has weak references.
Place = tuple[Any, Any]


@dataclass(eq=False)
class _Part:
    """A compiled graph.

    Attributes:
        plan: its plan.
        config: the options that it was compiled with.
        runs: the parameters that it has run with: equal blocks share a graph.
        device: theirs.
        waits: whether nothing has been said about it.
    """

    plan: Plan
    config: Config
    runs: dict[tuple[Place, ...], None] = field(default_factory=dict)
    device: torch.device | None = None
    waits: bool = True

    def note(self, parameters: list[nn.Parameter]) -> bool:
        """Note a run, and return whether it belongs to a second forward.

        It does if it is the second run with these parameters, or if those of another run have been
        freed: then each step has new ones (`torch.func.functional_call`). A graph without
        parameters, such as attention between graph breaks, may run in each block.
        """
        places = tuple((compat.weak_storage(x), x.storage_offset()) for x in parameters)
        if places in self.runs:
            return bool(parameters)
        freed = [run for run in self.runs if _are_freed(run)]
        for run in freed:
            del self.runs[run]
        self.runs[places] = None
        self.device = parameters[0].device if parameters else self.device
        return bool(freed)

    def new_runs(self) -> Iterator[tuple[Place, ...]]:
        """Of the runs whose parameters are still there those that nothing was said about."""
        for places in self.runs:
            if not _are_freed(places) and not (places and _known.issuperset(places)):
                yield places


def _are_freed(places: tuple[Place, ...]) -> bool:
    """Whether some of the parameters at these places are no more."""
    return any(storage.expired() for storage, _ in places)


_waiting: list[_Part] = []
# Parameters of graphs that a line has been said about: other sizes compile these anew.
_known: set[Place] = set()


def told(program: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """A compiled `program`, a line about whose model is said when a second forward begins.

    Nothing is known of a program from PyTorch's caches, and inference says nothing: training says
    as much about the same layers.
    """
    compiled = compilation.compiled
    if compiled is None or compiled.plan.inference or is_later_rank():
        return program
    part = _Part(compiled.plan, compilation.config)
    _waiting.append(part)

    def run(*args: Any) -> Any:
        if part.waits and part.note([x for x in args if isinstance(x, nn.Parameter)]):
            _settle(part)
        return program(*args)

    return run


def _settle(again: _Part) -> None:
    """Say the line about all graphs that wait for it, of which one runs again.

    What was compiled with other options is no part of the model, whose line would mix the two.
    """
    parts = [p for p in _waiting if p.config == again.config and p is not again]
    parts.append(again)
    found: dict[tuple[object, tuple[Place, ...]], Plan] = {}
    for part in parts:
        part.waits = False
        layers = tuple(linear.module for linear in part.plan.linears)
        # Of what was compiled twice the last counts, but for what is known to run again.
        for places in part.new_runs():
            found[layers, places] = part.plan
    devices = [part.device for part in parts if part.device]
    _waiting[:] = [part for part in _waiting if part.waits]
    _known.difference_update([place for place in _known if place[0].expired()])
    _known.update(place for _, places in found for place in places)
    plans = list(found.values())
    _say(merged(plans))
    if doubtful := doubt(plans, next(iter(devices), None)):
        log.warning("%s", doubtful)


def merged(plans: list[Plan]) -> Plan:
    """What the line is about, of all plans together."""
    away = [plan.offload for plan in plans if plan.offload]
    copies = [copy for offload in away for copy in offload.copies]
    return Plan(
        linears=[linear for plan in plans for linear in plan.linears],
        saved=[saved for plan in plans for saved in plan.saved],
        simulated=next((plan.simulated for plan in plans if plan.simulated), None),
        offload=replace(away[0], copies=copies) if away else None,
        note=", ".join(dict.fromkeys(plan.note for plan in plans if plan.note)),
    )


def _say(plan: Plan) -> None:
    """Say the line; a warning if more stays in high precision than has to."""
    if not plan.linears:
        return
    share = plan.unexpected_share
    if share <= ROUTINE_SHARE:
        _inform(plan.summary())
        return
    first = max(plan.unexpected, key=lambda y: y.weights)
    log.warning(
        "%s. %.0f%% of the weights stay in high precision though nobody asked for it, such as %s: "
        "%s. fp8pass.explain(model, ...) lists them.",
        *(plan.summary(), 100 * share, first.module or "the top level", first.reason),
    )


def _inform(line: str) -> None:
    """Log a line; where nobody has set up logging, which shows warnings only, on stderr."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"fp8pass: {line}", file=sys.stderr)
