"""Bytes a second that cross the link between a device and the host, measured."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8pass.runtime.arena import Arena

# Of a CPU, which has no link: that of an H200, so that plans are as they would be there.
H200 = 51e9
MEASURED_BYTES = 64 << 20
REPEATS = 4
# Steps are fourths of a power of two: no plan changes because one measurement differs by a little.
STEPS = 4


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second each way, of the slower one, rounded down to a step."""
    if device.type != "cuda":
        return H200
    there = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    here = Arena(device).empty(there.shape, there.dtype)
    slower = max(_seconds(there, here, device), _seconds(here, there, device))
    return rounded_down(MEASURED_BYTES / slower)


def rounded_down(rate: float) -> float:
    """The largest step that is no larger."""
    return float(2 ** (math.floor(STEPS * math.log2(rate)) / STEPS))


def _seconds(source: Tensor, target: Tensor, device: torch.device) -> float:
    """Of the fastest of a few copies: others share the link now and then."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        target.copy_(source, non_blocking=True)
        events[0].record()
        for event in events[1:]:
            target.copy_(source, non_blocking=True)
            event.record()
        events[-1].synchronize()
    pairs = pairwise(events)
    return min(before.elapsed_time(after) for before, after in pairs) / 1e3
