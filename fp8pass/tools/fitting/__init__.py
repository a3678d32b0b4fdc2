"""`fit`: whether a model trains on a GPU and its host, and how, before anything is allocated.

    fakes.py       the model and its batch without memory
    step.py        one step of it, recorded: what is allocated when, which graphs run when
    events.py      the record
    planned.py     what a configuration makes of a graph; liveness.py its memory, work.py its work
    replay.py      the record with plans in the place of graphs: bytes alive, moment by moment
    traced.py      a step under any configuration; deep.py the same of many equal layers, by few
    gpu.py         the GPU that is meant
    setup.py       a way to train: options, as lines to paste
    parameters.py  weights, states and sums: how many bytes, on which side
    timing.py      the time of a step
    candidates.py  the ways to train, from the fastest on
    result.py      the result; tables.py and timeline.py to look at
    fitting.py     all of it together

LLMQ section 3.1: which of its means to use "is not possible to decide a priori"; with the graphs
traced and planned, it is.
"""

from __future__ import annotations

from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.fitting import fit
from fp8pass.tools.fitting.result import Fit

__all__ = ["Fit", "Gpu", "fit"]
