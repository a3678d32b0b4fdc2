"""The past of many numbers of equal kind, and how far each of them is from its own.

One row holds what was measured at one time, a number for each tensor. A number jumps if it lies
many robust standard deviations from the median of its own past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8pass.stability.guard.trend import NORMAL

Numbers = NDArray[np.float64]

LEAST = 8  # rows of a past that can be compared with
REFRESH = 4  # rows after which medians are computed again, which takes the most time


class History:
    """The past of a row of numbers.

    Args:
        floor: the least noise of a number.
        window: how many rows are remembered.
        least: how many there have to be to compare with.

    Attributes:
        frozen: whether new rows stay out of the past.
    """

    def __init__(self, floor: float, window: int = 40, least: int = LEAST) -> None:
        self.floor, self.least = floor, least
        self.frozen = False
        self._rows: deque[Numbers] = deque(maxlen=window)
        self._outdated = 0
        self._center: Numbers = np.empty(0)
        self._noise: Numbers = np.empty(0)

    def push(self, row: Numbers) -> None:
        """Add a row, NaN where there was nothing to measure; leave out one without numbers."""
        if self.frozen or np.isnan(row).all():
            return
        if self._rows and self._rows[-1].shape != row.shape:
            self.forget()
        self._rows.append(row)
        self._outdated -= 1

    def jumps(self, row: Numbers) -> tuple[Numbers, Numbers]:
        """How far each number is from its median, and that in robust standard deviations.

        Both are 0 where there is too little past, or something is not finite.
        """
        if len(self._rows) < self.least or self._rows[-1].shape != row.shape:
            return np.zeros_like(row), np.zeros_like(row)
        if self._outdated <= 0:
            self._summarize()
        change = row - self._center
        change[~np.isfinite(change)] = 0.0
        return change, change / self._noise

    def forget(self) -> None:
        """Begin a new past."""
        self._rows.clear()
        self._outdated = 0

    def _summarize(self) -> None:
        past = np.stack(self._rows)
        # A number that was not always there has no past to compare with.
        self._center = np.median(past, axis=0)
        with np.errstate(invalid="ignore"):
            distance = np.median(np.abs(past - self._center), axis=0)
        self._noise = np.fmax(NORMAL * distance, self.floor)
        self._outdated = REFRESH

    def state_dict(self) -> dict[str, Any]:
        """The rows, for a checkpoint."""
        return {"rows": [row.tolist() for row in self._rows], "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the rows of a checkpoint."""
        self.forget()
        self._rows.extend(np.array(row, dtype=float) for row in state["rows"])
        self.frozen = state["frozen"]


def logs(values: Numbers) -> Numbers:
    """Natural logarithms; NaN of what is zero or not finite."""
    positive = np.isfinite(values) & (values > 0)
    return np.log(np.where(positive, values, np.nan))
