"""Launch a Triton kernel repeatedly with little CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat


class Launcher:
    """Caches the compiled versions of a Triton kernel.

    Triton's own lookup of a version takes longer than a launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[float],
        constants: Sequence[Any],
    ) -> None:
        """Launch the kernel on the current stream.

        The kernel takes the tensors, then the numbers, then the constants. Triton compiles separate
        versions for aligned tensors and for some numbers, such as 1, so the key of a version
        contains alignments and numbers.
        """
        layout = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        device = tensors[0].device
        key = device, layout, *numbers, *constants
        with torch.cuda.device_of(tensors[0]):
            if (compiled := self._compiled.get(key)) is not None:
                # Passing the stream saves two queries of Triton's driver.
                stream = compat.stream_of(device)
                compiled[grid](*tensors, *numbers, *constants, stream=stream)
            else:
                self._compiled[key] = self.kernel[grid](*tensors, *numbers, *constants)
