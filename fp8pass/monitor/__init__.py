"""Runtime health: what quantization does to each tensor in training, measured now and then.

statistics.py   what is measured of one tensor, on its device
sampler.py      runs the graphs of a sampled step op by op and measures what they quantize
findings.py     which tensors to warn about, and what to do about them
writers.py      CSV and TensorBoard
callbacks.py    Hugging Face `Trainer` and Lightning
monitor.py      `Monitor`, which puts these together
"""

from __future__ import annotations

from fp8pass.monitor.monitor import Monitor
from fp8pass.monitor.statistics import Row

__all__ = ["Monitor", "Row"]
