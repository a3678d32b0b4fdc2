"""Statistics of quantized tensors in training, measured in sampled steps.

monitor.py      `Monitor`: samples steps, reports, and warns
statistics.py   the statistics of one quantized tensor, measured on its device
sampler.py      versions of graphs: normal, sampled (op by op), careful (high precision)
findings.py     warnings about tensors with a problem, and advice
writers.py      writes statistics to CSV and TensorBoard
"""

from __future__ import annotations

from fp8pass.stability.monitor.monitor import Monitor
from fp8pass.stability.monitor.statistics import TensorStatistics

__all__ = ["Monitor", "TensorStatistics"]
