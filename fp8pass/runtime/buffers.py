"""Tensors on the host whose memory is used again, from step to step, when they are gone.

A buffer belongs to a tensor, not to a graph: several forwards may run before their backwards, a
graph may be kept for a second backward, or dropped without any. Whoever holds the tensor last,
autograd as a rule, gives the buffer back by letting go of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8pass.runtime.arena import ALIGNMENT, Arena

# Sizes of buffers are multiples of an eighth of the power of two below them: tensors of sizes that
# vary share them, at a ninth of the memory at most.
STEPS = 8


class Buffers:
    """Memory of the host for tensors that are copied from and to `device`."""

    def __init__(self, device: torch.device) -> None:
        self._taken = 0  # of the arena, in bytes
        self._arena = Arena(device)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()  # a backward has a thread of its own

    @property
    def used(self) -> int:
        """Bytes of the buffers that tensors have now."""
        return self._taken - sum(size * len(free) for size, free in self._free.items())

    def empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor with any numbers in it, in a storage of its own."""
        if 0 in shape:
            return torch.empty_strided(shape, stride, dtype=dtype)
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        size = extent * dtype.itemsize
        buffer = self._take(rounded(size))
        # Every tensor in this memory refers to the array, whoever makes it and whoever holds it.
        array = buffer.numpy()[:size]
        weakref.finalize(array, self._give_back, buffer).atexit = False
        return torch.from_numpy(array).view(dtype).as_strided(shape, stride)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            if free := self._free[size]:
                return free.pop()
            self._taken += size
            return self._arena.empty(torch.Size([size]), torch.uint8)

    def _give_back(self, buffer: Tensor) -> None:
        # Without the lock: garbage may be collected while it is held. Appending needs none.
        self._free[len(buffer)].append(buffer)


def rounded(size: int) -> int:
    """Bytes of the buffer for a tensor of `size` bytes."""
    step = max((1 << (size.bit_length() - 1)) // STEPS, ALIGNMENT)
    return -(-size // step) * step
