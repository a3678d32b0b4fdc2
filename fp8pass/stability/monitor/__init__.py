"""Runtime health: the effect of quantization on each tensor in training, measured now and then.

statistics.py   the statistics of one quantized tensor, measured on its device
sampler.py      runs the graphs of a sampled step op by op and measures the tensors they quantize
findings.py     warnings: which tensors have a problem, and what to do about it
writers.py      statistics to CSV and TensorBoard
callbacks.py    callbacks for Hugging Face's and Lightning's `Trainer`
versions.py     the sampled, careful and normal version of each graph
monitor.py      `Monitor`, which puts these together
"""

from __future__ import annotations

from fp8pass.stability.monitor.monitor import Monitor
from fp8pass.stability.monitor.statistics import Row

__all__ = ["Monitor", "Row"]
