"""`fit`: find how a model can train on a GPU and its host, before anything is allocated.

step.py        records one step on fake tensors: allocations, and runs of compiled graphs
planned.py     plans a compiled graph for a configuration; estimates its memory and work
traced.py      bytes alive at each moment of a recorded step; extrapolation to more layers
setup.py       a training setup: options of backend and optimizer, as lines to paste
parameters.py  bytes of weights, gradients and optimizer states, on the GPU and on the host
candidates.py  lists the training setups with their memory and time, the fastest first
result.py      the result: tables, JSON and a plot
fitting.py     the function `fit`, and how it finds the GPU from its argument
"""

from __future__ import annotations

from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.fitting import fit
from fp8pass.tools.fitting.result import Fit

__all__ = ["Fit", "Gpu", "fit"]
