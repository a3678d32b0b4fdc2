"""Buffers on a GPU through which values of the host are computed with, a piece at a time.

While one piece is computed with, the next is copied in and the one before out, on streams of their
own: both ways of the link are in use (LLMQ 3.1, double buffering). Kernels that read the host's
memory directly (zero-copy) are not implemented: LLMQ measured them slower on an RTX 5060 Ti and an
RTX 4090, but faster on an L40S.

A computation gets a share of the GPU when a GEMM of the model ends, and the one behind it on its
stream when the next GEMM does. So computations go before those of the model, and the second of a
piece has a stream of its own: it starts beside the first of the next piece.

    copies in    | piece 0 | piece 1 | piece 2 |         |
    computation            | piece 0 | piece 1 | piece 2 |
    second kernel               | piece 0 | piece 1 | piece 2 |
    copies out                       | piece 0 | piece 1 | piece 2 |

Nothing waits on the CPU, which goes on to launch what gives the next gradients: the GPU would have
nothing else to do while pieces are on their way. Where too many gradients wait for their turn, the
GPU computes no more of them until the first ones are used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Buffers: for a piece that is copied in, one that is computed with, and one that is copied out.
DEPTH = 3
# Of a buffer: a square weight of hidden 4096 with its states. To launch a piece takes the CPU as
# long as the link takes for a fifth of it.
STAGED_BYTES = 96 << 20
ALIGNMENT = 512
# Of the streams that copy in, compute, finish, and copy out: smaller numbers go first.
PRIORITIES = (0, -1, -1, 0)

Copies = Sequence[tuple[Tensor, Tensor]]  # from, to


@dataclass
class Held:
    """What computations use that were begun at once: its memory is not to be used again before.

    Attributes:
        tensors: values and gradients.
        size: bytes of the gradients.
        used: when the computations end; None while more of them may be launched.
    """

    tensors: list[Tensor]
    size: int
    used: Any = None


class Staging:
    """The buffers of a device, and the streams that fill, use and empty them.

    Args:
        device: where they are.
        most_waiting: bytes of gradients that may wait for their turn: those of two decoder layers
            or so. With those of less than one layer the GPU would wait for the CPU.
    """

    def __init__(self, device: torch.device, most_waiting: int) -> None:
        self.device, self.most_waiting = device, most_waiting
        sizes = [STAGED_BYTES] * DEPTH
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        on_gpu = device.type == "cuda"
        self._streams: list[Any] = [
            torch.cuda.Stream(device, priority) if on_gpu else None for priority in PRIORITIES
        ]
        self._into: Any
        self._compute: Any
        self._finish: Any
        self._out: Any
        self._into, self._compute, self._finish, self._out = self._streams
        for buffer in self.buffers if on_gpu else ():  # they outlive what runs on these
            for stream in self._streams:
                buffer.record_stream(stream)
        self._emptied: list[Any] = [None] * DEPTH
        self._held: deque[Held] = deque()

    def place(self, buffer: int, like: Iterable[Tensor]) -> list[Tensor]:
        """Tensors in a buffer that have the shapes and dtypes of others."""
        found, used = [], 0
        for x in like:
            size = x.numel() * x.itemsize
            part = self.buffers[buffer][used : used + size]
            found.append(part.view(x.dtype).view(x.shape))
            used += padded(size)
        return found

    def begin(self, values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> None:
        """Have computations wait for all that was launched so far.

        They use `values` and `gradients`, and of the latter only so many may wait.
        """
        if self._compute is None:
            return
        size = sum(x.numel() * x.itemsize for x in gradients)
        self._make_room(size)
        self._compute.wait_stream(torch.cuda.current_stream(self.device))
        self._held.append(Held([x for x in (*values, *gradients) if x.is_cuda], size))

    def _make_room(self, size: int) -> None:
        """Have the GPU wait until `size` bytes of gradients are no more than may wait.

        What is let go here is free for what this stream computes next, however far the CPU is
        ahead. It would have to see it used if the memory were only marked as another stream's.
        """
        if self._held:
            self._held[-1].used = self._compute.record_event()
        total = size + sum(held.size for held in self._held)
        while total > self.most_waiting and self._held:
            held = self._held.popleft()
            torch.cuda.current_stream(self.device).wait_event(held.used)
            total -= held.size

    def let_go(self) -> None:
        """Hold on to nothing more; memory is free for others when it has been used."""
        while self._held:
            for x in self._held.popleft().tensors:
                x.record_stream(self._compute)

    def computing(self) -> AbstractContextManager[Any]:
        """What is launched within is ordered with other computations."""
        return _on(self._compute)

    def run(
        self,
        buffer: int,
        into: Copies,
        compute: Callable[[], object],
        out: Copies,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Copy into a buffer, compute, and copy out of it; returns when that has been launched.

        `finish` is the rest of the computation, which no other piece's has to wait for.
        """
        if self._emptied[buffer] is not None:
            self._into.wait_event(self._emptied[buffer])
        _copy(into, self._into)
        last = self._then(self._into, self._compute, compute)
        if finish is not None:
            last = self._then(last, self._finish, finish)
        _follow(self._out, last)
        self._emptied[buffer] = _copy(out, self._out)

    @staticmethod
    def _then(earlier: Any, stream: Any, compute: Callable[[], object]) -> Any:
        """Compute on a stream, behind what another has launched; that stream."""
        _follow(stream, earlier)
        with _on(stream):
            compute()
        return stream

    def join(self) -> None:
        """Have what is launched from now on wait for all that was begun."""
        if self._compute is not None:
            for stream in (self._compute, self._finish):
                torch.cuda.current_stream(self.device).wait_stream(stream)
            self.let_go()

    def abandon(self) -> None:
        """Wait until all that was begun is done, and hold on to nothing; from any stream."""
        for stream in self._streams:
            if stream is not None:
                stream.synchronize()
        self._held.clear()

    def synchronize(self) -> None:
        """Wait until everything has arrived on the host."""
        if self._out is not None:
            self._out.synchronize()


def _copy(pairs: Copies, stream: Any) -> Any:
    """Copy on a stream; an event for when that is done, if there are streams."""
    with _on(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=stream is not None)
    return None if stream is None else stream.record_event()


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _follow(later: Any, earlier: Any) -> None:
    if later is not None:
        later.wait_stream(earlier)


def padded(size: int) -> int:
    """Bytes of a tensor of `size` bytes in a buffer."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def largest_piece(bytes_per_element: float, multiple: int) -> int:
    """How many elements of so many bytes fit into a buffer, as a multiple of `multiple`."""
    room = STAGED_BYTES - 16 * ALIGNMENT
    return max(1, math.floor(room / bytes_per_element) // multiple) * multiple
