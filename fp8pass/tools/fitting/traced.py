"""Compute the memory, work and plans of a traced step under any configuration.

`TracedLayers` traces two short models, with three and four layers, and extrapolates linearly to a
model with many equal layers. Places in the two models are matched by their layer, counted from the
start for the first two layers and from the end for the last two:

    three layers   before  0  1  2  after
    four layers    before  0  1  2  3  after       0-0, 1-1 from the start; 1-2, 2-3 from the end
"""

from __future__ import annotations

import logging
import math
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

WHOLE = ("",)

FEW, MORE = 3, 4
# With at least this number of layers, two short models are faster to trace than the whole model.
WORTHWHILE = 8

# A place is the index of a layer, or "before" or "after" all layers. Each pair matches a place
# in the model with `FEW` layers to a place in the model with `MORE` layers. The backward runs the
# layers in reverse.
Place = int | str
PAIRS: tuple[tuple[Place, Place], ...] = ((0, 0), (1, 1), (1, 2), (2, 3))
FORWARD_PAIRS = (("before", "before"), *PAIRS, ("after", "after"))
BACKWARD_PAIRS = (("before", "before"), *reversed(PAIRS), ("after", "after"))
Slot = tuple[bool, Place]  # whether the moment is in the backward, and its place


def trace(
    module: nn.Module, paths: Sequence[str], values: Any, loss_of: LossFunction
) -> TracedStep | TracedLayers:
    """Trace a step of a model, or of two shorter models if its only graph has many equal layers.

    The modules at `paths` are compiled one by one. If `paths` is empty, the model is compiled as a
    whole.
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
                "fit traces all %d layers of %s, which takes longer: with fewer layers, the model "
                "fails, or its steps do not match.",
                *(layers.count, layers.path),
                exc_info=True,
            )
    return TracedStep(record_step(module, tuple(paths) or WHOLE, values, loss_of))


def is_in_list(path: str) -> bool:
    """Whether a path is in a module list, e.g. `layers.3.mlp`.

    If a model has lists, memory budgets apply only to the modules in lists.
    """
    return any(part.isdigit() for part in path.split("."))


class TracedStep:
    """A recorded step. Plans are computed on first use.

    `held` is the number of bytes of final gradients that may wait for the optimizer during the
    backward. Unless `held` is 0, a single larger gradient may wait, too. If `held` is infinite, all
    gradients stay until the end of the step.

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

    def moments(self, config: Config, held: float) -> list[Moment]:
        return _Replay(self.step, self.planned(config), held).moments

    def plans(self, config: Config) -> list[Plan]:
        return [p.plan for p in self.planned(config).values()]

    def work(self, config: Config) -> tuple[Work, Work]:
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
                case RegionBackward(forward) if forward.region in regions:
                    totals[True] += regions[forward.region].backward_work
        return totals[False], totals[True]


class _Replay:
    """Replays the record of a step with planned regions, and collects the bytes alive."""

    def __init__(
        self, step: RecordedStep, plans: Mapping[CompiledRegion, Planned], held: float
    ) -> None:
        self.plans, self.held = plans, held
        self.moments: list[Moment] = []
        self._alive: dict[str, float] = dict.fromkeys(REGION_KINDS, 0.0)
        self._storages: dict[int, tuple[str, int]] = {}  # kind and bytes of live storages
        self._held: Counter[int] = Counter()  # for each storage: how many backwards will read it
        self._freed: set[int] = set()  # storages that the model freed before these backwards
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
                case RegionBackward(forward):
                    self._run_backward(forward)
                case Gradient(storage) if storage in self._storages and held < math.inf:
                    self._consume(storage)
                case BackwardBegins():
                    self._backward = True
                    self._note(Moment())

    def _note(self, moment: Moment) -> None:
        """Append a moment, with the bytes added that are alive outside of its region."""
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
        """Queue a gradient for the optimizer, and free the oldest gradients above the limit."""
        waiting = self._waiting
        waiting.append((gradient, self._storages[gradient][1]))
        least = 1 if self.held else 0
        while len(waiting) > least and sum(size for _, size in waiting) > self.held:
            self._free(waiting.popleft()[0])

    def _run_forward(self, call: RegionForward) -> None:
        if call.region not in self.plans:
            return
        plan = self.plans[call.region]
        for moment in plan.forward:
            self._note(moment)
        self._alive["saved"] += plan.kept
        self._note(Moment())
        self._held.update(self._find_held(call))

    def _run_backward(self, call: RegionForward) -> None:
        plan = self.plans[call.region]
        self._alive["saved"] -= plan.kept  # each moment below includes these bytes
        for moment in plan.backward:
            self._note(moment)
        for storage in self._find_held(call):
            self._held[storage] -= 1
            if not self._held[storage] and storage in self._freed:
                self._free(storage)

    def _find_held(self, call: RegionForward) -> set[int]:
        plan = self.plans[call.region]
        found = {call.inputs[i] for i in plan.held_inputs}
        found |= {call.outputs[i] for i in plan.held_outputs}
        return {storage for storage in found if storage is not None}


@dataclass(frozen=True)
class Layers:
    """A module list of equal layers."""

    path: str
    count: int


def find_layers(module: nn.Module) -> Layers | None:
    """Return the longest list of at least `WORTHWHILE` equal modules."""
    lists = {p: m for p, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    alike = [Layers(p, len(m)) for p, m in lists.items() if len(set(map(_describe, m))) == 1]
    longest = max(alike, key=lambda layers: layers.count, default=None)
    return longest if longest and longest.count >= WORTHWHILE else None


def _describe(module: nn.Module) -> tuple[object, ...]:
    shapes = ((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return type(module), repr(module), tuple(shapes)


@contextmanager
def shorten(module: nn.Module, layers: Layers, count: int) -> Iterator[None]:
    """Remove all but the first `count` modules of a list until exit."""
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
    """A step of a model, extrapolated from two models with fewer layers.

    Raises:
        NotAlike: the two steps do not match.
        ConfigError: a memory budget cannot be met (all methods). The message gives
            bytes of a short model.
    """

    def __init__(self, layers: Layers, few: TracedStep, more: TracedStep) -> None:
        self.layers, self.few, self.more = layers, few, more
        if any(len(traced.step.regions) != 1 for traced in (few, more)):
            raise NotAlike
        self._further = layers.count - FEW
        self._config = cache(self._scale_budget)
        self.moments(Config(), math.inf)

    def _scale_budget(self, config: Config, depth: int) -> Config:
        """Return `config` with the memory budget for a model of `depth` layers.

        This budget reduces the saved bytes of each layer as much as in the model with all layers.
        """
        if config.memory_budget is None:
            return config
        unlimited = replace(config, memory_budget=None)
        few, more = (x.plans(unlimited)[0].saved_bytes for x in (self.few, self.more))
        own, all_layers = (few + (n - FEW) * (more - few) for n in (depth, self.layers.count))
        less = (all_layers - config.budget_bytes(all_layers)) / self.layers.count
        return replace(config, memory_budget=max(1, int(own - depth * less)))

    def moments(self, config: Config, held: float) -> list[Moment]:
        """Return the largest moment of each place: before, in and after the layers.

        Of all layers, the result contains the first two and the last two.
        """
        few = self._find_largest(self.few.moments(self._config(config, FEW), held))
        more = self._find_largest(self.more.moments(self._config(config, MORE), held))
        pairs = [((False, a), (False, b)) for a, b in FORWARD_PAIRS]
        pairs += [((True, a), (True, b)) for a, b in BACKWARD_PAIRS]
        found = [(a, b) for a, b in pairs if a in few or b in more]
        if not found or any(a not in few or b not in more for a, b in found):
            raise NotAlike
        return [self._extrapolate(few[a], more[b], b[1] != a[1]) for a, b in found]

    def _find_largest(self, moments: list[Moment]) -> dict[Slot, Moment]:
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
        """Extrapolate a moment. If `from_end`, its layer is counted from the last layer."""
        values = {k: getattr(few, k) for k in REGION_KINDS}
        values = {k: x + self._further * (getattr(more, k) - x) for k, x in values.items()}
        module, layer = few.module, self._find_layer_number(few.module)
        if from_end and layer is not None:
            own, its = (f"{self.layers.path}.{i}" for i in (layer, layer + self._further))
            module = its + module.removeprefix(own)
        return replace(few, module=module, **values)

    def work(self, config: Config) -> tuple[Work, Work]:
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
