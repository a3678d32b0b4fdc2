"""Bytes of a model's parameters, gradients and optimizer states, on the GPU and on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8pass.optim.backward import default_buffer
from fp8pass.optim.group_options import PRESETS, state_bytes
from fp8pass.optim.offload import DEPTH, STAGED_BYTES, is_offloaded, layers_to_code
from fp8pass.optim.optimizer import WAITING
from fp8pass.optim.state_formats import SUM_GROUP_SIZE, moment_format
from fp8pass.option_checks import ConfigError
from fp8pass.tools.fitting.setup import Setup
from fp8pass.weights.quantized_parameter import QuantizedWeight

GROUP: Mapping[str, Any] = {"group_size": 128, **PRESETS["coat"]}


@dataclass
class Standing:
    """Bytes that are allocated during the whole step, on the GPU or on the host."""

    weights: float = 0.0  # weights and buffers; the FP8 data of an offloaded weight is on the GPU
    states: float = 0.0
    sums: float = 0.0  # sums of gradients over micro-batches
    staging: float = 0.0  # GPU buffers through which offloaded data is copied


class Parameters:
    """The parameters of a model.

    Attributes:
        movable: the weights that `offload_weights` can move to the host.
        why_not_movable: why `offload_weights` cannot move weights; '' if it can.
        gradient_bytes: bytes of all gradients.

    Raises:
        ConfigError: a parameter is sharded, or the optimizer does not support its dtype.
    """

    def __init__(self, module: nn.Module) -> None:
        self.all = list(dict.fromkeys(module.parameters()))
        self.trained = [p for p in self.all if p.requires_grad]
        self.buffer_bytes = sum(x.numel() * x.itemsize for x in dict.fromkeys(module.buffers()))
        self.gradient_bytes = float(sum(p.numel() * p.itemsize for p in self.trained))
        self.movable, self.why_not_movable = frozenset[Tensor](), ""
        try:
            self.movable = frozenset(layers_to_code(module, ()))
        except ConfigError as error:
            self.why_not_movable = str(error)

    def place(self, setup: Setup, accumulate: int) -> tuple[Standing, Standing]:
        """Return the bytes that are allocated during the whole step, on the GPU and on the host."""
        gpu, host = Standing(weights=self.buffer_bytes), Standing()
        group = {"offload": setup.offload}
        stored = moment_format(default_buffer(accumulate), signed=True).storage_dtype
        bytes_per_sum = stored.itemsize + 2 / SUM_GROUP_SIZE
        for p in self.all:
            size = (
                p.fp8_data.nbytes + p.scales.nbytes if isinstance(p, QuantizedWeight) else p.nbytes
            )
            if is_moved := "weights" in setup.offload and p in self.movable:
                gpu.weights += p.numel() + 4 * p.shape[0]  # E4M3 and one FP32 scale per row
                host.weights += size
            else:
                gpu.weights += size
            if p.requires_grad:
                on_host = is_moved or is_offloaded(group, "states", p)
                (host if on_host else gpu).states += state_bytes(GROUP, p)
                if accumulate > 1 and setup.step_in_backward:
                    on_host = is_offloaded(group, "gradients", p)
                    (host if on_host else gpu).sums += p.numel() * bytes_per_sum
                elif accumulate > 1:
                    gpu.sums += size
        if setup.offload:
            gpu.staging = DEPTH * STAGED_BYTES
        return gpu, host

    def held_gradients(self, setup: Setup, accumulate: int) -> float:
        """Return the bytes of gradients that may wait for the optimizer during the backward."""
        if not setup.step_in_backward:
            # With several micro-batches, gradients are added to sums, which `place` counts.
            return math.inf if accumulate == 1 else 0.0
        return sum(p.numel() * p.itemsize for p in self.all) // WAITING if setup.offload else 0.0
