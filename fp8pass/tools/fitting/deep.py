"""Models of many equal layers, known by two with few of them.

Of each additional layer everything grows by the same: what is kept, gradients, work. Only where a
step peaks may change. So moments of a step with three and with four layers are matched, layer by
layer from both ends, and continued to the model's own number of layers.

    three layers   before  0  1  2  after
    four layers    before  0  1  2  3  after       0-0, 1-1 from the start; 1-2, 2-3 from the end
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from fp8pass.config import Config, ConfigError
from fp8pass.hardware import Work
from fp8pass.plan import Plan
from fp8pass.tools.fitting.replay import KINDS, Fate, Moment
from fp8pass.tools.fitting.step import LossFunction, record_step
from fp8pass.tools.fitting.traced import TracedStep

log = logging.getLogger("fp8pass")

FEW, MORE = 3, 4
# Of so many layers tracing all takes longer than tracing few twice.
WORTHWHILE = 8

# Where a layer is in a model of few and in one of more, by its place in the model: see above.
Place = int | str  # of a layer, or what is before or after all of them
PAIRS: tuple[tuple[Place, Place], ...] = (
    *(("before", "before"), ("after", "after")),
    *((0, 0), (1, 1), (1, 2), (2, 3)),
)

Slot = tuple[bool, Place]  # whether in the backward


WHOLE = ("",)  # the path of the model itself


def trace(
    module: nn.Module, paths: Sequence[str], values: Any, loss_of: LossFunction
) -> TracedStep | TracedLayers:
    """The step of a model, of few of its layers if it has many that are compiled as one graph.

    Args:
        module: the model, on any device.
        paths: of the parts that are compiled one by one; none if the model is as a whole.
        values: arguments and keyword arguments of the model.
        loss_of: runs it and gives its loss.
    """
    if not paths and (layers := find_layers(module)):
        try:
            steps = []
            for count in (FEW, MORE):
                with shortened(module, layers, count):
                    steps.append(TracedStep(record_step(module, WHOLE, values, loss_of)))
            return TracedLayers(layers, *steps)
        except Exception:  # it does not run with fewer, or not alike
            log.info(
                "fit traces all %d layers of %s, which takes longer: with fewer of them the model "
                "does not run, or not alike.",
                *(layers.count, layers.path),
                exc_info=True,
            )
    return TracedStep(record_step(module, tuple(paths) or WHOLE, values, loss_of))


@dataclass(frozen=True)
class Layers:
    """A list of equal layers of a model.

    Attributes:
        path: of the list.
        count: how many there are.
    """

    path: str
    count: int


def find_layers(module: nn.Module) -> Layers | None:
    """The longest list of equal modules, if it is worth to look at few of them."""
    lists = {p: m for p, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    alike = [Layers(p, len(m)) for p, m in lists.items() if len(set(map(_looks, m))) == 1]
    longest = max(alike, key=lambda layers: layers.count, default=None)
    return longest if longest and longest.count >= WORTHWHILE else None


def _looks(module: nn.Module) -> tuple[object, ...]:
    shapes = ((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return type(module), repr(module), tuple(shapes)


@contextmanager
def shortened(module: nn.Module, layers: Layers, count: int) -> Iterator[None]:
    """Let a list have only its first modules here."""
    shown = module.get_submodule(layers.path)
    assert isinstance(shown, nn.ModuleList)
    hidden = list(shown)[count:]
    del shown[count:]
    try:
        yield
    finally:
        shown.extend(hidden)


class NotAlike(Exception):
    """Steps with few layers and with one more do not go together."""


class TracedLayers:
    """A step of a model that is compiled as a whole, by two of less depth.

    Raises:
        NotAlike: they do not go together.
    """

    def __init__(self, layers: Layers, few: TracedStep, more: TracedStep) -> None:
        self.layers, self.few, self.more = layers, few, more
        if any(len(traced.step.regions) != 1 for traced in (few, more)):
            raise NotAlike
        self._config = cache(self._with_share)
        self.moments(Config(), Fate(stay=True))

    @property
    def _further(self) -> int:
        """How many layers there are besides the few."""
        return self.layers.count - FEW

    def _with_share(self, config: Config, depth: int) -> Config:
        """A configuration that saves as much in each layer as the given one does in all of them."""
        if config.memory_budget is None:
            return config
        unlimited = replace(config, memory_budget=None)
        few, more = (x.plans(unlimited)[0].saved_bytes for x in (self.few, self.more))
        own, all_layers = (few + (n - FEW) * (more - few) for n in (depth, self.layers.count))
        less = (all_layers - config.budget_bytes(all_layers)) / self.layers.count
        return replace(config, memory_budget=max(1, int(own - depth * less)))

    def moments(self, config: Config, fate: Fate) -> list[Moment]:
        """The most bytes alive outside of the layers, in the first two and in the last two.

        Raises:
            NotAlike: few layers and one more do not go together.
        """
        few = self._slots(self.few.moments(self._config(config, FEW), fate))
        more = self._slots(self.more.moments(self._config(config, MORE), fate))
        pairs = [((half, a), (half, b)) for half in (False, True) for a, b in PAIRS]
        found = [(a, b) for a, b in pairs if a in few or b in more]
        if not found or any(a not in few or b not in more for a, b in found):
            raise NotAlike
        ordered = sorted(found, key=_in_order)
        return [self._continued(few[a], more[b], b[1] != a[1]) for a, b in ordered]

    def _slots(self, moments: list[Moment]) -> dict[Slot, Moment]:
        """The largest moment of each slot."""
        largest: dict[Slot, Moment] = {}
        begun = {False: False, True: False}
        for moment in moments:
            layer = self._layer_of(moment.module)
            begun[moment.backward] |= layer is not None
            outside = "after" if begun[moment.backward] else "before"
            slot = moment.backward, outside if layer is None else layer
            if slot not in largest or moment.total > largest[slot].total:
                largest[slot] = moment
        return largest

    def _layer_of(self, module: str) -> int | None:
        if not module.startswith(f"{self.layers.path}."):
            return None
        return int(module.removeprefix(f"{self.layers.path}.").split(".")[0])

    def _continued(self, few: Moment, more: Moment, from_end: bool) -> Moment:
        """A moment of the model, from those of few layers and of one more.

        Args:
            few: the moment with few layers.
            more: the same with one more.
            from_end: whether they are of a layer that is counted from the last one on.
        """
        values = {k: getattr(few, k) for k in KINDS}
        slopes = {k: getattr(more, k) - values[k] for k in KINDS}
        module, layer = few.module, self._layer_of(few.module)
        if from_end and layer is not None:
            own, its = (f"{self.layers.path}.{i}" for i in (layer, layer + self._further))
            module = its + module.removeprefix(own)
        continued = {k: values[k] + self._further * slopes[k] for k in KINDS}
        return replace(few, module=module, **continued)

    def work(self, config: Config) -> tuple[Work, Work]:
        """The work of the forward and of the backward.

        Raises:
            ConfigError: a memory budget cannot be met; the message's bytes are those of few layers.
        """
        try:
            few = self.few.work(self._config(config, FEW))
            more = self.more.work(self._config(config, MORE))
        except ConfigError as error:
            few_of_all = f"With few of the {self.layers.count} layers of {self.layers.path}, "
            raise type(error)(few_of_all + str(error)) from None
        pairs = zip(few, more, strict=True)
        forward, backward = (a + (b + a.times(-1)).times(self._further) for a, b in pairs)
        return forward, backward

    def plans(self, config: Config) -> list[Plan]:
        """The decisions about a model of few layers."""
        return self.few.plans(self._config(config, FEW))


def _in_order(pair: tuple[Slot, Slot]) -> tuple[bool, float]:
    (backward, _), (_, at) = pair
    place = {"before": -1.0, "after": MORE + 1.0}.get(str(at))
    if place is None:
        place = float(MORE - int(at) if backward else at)
    return backward, place
