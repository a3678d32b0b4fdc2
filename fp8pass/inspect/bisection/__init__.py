"""`fp8pass.bisect`: the linear layers and saved tensors that a large gradient error comes from.

units.py        what can be made exact by itself, and the options that make it so
trials.py       the error of the gradients with some units exact, measured
search.py       which units cause the error, from few such trials
result.py       what was found, as text, JSON and options
run.py          `bisect`, which puts these together
"""

from __future__ import annotations

from fp8pass.inspect.bisection.result import Bisection, Culprit
from fp8pass.inspect.bisection.run import bisect
from fp8pass.inspect.bisection.search import SHARE, TIMES, Search
from fp8pass.inspect.bisection.trials import Trials, relative_error
from fp8pass.inspect.bisection.units import OPTIONS, Unit, options_for, units_of

__all__ = [
    "OPTIONS",
    "SHARE",
    "TIMES",
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
