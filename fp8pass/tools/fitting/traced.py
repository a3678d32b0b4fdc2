"""Compute the memory, work and plans of a traced step under any configuration.

`TracedStep` inserts planned regions into the record of a step. Tracing and planning a model with
many equal layers takes long, so `TracedLayers` traces two short models, with three and four layers,
and extrapolates to the whole model. This works because each further layer adds the same saved
bytes, gradients and work. Only the peak may be at another place. So the bytes at each place are
extrapolated linearly. Places in the two models are matched by their layer. The first two layers are
counted from the start, the last two from the end:

    three layers   before  0  1  2  after
    four layers    before  0  1  2  3  after       0-0, 1-1 from the start; 1-2, 2-3 from the end
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from fp8pass.config import Config
from fp8pass.hardware import Work
from fp8pass.option_checks import ConfigError
from fp8pass.plan import Plan
from fp8pass.tools.fitting.planned import REGION_KINDS, Moment, Planned, plan_region
from fp8pass.tools.fitting.step import (
    Allocated,
    BackwardBegins,
    CompiledRegion,
    Computed,
    Freed,
    Gradient,
    LossFunction,
    RecordedStep,
    RegionBackward,
    RegionForward,
    record_step,
)

log = logging.getLogger("fp8pass")

WHOLE = ("",)  # the path of the model itself

FEW, MORE = 3, 4
# From this number of layers on, tracing two short models is faster than tracing the whole model.
WORTHWHILE = 8

# A place is the index of a layer, or "before" or "after" all layers. Each pair is a place in the
# model with `FEW` layers and the matching place in the model with `MORE` layers.
Place = int | str
PAIRS: tuple[tuple[Place, Place], ...] = (
    *(("before", "before"), ("after", "after")),
    *((0, 0), (1, 1), (1, 2), (2, 3)),
)
Slot = tuple[bool, Place]  # whether the moment is in the backward, and its place


def trace(
    module: nn.Module, paths: Sequence[str], values: Any, loss_of: LossFunction
) -> TracedStep | TracedLayers:
    """Trace a step of a model. If one graph has many equal layers, trace models with fewer layers.

    Args:
        module: the model, on any device.
        paths: paths of the parts that are compiled one by one; empty for the model as a whole.
        values: arguments and keyword arguments of the model.
        loss_of: runs the model and returns its loss.
    """
    if not paths and (layers := find_layers(module)):
        try:
            steps = []
            for count in (FEW, MORE):
                with shorten(module, layers, count):
                    steps.append(TracedStep(record_step(module, WHOLE, values, loss_of)))
            return TracedLayers(layers, *steps)
        except Exception:  # the model may need all of its layers
            log.info(
                "fit traces all %d layers of %s, which takes longer: the model does not run with "
                "fewer layers, or runs differently.",
                *(layers.count, layers.path),
                exc_info=True,
            )
    return TracedStep(record_step(module, tuple(paths) or WHOLE, values, loss_of))


def is_in_list(path: str) -> bool:
    """Check whether a module is in a module list, e.g. `layers.3.mlp`.

    If a model has lists, memory budgets apply only to the modules in lists.
    """
    return any(part.isdigit() for part in path.split("."))


# --- a recorded step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """How long final gradients stay alive."""

    # Whether all gradients live until the end of the backward. Otherwise the optimizer consumes
    # each gradient during the backward.
    stay: bool
    # How many bytes of gradients may wait for the optimizer. If this is not 0, one gradient may
    # wait even if it is larger.
    waiting: float = 0.0


class TracedStep:
    """A recorded step, evaluated under any configuration. Plans are computed on first use.

    Raises:
        ConfigError: a memory budget cannot be met (all methods).
    """

    def __init__(self, step: RecordedStep) -> None:
        self.step = step
        self.planned = cache(self._plan_regions)

    def _plan_regions(self, config: Config) -> dict[CompiledRegion, Planned]:
        regions = [r for r in self.step.regions if r.gm is not None]
        layers = [r for r in regions if is_in_list(r.path)] or regions
        rest = replace(config, memory_budget=None)
        return {r: plan_region(r, config if r in layers else rest) for r in regions}

    def moments(self, config: Config, fate: Fate) -> list[Moment]:
        """Return the bytes alive at each moment, in order."""
        return _Replay(self.step, self.planned(config), fate).moments

    def plans(self, config: Config) -> list[Plan]:
        """Return the plan of each graph."""
        return [p.plan for p in self.planned(config).values()]

    def work(self, config: Config) -> tuple[Work, Work]:
        """Return the work of the forward and of the backward."""
        regions, begun = self.planned(config), False
        totals = {False: Work(), True: Work()}
        for event in self.step.events:
            match event:
                case BackwardBegins():
                    begun = True
                case Computed(work):
                    totals[begun] += work
                case RegionForward(region) if region in regions:
                    totals[False] += regions[region].forward_work
                case RegionBackward(region) if region in regions:
                    totals[True] += regions[region].backward_work
        return totals[False], totals[True]


class _Replay:
    """Replays the record of a step with planned regions, and collects the bytes alive."""

    def __init__(
        self, step: RecordedStep, plans: Mapping[CompiledRegion, Planned], fate: Fate
    ) -> None:
        self.plans, self.fate = plans, fate
        self.moments: list[Moment] = []
        self._alive: dict[str, float] = dict.fromkeys(REGION_KINDS, 0.0)
        self._storages: dict[int, tuple[str, int]] = {}  # kind and bytes
        self._held: Counter[int] = Counter()  # for each storage: how many backwards will read it
        self._freed: set[int] = set()  # the model freed them before these backwards
        self._calls: dict[int, RegionForward] = {}
        self._backward = False
        self._waiting: deque[tuple[int, int]] = deque()  # gradients and their bytes
        self._gradients = {e.storage for e in step.events if isinstance(e, Gradient)}
        for event in step.events:
            match event:
                case Allocated(storage, bytes_):
                    self._allocate(storage, bytes_)
                case Freed(storage):
                    self._free(storage)
                case RegionForward():
                    self._run_forward(event)
                case RegionBackward(region, call):
                    self._run_backward(region, self._calls[call])
                case Gradient(storage) if storage in self._storages and not fate.stay:
                    self._consume(storage)
                case BackwardBegins():
                    self._backward = True
                    self._note(Moment())

    def _note(self, moment: Moment) -> None:
        """Record a moment of a region, plus the bytes that are alive outside of the region."""
        alive = {name: self._alive[name] + getattr(moment, name) for name in REGION_KINDS}
        self.moments.append(Moment(moment.module, self._backward, **alive))

    def _allocate(self, storage: int, bytes_: int) -> None:
        name = "workspace" if self._backward else "activations"
        name = "gradients" if storage in self._gradients else name
        self._storages[storage] = name, bytes_
        self._alive[name] += bytes_
        self._note(Moment())

    def _free(self, storage: int) -> None:
        if self._held[storage]:
            self._freed.add(storage)
        elif storage in self._storages:
            name, bytes_ = self._storages.pop(storage)
            self._alive[name] -= bytes_

    def _consume(self, gradient: int) -> None:
        """Queue a gradient for the optimizer. Free the oldest gradients that are over the limit."""
        waiting = self._waiting
        waiting.append((gradient, self._storages[gradient][1]))
        least = 1 if self.fate.waiting else 0
        while len(waiting) > least and sum(size for _, size in waiting) > self.fate.waiting:
            self._free(waiting.popleft()[0])

    def _run_forward(self, call: RegionForward) -> None:
        if call.region not in self.plans:
            return
        plan = self.plans[call.region]
        self._calls[call.call] = call
        for moment in plan.forward:
            self._note(moment)
        self._alive["saved"] += plan.kept
        self._note(Moment())
        self._held.update(self._find_held(call))

    def _run_backward(self, region: CompiledRegion, call: RegionForward) -> None:
        self._alive["saved"] -= self.plans[region].kept  # each moment below includes these bytes
        for moment in self.plans[region].backward:
            self._note(moment)
        for storage in self._find_held(call):
            self._held[storage] -= 1
            if not self._held[storage] and storage in self._freed:
                self._free(storage)

    def _find_held(self, call: RegionForward) -> set[int]:
        """Return the storages of a region's inputs and results that its backward reads."""
        plan = self.plans[call.region]
        found = {call.inputs[i] for i in plan.held_inputs}
        found |= {call.outputs[i] for i in plan.held_outputs}
        return {storage for storage in found if storage is not None}


# --- many equal layers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """A list of equal layers: the list's path and length."""

    path: str
    count: int


def find_layers(module: nn.Module) -> Layers | None:
    """Return the longest list of equal modules, or None if it is shorter than `WORTHWHILE`."""
    lists = {p: m for p, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    alike = [Layers(p, len(m)) for p, m in lists.items() if len(set(map(_describe, m))) == 1]
    longest = max(alike, key=lambda layers: layers.count, default=None)
    return longest if longest and longest.count >= WORTHWHILE else None


def _describe(module: nn.Module) -> tuple[object, ...]:
    shapes = ((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return type(module), repr(module), tuple(shapes)


@contextmanager
def shorten(module: nn.Module, layers: Layers, count: int) -> Iterator[None]:
    """Remove all but the first `count` modules of a list, and restore them on exit."""
    shown = module.get_submodule(layers.path)
    assert isinstance(shown, nn.ModuleList)
    hidden = list(shown)[count:]
    del shown[count:]
    try:
        yield
    finally:
        shown.extend(hidden)


class NotAlike(Exception):
    """The steps of the two short models do not match."""


class TracedLayers:
    """A step of a model compiled as a whole, extrapolated from two models with fewer layers.

    Raises:
        NotAlike: the two steps do not match.
        ConfigError: a memory budget cannot be met (all methods). The bytes in the message are for
            the short models.
    """

    def __init__(self, layers: Layers, few: TracedStep, more: TracedStep) -> None:
        self.layers, self.few, self.more = layers, few, more
        if any(len(traced.step.regions) != 1 for traced in (few, more)):
            raise NotAlike
        self._further = layers.count - FEW
        self._config = cache(self._scale_budget)
        self.moments(Config(), Fate(stay=True))

    def _scale_budget(self, config: Config, depth: int) -> Config:
        """Return `config` with its memory budget scaled to a model of `depth` layers.

        Both budgets reduce the saved bytes of each layer by the same amount.
        """
        if config.memory_budget is None:
            return config
        unlimited = replace(config, memory_budget=None)
        few, more = (x.plans(unlimited)[0].saved_bytes for x in (self.few, self.more))
        own, all_layers = (few + (n - FEW) * (more - few) for n in (depth, self.layers.count))
        less = (all_layers - config.budget_bytes(all_layers)) / self.layers.count
        return replace(config, memory_budget=max(1, int(own - depth * less)))

    def moments(self, config: Config, fate: Fate) -> list[Moment]:
        """Return the largest moments before, in and after the layers.

        Of the layers, the result has only the first two and the last two.
        """
        few = self._find_largest(self.few.moments(self._config(config, FEW), fate))
        more = self._find_largest(self.more.moments(self._config(config, MORE), fate))
        pairs = [((half, a), (half, b)) for half in (False, True) for a, b in PAIRS]
        found = [(a, b) for a, b in pairs if a in few or b in more]
        if not found or any(a not in few or b not in more for a, b in found):
            raise NotAlike
        found.sort(key=lambda pair: _make_sort_key(pair[1]))
        return [self._extrapolate(few[a], more[b], b[1] != a[1]) for a, b in found]

    def _find_largest(self, moments: list[Moment]) -> dict[Slot, Moment]:
        """Return the moment with the most bytes in each slot."""
        largest: dict[Slot, Moment] = {}
        begun = {False: False, True: False}
        for moment in moments:
            layer = self._find_layer_number(moment.module)
            begun[moment.backward] |= layer is not None
            outside = "after" if begun[moment.backward] else "before"
            slot = moment.backward, outside if layer is None else layer
            if slot not in largest or moment.total > largest[slot].total:
                largest[slot] = moment
        return largest

    def _find_layer_number(self, module: str) -> int | None:
        prefix = f"{self.layers.path}."
        number = module.removeprefix(prefix).split(".")[0]
        return int(number) if module.startswith(prefix) else None

    def _extrapolate(self, few: Moment, more: Moment, from_end: bool) -> Moment:
        """Extrapolate a moment from `FEW` and `MORE` layers to the model's number of layers.

        `few` and `more` are the same moment of the two short models. `from_end` is true if they
        were matched by counting layers from the last one.
        """
        values = {k: getattr(few, k) for k in REGION_KINDS}
        values = {k: x + self._further * (getattr(more, k) - x) for k, x in values.items()}
        module, layer = few.module, self._find_layer_number(few.module)
        if from_end and layer is not None:
            own, its = (f"{self.layers.path}.{i}" for i in (layer, layer + self._further))
            module = its + module.removeprefix(own)
        return replace(few, module=module, **values)

    def work(self, config: Config) -> tuple[Work, Work]:
        """Return the work of the forward and of the backward."""
        try:
            few = self.few.work(self._config(config, FEW))
            more = self.more.work(self._config(config, MORE))
        except ConfigError as error:
            short = f"With only some of the {self.layers.count} layers of {self.layers.path}: "
            raise type(error)(short + str(error)) from None
        pairs = zip(few, more, strict=True)
        forward, backward = (a + (b + a.times(-1)).times(self._further) for a, b in pairs)
        return forward, backward

    def plans(self, config: Config) -> list[Plan]:
        """Return the plan of the model with few layers."""
        return self.few.plans(self._config(config, FEW))


def _make_sort_key(slot: Slot) -> tuple[bool, float]:
    """Return a key that sorts slots by time. The backward runs the layers in reverse."""
    backward, place = slot
    if isinstance(place, str):
        return backward, -1.0 if place == "before" else MORE + 1.0
    return backward, float(MORE - place if backward else place)
