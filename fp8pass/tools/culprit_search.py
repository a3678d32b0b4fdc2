"""Search for the units that cause a large gradient error, with few measurements of the error.

Units are the n layers and saved tensors in low-bit formats, in forward order. A unit is exact if it
is kept out of these formats. Let E(i) be the error of all gradients if the first i units are exact.
Squares of independent errors add up, so the units i + 1 to j cause the squared error E²(i) - E²(j).
The search repeatedly halves the range that causes the most error, unless the range causes too
little error to contain a culprit. It finds a culprit with about log2(n) compilations.

Squares of large errors do not add up: if all gradients are wrong anyway, the unit that becomes
exact last seems to cause everything. So earlier culprits are exact while the search looks for the
next culprit. At the end, it drops culprits that cause little error if all other culprits are exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

# A culprit causes at least this share of the squared error, and at least this many times as much as
# an average other unit.
CULPRIT_SHARE, CULPRIT_TIMES = 0.25, 10.0


class CulpritSearch:
    """Finds the units that cause an error by themselves.

    `error` takes the set of exact units, and returns the error of the gradients.
    """

    def __init__(self, units: int, error: Callable[[frozenset[int]], float]) -> None:
        self.units = units
        self.error = cache(error)

    def culprits(self, most: int) -> list[int]:
        """Return at most `most` units, in the order found."""
        found: list[int] = []
        while len(found) < most and (unit := self._find_next(frozenset(found))) is not None:
            found.append(unit)
        if math.isinf(self.error(frozenset(found))):
            return found  # no decrease can be measured from an infinite error
        for unit in reversed(found):
            others = frozenset(found) - {unit}
            if self._compute_decrease(others, others | {unit}) < self._compute_threshold(others):
                found = [u for u in found if u != unit]
        return found

    def _compute_threshold(self, exact: frozenset[int]) -> float:
        """Return the squared error that makes a unit a culprit if the units `exact` are exact."""
        others = self.units - len(exact) - 1
        return max(CULPRIT_SHARE, CULPRIT_TIMES / (CULPRIT_TIMES + others)) * self.error(exact) ** 2

    def _find_next(self, exact: frozenset[int]) -> int | None:
        threshold = self._compute_threshold(exact)
        if not threshold:
            return None

        def caused(start: int, end: int) -> float:
            return self._compute_decrease(exact.union(range(start)), exact.union(range(end)))

        ranges = [(-caused(0, self.units), 0, self.units)]  # a heap: the largest error first
        while True:
            minus_caused, start, end = heapq.heappop(ranges)
            if -minus_caused < threshold:
                return None
            if end - start == 1:
                return start
            middle = (start + end) // 2
            for half in ((start, middle), (middle, end)):
                heapq.heappush(ranges, (-caused(*half), *half))

    def _compute_decrease(self, before: frozenset[int], after: frozenset[int]) -> float:
        """Return how much the squared error falls from exact units `before` to exact units `after`.

        The result is 0 if both errors are infinite.
        """
        a, b = self.error(before), self.error(after)
        return 0.0 if a == b else a**2 - b**2
