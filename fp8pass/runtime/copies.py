"""Copies between a GPU and the host that run beside what the GPU computes, as operators.

    copy = to_host(x)               begins: a tensor on the host, with the layout of x
    y = from_host(copy, device)     begins: a tensor on a device, with the layout of `copy`
    z = settled(y, copy)            `y`, from here on with the numbers of `copy`

Copies of a device run one after the other on a stream of their own, each when all is done that was
launched before it. `settled` has the device wait, not the CPU. Until then both tensors are held,
whatever becomes of the graph, and nobody may read the first one. A CPU's host is the CPU: a copy is
a copy.

`after` of `from_host` is a tensor that it does not read: compilers may not begin the copy before
there is that.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass.config import BUG
from fp8pass.runtime.buffers import Buffers

library = torch.library.Library("fp8pass_host", "DEF")
library.define("to_host(Tensor x) -> Tensor")
library.define("from_host(Tensor x, Device device, Tensor? after=None) -> Tensor")
library.define("settled(Tensor(a) copy, Tensor source) -> Tensor(a)")


class _Lane(NamedTuple):
    """Where the copies of a device run, and the memory that they take on the host.

    One stream for both directions: a buffer that is used again is written after it was read.
    """

    buffers: Buffers
    stream: torch.cuda.Stream | None


class _Unsettled(NamedTuple):
    """A copy that has begun: its event, and the tensors that it must not lose."""

    done: torch.cuda.Event
    copy: Tensor
    source: Tensor


# By the address of the copy; None where it is known to be done.
_unsettled: dict[int, _Unsettled | None] = {}


@cache
def lane_of(device: torch.device) -> _Lane:
    """The lane of a device."""
    return _Lane(Buffers(device), torch.cuda.Stream(device) if device.type == "cuda" else None)


def _to_host(x: Tensor) -> Tensor:
    copy = lane_of(x.device).buffers.empty_strided(x.shape, x.stride(), x.dtype)
    _begin(copy, x, x.device)
    return copy


def _from_host(x: Tensor, device: torch.device, after: Tensor | None = None) -> Tensor:
    # On the current stream, which frees it: the allocator need know of no other.
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    _begin(copy, x, copy.device)
    return copy


def _begin(copy: Tensor, source: Tensor, device: torch.device) -> None:
    if not copy.numel():
        return
    stream = lane_of(device).stream
    if stream is None:
        copy.copy_(source)
        _unsettled[copy.data_ptr()] = None
        return
    _let_go_of_finished()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        _unsettled[copy.data_ptr()] = _Unsettled(stream.record_event(), copy, source)


def _let_go_of_finished() -> None:
    """Forget finished copies that an exception kept from being settled; they hold their tensors."""
    for address, entry in list(_unsettled.items()):
        if entry is not None and entry.done.query():
            _unsettled[address] = None


def _settled(copy: Tensor, source: Tensor) -> Tensor:
    if not copy.numel():
        return copy
    try:
        entry = _unsettled.pop(copy.data_ptr())
    except KeyError:
        raise RuntimeError(
            f"The backward waits for a copy of shape {tuple(copy.shape)} on {copy.device} that "
            f"nobody began. {BUG} offload=False does without copies."
        ) from None
    if entry is not None:
        device = copy.device if copy.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(entry.done)
    return copy


def _fake_to_host(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _fake_from_host(x: Tensor, device: torch.device, after: Tensor | None = None) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _fake_settled(copy: Tensor, source: Tensor) -> Tensor:
    return copy


def _register(name: str, kernel: Any, fake: Any) -> Any:
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8pass_host::{name}", fake, lib=library)
    return getattr(torch.ops.fp8pass_host, name).default


to_host = _register("to_host", _to_host, _fake_to_host)
from_host = _register("from_host", _from_host, _fake_from_host)
settled = _register("settled", _settled, _fake_settled)
