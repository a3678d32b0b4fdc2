"""What a guard measures in each step, on its device until it has arrived on the host by itself.

Losses and gradient norms are kept on the device for some steps, and then copied together, without
waiting: the copy is read in a later step, when it is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fp8pass.optim.shards import whole
from fp8pass.stability.guard.history import Numbers


@dataclass(frozen=True)
class Reading:
    """What was measured in some steps.

    Attributes:
        step: the last of them.
        losses: of the steps in which one was given.
        gradient_norms: the same, of the norms that were given.
        norms: [3, parameters], see `Norms.measure`, at the last of the steps.
    """

    step: int
    losses: Numbers
    gradient_norms: Numbers
    norms: Numbers


@dataclass(frozen=True)
class _Sent:
    step: int
    losses: int
    numbers: Numbers  # NaN in place of those on the device
    on_device: list[int]
    host: Tensor
    arrival: torch.cuda.Event | None

    @property
    def has_arrived(self) -> bool:
        return self.arrival is None or self.arrival.query()


class Readings:
    """Collects numbers on the device, and reads them when they have arrived."""

    def __init__(self) -> None:
        self._losses: list[Tensor | float] = []
        self._gradient_norms: list[Tensor | float] = []
        self._sent: deque[_Sent] = deque()

    def add(self, loss: Tensor | float | None, gradient_norm: Tensor | float | None) -> None:
        """Note the numbers of a step. A tensor is copied: a CUDA graph will write to it again.

        Raises:
            ValueError: a tensor has not one element.
        """
        for value, noted in ((loss, self._losses), (gradient_norm, self._gradient_norms)):
            if isinstance(value, Tensor):
                value = whole(value)
                if value.numel() != 1:
                    raise ValueError(
                        "A guard takes the loss and the gradient norm of a step as one number "
                        f"each, got a tensor of shape {tuple(value.shape)}: give its mean."
                    )
                noted.append(value.detach().to(torch.float32, copy=True))
            elif value is not None:
                noted.append(float(value))

    def send(self, step: int, norms: Tensor) -> None:
        """Begin to copy what was noted to the host, with the norms of this step."""
        noted = [*self._losses, *self._gradient_norms]
        on_device = [i for i, x in enumerate(noted) if isinstance(x, Tensor)]
        numbers = np.array([math.nan if isinstance(x, Tensor) else x for x in noted])
        parts = [norms, *(x for x in noted if isinstance(x, Tensor))]
        parts = [x.to(norms.device, non_blocking=True).reshape(-1) for x in parts]
        host, arrival = _on_its_way(torch.cat(parts))
        self._sent.append(_Sent(step, len(self._losses), numbers, on_device, host, arrival))
        self._losses, self._gradient_norms = [], []

    def arrived(self) -> Iterator[Reading]:
        """What has arrived on the host since; waits for nothing."""
        while self._sent and self._sent[0].has_arrived:
            sent = self._sent.popleft()
            found = np.asarray(sent.host, dtype=float)
            norms = found[: len(found) - len(sent.on_device)]
            sent.numbers[sent.on_device] = found[len(norms) :]
            losses, gradient_norms = np.split(sent.numbers, [sent.losses])
            yield Reading(sent.step, losses, gradient_norms, norms.reshape(3, -1))

    def drop(self) -> None:
        """Forget what has not been read: it was measured with other weights."""
        self._losses, self._gradient_norms = [], []
        self._sent.clear()


def _on_its_way(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what tells that it is there."""
    if x.device.type != "cuda":
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return host, arrival
