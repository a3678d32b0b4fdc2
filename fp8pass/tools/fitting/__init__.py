"""`fit`: whether a model trains on a GPU and its host, and how, before anything is allocated.

    step.py        one step on fake tensors, recorded: allocations, and runs of compiled graphs
    planned.py     a compiled graph under a configuration: its plan, memory and work
    traced.py      the record with planned graphs: bytes alive at each moment; equal layers
    setup.py       a way to train: options, as lines to paste
    parameters.py  bytes of weights, gradients and optimizer states, on the GPU and on the host
    candidates.py  the ways to train with their memory and time, the fastest first
    result.py      the result: tables, JSON and a plot
    fitting.py     the function `fit`, and the GPU that is meant

LLMQ section 3.1: which of its techniques to use "is not possible to decide a priori". With traced
and planned graphs it is possible.
"""

from __future__ import annotations

from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.fitting import fit
from fp8pass.tools.fitting.result import Fit

__all__ = ["Fit", "Gpu", "fit"]
