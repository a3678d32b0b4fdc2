"""Operators that copy between a GPU and host memory, concurrently with computation.

    copy = to_host(x)               start a copy: a host tensor with the layout of x
    y = from_host(copy, device)     start a copy: a device tensor with the layout of `copy`
    z = settled(y, copy)            wait for the copy: `y`, which now has the values of `copy`

Copies run in order on one side stream, after all work that was launched before. `settled` makes the
device wait, not the CPU. Until then, nothing may read the copy, and this module holds references to
both tensors.

A compiler starts the copy `from_host(..., after)` after computing `after`. `bandwidth` measures the
speed of copies, which plans for offloading need.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass.config import BUG
from fp8pass.runtime.arena import Arena, Buffers

# Bytes per second. Plans that are made on a CPU use this bandwidth of an H200.
H200 = 51e9
MEASURED_BYTES = 64 << 20
REPEATS = 4
# Bandwidths are rounded down to powers of 2^(1/4), so that plans do not depend on noise.
STEPS = 4

library = torch.library.Library("fp8pass_host", "DEF")
library.define("to_host(Tensor x) -> Tensor")
library.define("from_host(Tensor x, Device device, Tensor? after=None) -> Tensor")
library.define("settled(Tensor(a) copy, Tensor source) -> Tensor(a)")


class _Lane(NamedTuple):
    """The buffers and the stream for copies to and from one device.

    Both directions share one stream, so a buffer is read before another tensor reuses the buffer.
    """

    buffers: Buffers
    stream: torch.cuda.Stream | None


class _Unsettled(NamedTuple):
    """The event after a started copy, and the tensors that must stay alive."""

    done: torch.cuda.Event
    copy: Tensor
    source: Tensor


# Started copies by the address of the copy; None for a finished copy.
_unsettled: dict[int, _Unsettled | None] = {}


@cache
def lane_of(device: torch.device) -> _Lane:
    return _Lane(Buffers(device), torch.cuda.Stream(device) if device.type == "cuda" else None)


def _to_host(x: Tensor) -> Tensor:
    copy = lane_of(x.device).buffers.empty_strided(x.shape, x.stride(), x.dtype)
    _start(copy, x, x.device)
    return copy


def _from_host(x: Tensor, device: torch.device, after: Tensor | None = None) -> Tensor:
    # The current stream allocates and frees the copy, so record_stream is not needed.
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    _start(copy, x, copy.device)
    return copy


def _start(copy: Tensor, source: Tensor, device: torch.device) -> None:
    if not copy.numel():
        return
    stream = lane_of(device).stream
    if stream is None:
        copy.copy_(source)
        _unsettled[copy.data_ptr()] = None
        return
    _release_finished()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        _unsettled[copy.data_ptr()] = _Unsettled(stream.record_event(), copy, source)


def _release_finished() -> None:
    """Drop references to the tensors of finished copies, which an exception may leave unsettled."""
    for address, entry in list(_unsettled.items()):
        if entry is not None and entry.done.query():
            _unsettled[address] = None


def _settle(copy: Tensor, source: Tensor) -> Tensor:
    if not copy.numel():
        return copy
    try:
        entry = _unsettled.pop(copy.data_ptr())
    except KeyError:
        raise RuntimeError(
            f"The backward waits for a copy of shape {tuple(copy.shape)} on {copy.device} that was "
            f"not started. {BUG} Until the bug is fixed, set offload=False."
        ) from None
    if entry is not None:
        device = copy.device if copy.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(entry.done)
    return copy


def _fake_copy(
    x: Tensor, device: torch.device | str = "cpu", after: Tensor | None = None
) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _register(name: str, kernel: Any, fake: Any) -> Any:
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8pass_host::{name}", fake, lib=library)
    return getattr(torch.ops.fp8pass_host, name).default


to_host = _register("to_host", _to_host, _fake_copy)
from_host = _register("from_host", _from_host, _fake_copy)
settled = _register("settled", _settle, lambda copy, source: copy)


@cache
def bandwidth(device: torch.device) -> float:
    """Return the bandwidth of copies in the slower direction, in bytes per second."""
    if device.type != "cuda":
        return H200
    on_device = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=device)
    on_host = Arena(device).empty(on_device.shape, on_device.dtype)
    slower = max(_time(on_device, on_host, device), _time(on_host, on_device, device))
    return round_down(MEASURED_BYTES / slower)


def round_down(rate: float) -> float:
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
