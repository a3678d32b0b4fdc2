"""The parts of a model that can be made exact on their own, and the options that do so."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8pass.config import Config
from fp8pass.plan import Plan

# The option that makes units of a kind exact.
OPTIONS = {"linear": "skip", "saved": "keep_exact"}


@dataclass(frozen=True)
class Unit:
    """A part of a model that can be made exact on its own.

    Attributes:
        kind: `linear` for all uses of a layer, `saved` for a tensor kept for the backward.
        name: path of the layer, or name of the value.
        module: path of the module.
    """

    kind: str
    name: str
    module: str

    @property
    def fix(self) -> str:
        """The entry of `skip` or `keep_exact` that makes the unit exact."""
        return glob.escape(self.name)


def units_of(plans: Iterable[Plan]) -> list[Unit]:
    """The linear layers and saved tensors in low bits, in the order in which they run."""
    found: dict[Unit, None] = {}
    for plan in plans:
        placed: list[tuple[int, Unit]] = [
            (place, Unit("linear", y.module, y.module))
            for place, y in enumerate(plan.linears, start=1)
            if y.fp8 or y.simulated
        ]
        # Plans list saved tensors in the order of the backward, the reverse of the forward's.
        placed += [
            (s.place, Unit("saved", s.value, s.module))
            for s in reversed(plan.saved)
            if not s.kept_as.startswith("exact")
        ]
        found.update((unit, None) for _, unit in sorted(placed, key=lambda x: x[0]))
    return list(found)


def options_for(units: Iterable[Unit], config: Config) -> dict[str, Any]:
    """Options that make `units` exact, in addition to those of the configuration."""
    fixes: dict[str, Any] = {}
    for unit in units:
        option = OPTIONS[unit.kind]
        fixes[option] = (*fixes.get(option, getattr(config, option)), unit.fix)
    return fixes
