"""Search for the numbered units that cause an error, with few measurements of it.

Let u1 ... un be the units in low bits in the order in which they run, and E(i) the error of all
gradients if the first i units are exact. Independent errors add in squares, so the units from i + 1
to j cause E²(i) - E²(j) together. Repeatedly halving the range that causes most leads to the
largest single cause in log2(n) compilations. Ranges that cause less than the threshold of a culprit
are not halved, so few measurements suffice if no unit is a culprit. A range that turns an infinite
error into a finite one contains the unit that overflows.

Large errors do not add: if all gradients are wrong anyway, the unit that becomes exact last seems
to cause everything. So the search continues with the found units exact, because several may have to
be. In the end it drops the units that matter little if all other found units are exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

# A culprit causes at least this share of the squared error, and at least this many times as much as
# the other units do on average.
CULPRIT_SHARE, CULPRIT_TIMES = 0.25, 10.0


class CulpritSearch:
    """Finds the units that cause an error by themselves.

    Args:
        units: number of units.
        error: returns the relative error of the gradients if these units are exact; called once for
            each set.
    """

    def __init__(self, units: int, error: Callable[[frozenset[int]], float]) -> None:
        self.units = units
        self.error = cache(error)

    def culprits(self, most: int) -> list[int]:
        """Return at most `most` units in the order found; fewer if no other unit stands out."""
        found: list[int] = []
        while len(found) < most and (unit := self._find_next(frozenset(found))) is not None:
            found.append(unit)
        if math.isinf(self.error(frozenset(found))):
            return found  # no unit makes a difference on its own
        for unit in reversed(found):
            others = frozenset(found) - {unit}
            if self._compute_decrease(others, others | {unit}) < self._compute_threshold(others):
                found = [u for u in found if u != unit]
        return found

    def _compute_threshold(self, exact: frozenset[int]) -> float:
        """Return the least squared error that a culprit causes if the units in `exact` are."""
        others = self.units - len(exact) - 1
        return max(CULPRIT_SHARE, CULPRIT_TIMES / (CULPRIT_TIMES + others)) * self.error(exact) ** 2

    def _find_next(self, exact: frozenset[int]) -> int | None:
        """Return the unit that causes most of the remaining error; None if none stands out."""
        threshold = self._compute_threshold(exact)
        if not threshold:
            return None

        def caused(start: int, end: int) -> float:
            return self._compute_decrease(exact.union(range(start)), exact.union(range(end)))

        ranges = [(-caused(0, self.units), 0, self.units)]  # a heap: the largest first
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
        """Return the decrease of the squared error; both errors may be infinite."""
        a, b = self.error(before), self.error(after)
        return 0.0 if a == b else a**2 - b**2
