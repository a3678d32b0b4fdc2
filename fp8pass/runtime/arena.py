"""Memory of the host that a GPU copies from and to by itself, while it and the CPU go on.

Pages have to be locked for that, which takes half a second a GiB. PyTorch locks them in blocks of
powers of two: tensors share blocks here, so that no large part of one is left over.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("fp8pass")

SMALLEST_BLOCK, LARGEST_BLOCK = 1 << 20, 1 << 30
ALIGNMENT = 512  # bytes, as of tensors on a GPU


class Arena:
    """Memory for tensors that are copied between the host and `device`, freed all together.

    For a device that is no GPU it is memory as any other. Tensors of different dtypes share no
    block, for `torch.save` takes none that do.
    """

    def __init__(self, device: torch.device) -> None:
        self.locks = device.type == "cuda"
        self._free: dict[torch.dtype, list[Tensor]] = {}  # what is left of each block
        self._total = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with any numbers in it."""
        count, multiple = math.prod(shape), ALIGNMENT // dtype.itemsize
        padded = -(-count // multiple) * multiple
        blocks = self._free.setdefault(dtype, [])
        number = next((i for i, left in enumerate(blocks) if len(left) >= padded), len(blocks))
        if number == len(blocks):
            blocks.append(self._block(padded * dtype.itemsize).view(dtype))
        left = blocks[number]
        blocks[number] = left[padded:]
        return left[:count].view(shape)

    def take(self, x: Tensor) -> Tensor:
        """A copy of `x`."""
        return self.empty(x.shape, x.dtype).copy_(x)

    def _block(self, least: int) -> Tensor:
        """A block as large as all so far together, within limits."""
        size = max(least, min(max(self._total, SMALLEST_BLOCK), LARGEST_BLOCK))
        size = 1 << (size - 1).bit_length()
        self._total += size
        if self.locks:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.locks = False
                log.warning(
                    "The system refuses to lock %.1f GiB of the host's memory for offloading, "
                    "besides %.1f GiB (%s): copies to and from the GPU are slower, and nothing "
                    "runs beside them. Raise the limit of locked memory (ulimit -l), or offload "
                    "less.",
                    size / 2**30, (self._total - size) / 2**30, str(error).splitlines()[0],
                )  # fmt: skip
        return torch.empty(size, dtype=torch.uint8)


def available() -> int | None:
    """Bytes of memory that the host has left; None if it does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) * 1024
