"""The numbered units that cause an error, found by few measurements of it.

Let u1 ... un be the units in low bits, in the order in which they run, and E(i) the error of all
gradients with the first i of them exact. Independent errors add in squares, so that the units from
i + 1 to j cause E²(i) - E²(j) together. Halving the range that causes most, again and again, leads
to the largest single cause in log2(n) compilations. Ranges that cause less than a culprit must are
not halved, so that few measurements show that there is no culprit. A range that makes an infinite
error finite has the unit that overflows.

Large errors do not add: with all gradients wrong anyway, the unit that becomes exact last seems to
cause everything. The search therefore goes on with the found units exact, since several may have to
be. In the end it drops those that make little difference with all other found units exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

# A culprit causes at least this share of the squared error, and at least this many times as much as
# the other units do on average.
CULPRIT_SHARE, CULPRIT_TIMES = 0.25, 10.0


class Search:
    """Finds the units that cause an error by themselves.

    Args:
        units: the number of units.
        error: the relative error of the gradients with these units exact; called once for each set.
    """

    def __init__(self, units: int, error: Callable[[frozenset[int]], float]) -> None:
        self.units = units
        self.error = cache(error)

    def culprits(self, most: int) -> list[int]:
        """At most `most` units, in the order found; fewer if no other one stands out."""
        found: list[int] = []
        while len(found) < most and (unit := self._culprit(frozenset(found))) is not None:
            found.append(unit)
        return self._needed(found)

    def _needed(self, found: list[int]) -> list[int]:
        """The found units without those that make little difference beside the others.

        All of them if the error is still infinite: then none makes a difference on its own.
        """
        if math.isinf(self.error(frozenset(found))):
            return found
        for unit in reversed(found):
            others = frozenset(found) - {unit}
            if self._fall(others, others | {unit}) < self._threshold(others):
                found = [u for u in found if u != unit]
        return found

    def _threshold(self, exact: frozenset[int]) -> float:
        """The squared error that a culprit causes at least, with the units in `exact` exact."""
        others = self.units - len(exact) - 1
        return max(CULPRIT_SHARE, CULPRIT_TIMES / (CULPRIT_TIMES + others)) * self.error(exact) ** 2

    def _culprit(self, exact: frozenset[int]) -> int | None:
        """The unit that causes most of the error left with `exact`, None if none stands out."""
        threshold = self._threshold(exact)
        if not threshold:
            return None

        def caused(start: int, end: int) -> float:
            return self._fall(exact.union(range(start)), exact.union(range(end)))

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

    def _fall(self, before: frozenset[int], after: frozenset[int]) -> float:
        """The decrease of the squared error; both errors may be infinite."""
        a, b = self.error(before), self.error(after)
        return 0.0 if a == b else a**2 - b**2
