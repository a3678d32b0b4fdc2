"""The recent past of a number that is measured again and again, and how far it has risen above it.

    ........................................ | ........
    past, in blocks of equal length            recent

What is compared are medians, so that single outliers count for nothing: that of the recent numbers,
and the lowest of a block of the past. A loss that falls stays below all of them, and one that rises
slowly does not take its reference with it. The unit is the noise: the median distance of the
past from its block's median, times 1.4826 as for a normal distribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

NORMAL = 1.4826  # standard deviations of a normal distribution in a median distance


@dataclass(frozen=True)
class Rise:
    """How far a number has risen.

    Attributes:
        now: the median of the recent numbers.
        before: the lowest median of a block of the past; NaN where there is too little past.
        deviations: the rise in robust standard deviations; 0 where there is too little past.
    """

    now: float
    before: float
    deviations: float

    @property
    def difference(self) -> float:
        """The rise in units of the number; 0 where there is too little past."""
        return self.now - self.before if math.isfinite(self.before) else 0.0


class Trend:
    """The past of a number.

    Args:
        recent: how many of the last numbers are compared with the past.
        block: length of a block of the past.
        blocks: how many of them are remembered; it takes two to compare.
        floor: the least noise, in units of the number.

    Attributes:
        frozen: whether new numbers stay out of the past.
    """

    def __init__(self, recent: int, block: int, blocks: int, floor: float) -> None:
        self.block, self.floor = block, floor
        self.frozen = False
        self._recent: deque[float] = deque(maxlen=recent)
        self._past: deque[float] = deque(maxlen=block * blocks)

    def extend(self, values: Iterable[float]) -> None:
        """Add numbers; those that are not finite are left out."""
        for value in values:
            if not math.isfinite(value):
                continue
            if len(self._recent) == self._recent.maxlen and not self.frozen:
                self._past.append(self._recent[0])
            self._recent.append(float(value))

    def rise(self) -> Rise:
        """How far the recent numbers are above the past."""
        now = float(np.median(self._recent)) if self._recent else math.nan
        whole = len(self._past) // self.block
        if whole < 2 or len(self._recent) < (self._recent.maxlen or 0):
            return Rise(now, math.nan, 0.0)
        past = np.array(self._past)[-whole * self.block :].reshape(whole, self.block)
        medians = np.median(past, axis=1, keepdims=True)
        noise = max(NORMAL * float(np.median(np.abs(past - medians))), self.floor)
        before = float(medians.min())
        return Rise(now, before, (now - before) / noise)

    def forget(self, *, recent: bool = False) -> None:
        """Begin a new past; with `recent` forget the recent numbers alone."""
        self._recent.clear()
        if not recent:
            self._past.clear()

    def state_dict(self) -> dict[str, Any]:
        """The numbers, for a checkpoint."""
        return {"recent": list(self._recent), "past": list(self._past), "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the numbers of a checkpoint."""
        self.forget()
        self._recent.extend(state["recent"])
        self._past.extend(state["past"])
        self.frozen = state["frozen"]
