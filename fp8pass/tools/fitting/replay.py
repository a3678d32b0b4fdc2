"""Bytes alive over one forward and backward, from the record of a step and plans of its regions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8pass.tools.fitting.events import (
    Allocated,
    Backward,
    BackwardBegins,
    Forward,
    Freed,
    Gradient,
    Region,
    Step,
)
from fp8pass.tools.fitting.liveness import HalfMemory
from fp8pass.tools.fitting.planned import Planned

KINDS = ("saved", "activations", "gradients", "workspace")


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one time of a step, by kind (`KINDS`).

    Attributes:
        backward: whether the backward has begun.
        module: path of the module whose operator runs, '' outside of compiled graphs.
    """

    backward: bool
    module: str
    saved: float
    activations: float
    gradients: float
    workspace: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.saved + self.activations + self.gradients + self.workspace


@dataclass(frozen=True)
class Fate:
    """What becomes of gradients that are final.

    Attributes:
        stay: whether all are there until the end of the backward. Otherwise each is used up.
        waiting: bytes of gradients that may wait to be used; at least one does, if any.
    """

    stay: bool
    waiting: float = 0.0


def replay(step: Step, plans: Mapping[Region, Planned], fate: Fate) -> list[Moment]:
    """The moments of a forward and backward, from the record of a step and plans of its regions."""
    return _Replay(step, plans, fate).moments


@dataclass
class _Replay:
    step: Step
    plans: Mapping[Region, Planned]
    fate: Fate
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._alive: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._storages: dict[int, tuple[str, int]] = {}
        self._held: Counter[int] = Counter()  # by regions that have not run backward
        self._freed: set[int] = set()  # by the model, while they are held
        self._calls: dict[int, Forward] = {}
        self._backward = False
        self._waiting: deque[tuple[int, int]] = deque()
        events = (e for e in self.step.events if isinstance(e, Gradient))
        self._gradients = {e.storage for e in events}
        for event in self.step.events:
            match event:
                case Allocated(storage, bytes_):
                    self._allocate(storage, bytes_)
                case Freed(storage):
                    self._free(storage)
                case Forward():
                    self._run_forward(event)
                case Backward(region, call):
                    self._run_backward(region, self._calls[call])
                case Gradient(storage) if storage in self._storages and not self.fate.stay:
                    self._use_up(storage)
                case BackwardBegins():
                    self._backward = True
                    self._note()

    def _note(self, module: str = "", **also: float) -> None:
        alive = {name: self._alive[name] + also.get(name, 0.0) for name in KINDS}
        self.moments.append(Moment(self._backward, module, **alive))

    def _allocate(self, storage: int, bytes_: int) -> None:
        name = "workspace" if self._backward else "activations"
        name = "gradients" if storage in self._gradients else name
        self._storages[storage] = name, bytes_
        self._alive[name] += bytes_
        self._note()

    def _free(self, storage: int) -> None:
        if self._held[storage]:
            self._freed.add(storage)
        elif storage in self._storages:
            name, bytes_ = self._storages.pop(storage)
            self._alive[name] -= bytes_

    def _use_up(self, gradient: int) -> None:
        """A gradient is used by the optimizer, now or when those before it have been."""
        self._waiting.append((gradient, self._storages[gradient][1]))
        least = 1 if self.fate.waiting else 0
        while len(self._waiting) > least and self._waiting_bytes() > self.fate.waiting:
            self._free(self._waiting.popleft()[0])

    def _waiting_bytes(self) -> int:
        return sum(bytes_ for _, bytes_ in self._waiting)

    def _run_forward(self, call: Forward) -> None:
        if call.region not in self.plans:
            return
        plan = self.plans[call.region]
        self._calls[call.call] = call
        self._meanwhile(plan.forward)
        self._alive["saved"] += plan.kept
        self._note()
        self._held.update(self._storages_of(call))

    def _run_backward(self, region: Region, call: Forward) -> None:
        plan = self.plans[region]
        self._alive["saved"] -= plan.kept
        self._meanwhile(plan.backward)
        for storage in self._storages_of(call):
            self._held[storage] -= 1
            if not self._held[storage] and storage in self._freed:
                self._free(storage)

    def _meanwhile(self, memory: HalfMemory) -> None:
        alive = zip(memory.modules, memory.saved, memory.gradients, memory.workspace, strict=True)
        for module, saved, gradients, workspace in alive:
            self._note(module, saved=saved, gradients=gradients, workspace=workspace)

    def _storages_of(self, call: Forward) -> set[int]:
        """What the call keeps alive that is not its own."""
        plan = self.plans[call.region]
        found = {call.inputs[i] for i in plan.held_inputs}
        found |= {call.outputs[i] for i in plan.held_outputs}
        return {storage for storage in found if storage is not None}
