"""Optimizer states and sums of gradients in host memory, and staging buffers to compute with them.

Pieces of offloaded tensors pass through staging buffers on the GPU. While one piece is computed,
the next is copied in and the previous is copied out, on separate streams, so that the link is used
in both directions (LLMQ 3.1, double buffering). Kernels that read host memory directly (zero-copy)
are not implemented: LLMQ measured them slower on an RTX 5060 Ti and an RTX 4090, but faster on an
L40S.

A computation gets a share of the GPU when a GEMM of the model ends, and the next computation on the
same stream when the next GEMM ends. So computations have priority over the model, and the second
kernel of a piece has its own stream, on which it overlaps the first kernel of the next piece.

    copies in    | piece 0 | piece 1 | piece 2 |         |
    computation            | piece 0 | piece 1 | piece 2 |
    second kernel               | piece 0 | piece 1 | piece 2 |
    copies out                       | piece 0 | piece 1 | piece 2 |

The CPU never waits, so that it can launch the backward of the next layer: the GPU would be idle
while pieces are copied. Where too many gradients wait for their update, the GPU waits until the
first ones have been used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass.config import ConfigError
from fp8pass.optim.options import state_bytes
from fp8pass.optim.shards import local
from fp8pass.runtime.arena import available
from fp8pass.weights.quantized_parameter import CodedWeight

# States of smaller parameters stay on the GPU: norms and biases are many, but need little memory.
SMALLEST = 1 << 16
# Staging buffers: one is copied in, one is computed, one is copied out.
DEPTH = 3
# Bytes of a buffer: a square weight of hidden size 4096 with its states. The CPU needs as long to
# launch a piece as the link for a fifth of it.
STAGED_BYTES = 96 << 20
ALIGNMENT = 512
# Priorities of the streams that copy in, compute, run the second kernel, and copy out. Smaller
# numbers have priority.
PRIORITIES = (0, -1, -1, 0)

Copies = Sequence[tuple[Tensor, Tensor]]  # pairs of source and target


def is_offloaded(group: Mapping[str, Any], name: str, parameter: Tensor) -> bool:
    """Return whether `name` ("states", "gradients") of a parameter is in host memory."""
    if isinstance(parameter, CodedWeight):
        if parameter.source is None:  # a frozen weight that exists only in FP8
            return False
        if name == "states":  # they are where the weight is
            return True
    elif not group["offload"]:
        return False
    values = local(parameter)
    has_slices = name != "states" or values.is_contiguous()  # pieces are views of the weights
    return name in group["offload"] and values.numel() >= SMALLEST and has_slices


def check_host_memory(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if the offloaded states of parameter groups do not fit into host memory."""
    offloaded = [(g, p) for g in groups for p in g["params"] if is_offloaded(g, "states", p)]
    needed, found = sum(state_bytes(g, local(p)) for g, p in offloaded), available()
    if found is not None and needed > found:
        raise ConfigError(
            f"The optimizer's states take {needed / 2**30:.1f} GiB of host memory, of which "
            f"{found / 2**30:.1f} GiB are available. Choose smaller states (preset, first_moment, "
            "second_moment, weights), or offload the states of fewer parameter groups."
        )


@dataclass
class InUse:
    """Tensors that computations read, whose memory must not be reused before `used` happens."""

    tensors: list[Tensor]
    gradient_bytes: int
    used: Any = None  # no event while more computations may be launched


class Staging:
    """The staging buffers of a device, and the streams that fill, use and empty them.

    Args:
        device: the device of the buffers.
        most_waiting: bytes of gradients that may wait for their update: about two decoder layers.
            With less than one layer the GPU would wait for the CPU.
    """

    def __init__(self, device: torch.device, most_waiting: int) -> None:
        self.device, self.most_waiting = device, most_waiting
        sizes = [STAGED_BYTES] * DEPTH
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        on_gpu = device.type == "cuda"
        self._streams: list[Any] = [
            torch.cuda.Stream(device, priority) if on_gpu else None for priority in PRIORITIES
        ]
        self._into, self._compute, self._finish, self._out = self._streams
        for buffer in self.buffers if on_gpu else ():  # their work may outlive this object
            for stream in self._streams:
                buffer.record_stream(stream)
        self._emptied: list[Any] = [None] * DEPTH
        self._in_use: deque[InUse] = deque()

    def allocate(self, buffer: int, like: Iterable[Tensor]) -> list[Tensor]:
        """Return views of a buffer with the shapes and dtypes of other tensors."""
        found, used = [], 0
        for x in like:
            size = x.numel() * x.itemsize
            part = self.buffers[buffer][used : used + size]
            found.append(part.view(x.dtype).view(x.shape))
            used += -(-size // ALIGNMENT) * ALIGNMENT
        return found

    def begin(self, values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> None:
        """Make computations wait for all work launched so far.

        They read `values` and `gradients`. At most `most_waiting` bytes of gradients may wait; the
        current stream waits for earlier computations if there are more.
        """
        if self._compute is None:
            return
        size = sum(x.numel() * x.itemsize for x in gradients)
        stream = torch.cuda.current_stream(self.device)
        if self._in_use:
            self._in_use[-1].used = self._compute.record_event()
        total = size + sum(each.gradient_bytes for each in self._in_use)
        # After the wait the memory can be reused on this stream at once, however far the CPU is
        # ahead. With record_stream the CPU would have to see that the computation has ended.
        while total > self.most_waiting and self._in_use:
            oldest = self._in_use.popleft()
            stream.wait_event(oldest.used)
            total -= oldest.gradient_bytes
        self._compute.wait_stream(stream)
        self._in_use.append(InUse([x for x in (*values, *gradients) if x.is_cuda], size))

    def release(self) -> None:
        """Drop the references to values and gradients; their memory is reused after its use."""
        while self._in_use:
            for x in self._in_use.popleft().tensors:
                x.record_stream(self._compute)

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which launches go to the stream of computations."""
        return _on(self._compute)

    def run(
        self,
        buffer: int,
        into: Copies,
        compute: Callable[[], object],
        out: Copies,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Launch copies into a buffer, a computation, and copies out of the buffer.

        Args:
            buffer: index of the buffer.
            into: copies before the computation.
            compute: launches the computation.
            out: copies after it.
            finish: launches a second kernel, which overlaps the computation of the next piece.
        """
        if self._emptied[buffer] is not None:
            self._into.wait_event(self._emptied[buffer])
        _copy(into, self._into)
        last = self._into
        for stream, launch in ((self._compute, compute), (self._finish, finish)):
            if launch is not None:
                _wait(stream, last)
                with _on(stream):
                    launch()
                last = stream
        _wait(self._out, last)
        _copy(out, self._out)
        self._emptied[buffer] = None if self._out is None else self._out.record_event()

    def join(self) -> None:
        """Make the current stream wait for all computations launched so far."""
        if self._compute is not None:
            for stream in (self._compute, self._finish):
                torch.cuda.current_stream(self.device).wait_stream(stream)
            self.release()

    def abandon(self) -> None:
        """Wait on the CPU until all launched work has ended, and drop all references."""
        for stream in self._streams:
            if stream is not None:
                stream.synchronize()
        self._in_use.clear()

    def synchronize(self) -> None:
        """Wait on the CPU until all copies to the host have ended."""
        if self._out is not None:
            self._out.synchronize()


def _copy(pairs: Copies, stream: Any) -> None:
    with _on(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=stream is not None)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(later: Any, earlier: Any) -> None:
    if later is not None:
        later.wait_stream(earlier)


def largest_piece(bytes_per_element: float, multiple: int) -> int:
    """Return how many elements fit into a staging buffer, rounded down to a multiple."""
    room = STAGED_BYTES - 16 * ALIGNMENT
    return max(1, math.floor(room / bytes_per_element) // multiple) * multiple
