"""Measure the bandwidth between a device and host memory."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8pass.runtime.arena import Arena

# Plans that are made on a CPU use an H200's bandwidth.
H200 = 51e9
MEASURED_BYTES = 64 << 20
REPEATS = 4
# Rounded down to powers of 2^(1/4), so that plans do not depend on noise.
STEPS = 4


@cache
def bandwidth(device: torch.device) -> float:
    """Return bytes per second in the slower direction."""
    if device.type != "cuda":
        return H200
    on_device = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    on_host = Arena(device).empty(on_device.shape, on_device.dtype)
    slower = max(_time(on_device, on_host, device), _time(on_host, on_device, device))
    return round_down(MEASURED_BYTES / slower)


def round_down(rate: float) -> float:
    """Round down to a power of 2^(1/`STEPS`)."""
    return float(2 ** (math.floor(STEPS * math.log2(rate)) / STEPS))


def _time(source: Tensor, target: Tensor, device: torch.device) -> float:
    """Return the seconds of the fastest copy; other processes may slow copies down."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        target.copy_(source, non_blocking=True)
        events[0].record()
        for event in events[1:]:
            target.copy_(source, non_blocking=True)
            event.record()
        events[-1].synchronize()
    return min(before.elapsed_time(after) for before, after in pairwise(events)) / 1e3
