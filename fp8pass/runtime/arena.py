"""Pinned host memory, for copies that run concurrently with work on the GPU and the CPU.

PyTorch rounds the size of pinned memory up to a power of two, so an `Arena` divides large blocks
among tensors. Pinning takes half a second per GiB, so `Buffers` reuses memory in every step.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("fp8pass")

SMALLEST_BLOCK, LARGEST_BLOCK = 1 << 20, 1 << 30
PINNED_ALIGNMENT = 512  # bytes, the alignment of tensors on a GPU
# Tensors of similar size can use the same buffer, whose size is rounded up to a multiple of 1/8 of
# a power of two. The rounding wastes at most a ninth of the memory.
SIZE_STEPS = 8


class Arena:
    """Host memory for tensors that are copied to and from `device`, pinned if that is a GPU.

    Memory of freed tensors is not reused. A block has one dtype, because `torch.save` refuses
    tensors of several dtypes in one storage.
    """

    def __init__(self, device: torch.device) -> None:
        self.locks = device.type == "cuda"
        self._free: dict[torch.dtype, list[Tensor]] = {}  # by dtype, the unused end of each block
        self._total = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor."""
        count, multiple = math.prod(shape), PINNED_ALIGNMENT // dtype.itemsize
        padded = -(-count // multiple) * multiple
        blocks = self._free.setdefault(dtype, [])
        number = next((i for i, rest in enumerate(blocks) if len(rest) >= padded), len(blocks))
        if number == len(blocks):
            blocks.append(self._allocate(padded * dtype.itemsize).view(dtype))
        rest = blocks[number]
        blocks[number] = rest[padded:]
        return rest[:count].view(shape)

    def take(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype).copy_(x)

    def _allocate(self, least: int) -> Tensor:
        """Allocate a block of at least `least` bytes. Within limits, it doubles the arena."""
        size = max(least, min(max(self._total, SMALLEST_BLOCK), LARGEST_BLOCK))
        size = 1 << (size - 1).bit_length()
        self._total += size
        if self.locks:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.locks = False
                log.warning(
                    "Cannot pin %.1f GiB of host memory in addition to %.1f GiB (%s), so copies "
                    "are slower and block the CPU. Raise the limit of locked memory (ulimit -l), "
                    "or offload less.",
                    size / 2**30, (self._total - size) / 2**30, str(error).splitlines()[0],
                )  # fmt: skip
        return torch.empty(size, dtype=torch.uint8)


class Buffers:
    """Host memory for tensors that are copied to and from `device`. Freed memory is reused.

    A buffer belongs to a tensor, not to a graph, because several forwards may run before their
    backwards. It is reused when the last reference to the tensor, usually autograd's, is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self._taken = 0  # bytes
        self._arena = Arena(device)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()  # a backward runs on another thread

    @property
    def used(self) -> int:
        return self._taken - sum(size * len(free) for size, free in self._free.items())

    def empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return an uninitialized tensor with its own storage."""
        if 0 in shape:
            return torch.empty_strided(shape, stride, dtype=dtype)
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        size = extent * dtype.itemsize
        buffer = self._take(round_size(size))
        # Every view of this memory refers to the array. So the buffer is free when the array is
        # freed.
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
        # Garbage collection may call this function while the thread holds the lock. `append` is
        # atomic.
        self._free[len(buffer)].append(buffer)


def round_size(size: int) -> int:
    """Return the size of the buffer for a tensor of `size` bytes."""
    step = max((1 << (size.bit_length() - 1)) // SIZE_STEPS, PINNED_ALIGNMENT)
    return -(-size // step) * step


def available() -> int | None:
    """Return the bytes of available host memory, or None if the system does not report them."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) * 1024
