"""A model's step, whose graphs any configuration can be planned for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Protocol

from fp8pass.config import Config
from fp8pass.hardware import Work
from fp8pass.plan import Plan
from fp8pass.tools.fitting.events import (
    Backward,
    BackwardBegins,
    Computed,
    Forward,
    Region,
    Step,
)
from fp8pass.tools.fitting.planned import Planned, planned
from fp8pass.tools.fitting.replay import Fate, Moment, replay
from fp8pass.tools.fitting.setup import in_list


class Traced(Protocol):
    """A forward and backward under any configuration."""

    def moments(self, config: Config, fate: Fate) -> list[Moment]:
        """Bytes alive, in order."""

    def work(self, config: Config) -> tuple[Work, Work]:
        """The work of the forward and of the backward."""

    def plans(self, config: Config) -> list[Plan]:
        """The decisions, of each graph that is compiled."""


class TracedStep:
    """A step as it was recorded.

    Attributes:
        step: the record.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.planned = cache(self._planned)

    def _planned(self, config: Config) -> dict[Region, Planned]:
        """The regions that have a backward, planned.

        Raises:
            ConfigError: a memory budget cannot be met.
        """
        regions = [r for r in self.step.regions if r.gm is not None]
        layers = [r for r in regions if in_list(r.path)]
        unlimited = replace(config, memory_budget=None)
        return {r: planned(r, config if r in (layers or regions) else unlimited) for r in regions}

    def moments(self, config: Config, fate: Fate) -> list[Moment]:
        """Bytes alive, in order."""
        return replay(self.step, self.planned(config), fate)

    def plans(self, config: Config) -> list[Plan]:
        """The decisions, of each graph that is compiled."""
        return [p.plan for p in self.planned(config).values()]

    def work(self, config: Config) -> tuple[Work, Work]:
        """The work of the forward and of the backward."""
        regions, begun = self.planned(config), False
        totals = {False: Work(), True: Work()}
        for event in self.step.events:
            match event:
                case BackwardBegins():
                    begun = True
                case Computed(work):
                    totals[begun] += work
                case Forward(region) if region in regions:
                    totals[False] += regions[region].forward_work
                case Backward(region) if region in regions:
                    totals[True] += regions[region].backward_work
        return totals[False], totals[True]
