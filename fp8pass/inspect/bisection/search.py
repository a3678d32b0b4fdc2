"""Which of numbered units cause an error, from few measurements of it.

Say u1 ... un are what is in low bits, in the order in which it runs, and E(i) the error of all
gradients with the first i of them exact. Errors that are independent add in squares, so that what
comes after i up to j causes E²(i) - E²(j), whatever lies between. Halving the range that causes
most, again and again, leads to the largest single one in log2(n) compilations. Ranges that cause
less than a culprit has to are left alone: it takes few to see that there is none. A range that
makes an infinite error finite holds what overflows.

Large errors do not add: with all gradients wrong anyway, whichever unit becomes exact last seems to
cause everything. So the search goes on with what it found exact, since several may have to be, and
names in the end what the error depends on where all else that was found is exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import cache

# A culprit causes at least this share of the squared error, and so many times what the others do on
# average.
SHARE, TIMES = 0.25, 10.0


class Search:
    """Finds the units that cause an error by themselves.

    Args:
        units: how many there are.
        error: of the numbered units exact, relative; it is asked for once for each set.
    """

    def __init__(self, units: int, error: Callable[[frozenset[int]], float]) -> None:
        self.units = units
        self.error = cache(error)

    def culprits(self, most: int) -> list[int]:
        """At most so many units, in the order found; fewer if no other one stands out."""
        found: list[int] = []
        while len(found) < most and (unit := self._culprit(frozenset(found))) is not None:
            found.append(unit)
        return self._needed(found)

    def _needed(self, found: list[int]) -> list[int]:
        """Without units that make little difference beside the others.

        With an infinite error left none does, but each is needed to get rid of it.
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
        return max(SHARE, TIMES / (TIMES + others)) * self.error(exact) ** 2

    def _culprit(self, exact: frozenset[int]) -> int | None:
        """The unit that causes most of what is left with `exact`, None if none stands out."""
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
        """By how much the squared error falls; both may be infinite."""
        a, b = self.error(before), self.error(after)
        return 0.0 if a == b else a**2 - b**2
