"""Buffers on a GPU through which values of the host are computed with, a piece at a time.

While one piece is computed with, the next is copied in and the one before out, on streams of their
own: both ways of the link are in use (LLMQ 3, double buffering). A kernel that reads the host's
memory by itself takes twice as long on an H200 (`benchmarks/small_gpu.py`).

    copies in    | piece 0 | piece 1 | piece 2 |         |
    computation            | piece 0 | piece 1 | piece 2 |
    copies out                       | piece 0 | piece 1 | piece 2 |

Buffers are waited for on the GPU. The CPU goes on to launch what gives the next gradients, or the
GPU would have nothing else to do while pieces are on their way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Buffers: for a piece that is copied in, one that is computed with, and one that is copied out.
DEPTH = 3
# Pieces that may wait for their turn, and hold on to gradients: those of about one decoder layer.
PENDING = 12
# Of a buffer: a square weight of hidden 4096 with its states. To launch a piece takes the CPU as
# long as the link takes for a fifth of it.
STAGED_BYTES = 96 << 20
ALIGNMENT = 512

Copies = Sequence[tuple[Tensor, Tensor]]  # from, to


class Staging:
    """The buffers of a device, and the streams that fill, use and empty them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        sizes = [STAGED_BYTES] * DEPTH
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        on_gpu = device.type == "cuda"
        streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(3)]
        self._into: Any = streams[0]
        self._compute, self._out = streams[1:]
        self._emptied: list[Any] = [None] * DEPTH
        self._pending: deque[Any] = deque()

    def place(self, buffer: int, like: Iterable[Tensor]) -> list[Tensor]:
        """Tensors in a buffer that have the shapes and dtypes of others."""
        found, used = [], 0
        for x in like:
            size = x.numel() * x.itemsize
            part = self.buffers[buffer][used : used + size]
            found.append(part.view(x.dtype).view(x.shape))
            used += padded(size)
        return found

    def begin(self, values: Iterable[Tensor]) -> None:
        """Have computations wait for all that was launched so far, of which they use `values`."""
        if self._compute is not None:
            self._compute.wait_stream(torch.cuda.current_stream(self.device))
            for x in values:  # its memory is not to be used again before
                if x.is_cuda:
                    x.record_stream(self._compute)

    def computing(self) -> AbstractContextManager[Any]:
        """What is launched within is ordered with other computations."""
        return nullcontext() if self._compute is None else torch.cuda.stream(self._compute)

    def run(self, buffer: int, into: Copies, compute: Callable[[], object], out: Copies) -> None:
        """Copy into a buffer, compute, and copy out of it; returns when that has been launched."""
        self._wait_for_room(buffer)
        _copy(into, self._into)
        _follow(self._compute, self._into)
        with self.computing():
            compute()
        _follow(self._out, self._compute)
        if (emptied := _copy(out, self._out)) is not None:
            self._emptied[buffer] = emptied
            self._pending.append(emptied)

    def _wait_for_room(self, buffer: int) -> None:
        """Have copies wait for the buffer, and the CPU until few pieces are on their way."""
        if self._emptied[buffer] is not None:
            self._into.wait_event(self._emptied[buffer])
        while len(self._pending) >= PENDING:
            self._pending.popleft().synchronize()

    def join(self) -> None:
        """Have what is launched from now on wait for all that was begun."""
        if self._compute is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._compute)

    def synchronize(self) -> None:
        """Wait until everything has arrived on the host."""
        if self._out is not None:
            self._out.synchronize()


def _copy(pairs: Copies, stream: Any) -> Any:
    """Copy on a stream; an event for when that is done, if there are streams."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=stream is not None)
    return None if stream is None else stream.record_event()


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
