"""`fp8pass.bisect`: the linear layers and saved tensors that a large gradient error comes from.

units.py        the linear layers and saved tensors in low bits, and options that make them exact
trials.py       the error of the gradients with some units exact, measured
search.py       the units that cause the error, found in few such trials
result.py       the units found, as text, JSON and options
run.py          `bisect`, which puts these together
"""

from __future__ import annotations

from fp8pass.tools.bisection.result import Bisection, Culprit
from fp8pass.tools.bisection.run import bisect
from fp8pass.tools.bisection.search import CULPRIT_SHARE, CULPRIT_TIMES, Search
from fp8pass.tools.bisection.trials import Trials, relative_error
from fp8pass.tools.bisection.units import OPTIONS, Unit, options_for, units_of

__all__ = [
    "CULPRIT_SHARE",
    "CULPRIT_TIMES",
    "OPTIONS",
    "Bisection",
    "Culprit",
    "Search",
    "Trials",
    "Unit",
    "bisect",
    "options_for",
    "relative_error",
    "units_of",
]
