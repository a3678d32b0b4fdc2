"""Launching a Triton kernel again and again with little work for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat


class Launcher:
    """A Triton kernel that is launched as it was compiled, for arguments like ones before.

    Triton takes longer to find which of its compiled kernels it is than to launch it.
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
        """Launch it on the current stream; its parameters are in this order.

        Triton compiles for alignment and for some values of numbers: for each here.
        """
        about = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        device = tensors[0].device
        key = device, about, *numbers, *constants
        with torch.cuda.device_of(tensors[0]):
            if (compiled := self._compiled.get(key)) is not None:
                # Which it would ask its driver for, and before that for the device.
                stream = compat.stream_of(device)
                compiled[grid](*tensors, *numbers, *constants, stream=stream)
            else:
                self._compiled[key] = self.kernel[grid](*tensors, *numbers, *constants)
