"""Comparison of measured numbers with earlier measurements of the same quantity.

`Trend` follows one quantity that is measured often. `History` follows a row of quantities, one or
several for each tensor. `Trend` and `History` use medians, so single outliers have no effect.
Distances are measured in units of the noise, which is a robust standard deviation: the median
distance from the median, times 1.4826. For normally distributed numbers the noise equals the
standard deviation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

NORMAL = 1.4826  # ratio of standard deviation to median distance in a normal distribution
REFRESH = 4  # number of new rows after which medians are recomputed, which takes time


@dataclass(frozen=True)
class Rise:
    """The rise of the recent numbers of a `Trend` above the past."""

    now: float  # median of the recent numbers
    before: float  # lowest median of the past blocks; NaN if the past is too short
    deviations: float  # the rise in robust standard deviations; 0 if the past is too short

    @property
    def difference(self) -> float:
        """`now - before`, in the unit of the watched number; 0 if the past is too short."""
        return self.now - self.before if math.isfinite(self.before) else 0.0


class Trend:
    """Recent and past values of one number.

        ........................................ | ........
        past, in blocks of equal length            recent

    `rise` compares the median of the recent numbers with the lowest median of a block. So a falling
    loss does not count as a rise. A slowly rising loss is compared with its lowest values, not with
    the values just before.

    Args:
        recent: how many of the last numbers are compared with the past.
        block: how many numbers a block has.
        blocks: maximum number of blocks. A comparison needs two blocks.
        floor: lower limit of the noise, in the unit of the watched number.
    """

    def __init__(self, recent: int, block: int, blocks: int, floor: float) -> None:
        self.block, self.floor = block, floor
        self.frozen = False  # if true, numbers that are no longer recent are dropped
        self._recent: deque[float] = deque(maxlen=recent)
        self._past: deque[float] = deque(maxlen=block * blocks)

    def extend(self, values: Iterable[float]) -> None:
        for value in filter(math.isfinite, values):
            if len(self._recent) == self._recent.maxlen and not self.frozen:
                self._past.append(self._recent[0])
            self._recent.append(float(value))

    def rise(self) -> Rise:
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
        """Forget all numbers, or only the recent numbers if `recent`."""
        self._recent.clear()
        if not recent:
            self._past.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "past": list(self._past), "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._recent.extend(state["recent"])
        self._past.extend(state["past"])
        self.frozen = state["frozen"]


class History:
    """Past rows of numbers.

    Each number of a new row is compared with the median of the past numbers at the same position.

    Args:
        floor: lower limit of the noise at each position, in the unit of the numbers.
        window: maximum number of past rows.
        least: number of past rows that a comparison needs.
    """

    def __init__(self, floor: float, window: int = 40, least: int = 8) -> None:
        self.floor, self.least = floor, least
        self.frozen = False  # if true, new rows are not added to the past
        self._rows: deque[Numbers] = deque(maxlen=window)
        self._rows_until_refresh = 0
        self._center: Numbers = np.empty(0)
        self._noise: Numbers = np.empty(0)

    def push(self, row: Numbers) -> None:
        """Add a row, with NaN for missing numbers. A row that contains only NaN is ignored."""
        if self.frozen or np.isnan(row).all():
            return
        if self._rows and self._rows[-1].shape != row.shape:
            self.forget()
        self._rows.append(row)
        self._rows_until_refresh -= 1

    def jumps(self, row: Numbers) -> tuple[Numbers, Numbers]:
        """Return how far each number is from its past median, in its unit and in noise units.

        Both results are 0 if the past is too short, and where a number is not finite.
        """
        if len(self._rows) < self.least or self._rows[-1].shape != row.shape:
            return np.zeros_like(row), np.zeros_like(row)
        if self._rows_until_refresh <= 0:
            self._summarize()
        change = row - self._center
        change[~np.isfinite(change)] = 0.0
        return change, change / self._noise

    def forget(self) -> None:
        self._rows.clear()
        self._rows_until_refresh = 0

    def _summarize(self) -> None:
        past = np.stack(self._rows)
        self._center = np.median(past, axis=0)  # NaN where a past number is missing
        with np.errstate(invalid="ignore"):
            distance = np.median(np.abs(past - self._center), axis=0)
        self._noise = np.fmax(NORMAL * distance, self.floor)
        self._rows_until_refresh = REFRESH

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [row.tolist() for row in self._rows], "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.forget()
        self._rows.extend(np.array(row, dtype=float) for row in state["rows"])
        self.frozen = state["frozen"]


def logs(values: Numbers) -> Numbers:
    """Return natural logarithms; NaN for numbers that are not positive and finite."""
    positive = np.isfinite(values) & (values > 0)
    return np.log(np.where(positive, values, np.nan))
