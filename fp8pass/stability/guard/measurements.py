"""Measurements of a training, copied to the host without waiting for the device.

`ParameterNorms` measures parameters, their gradients and their changes. `LossScale` divides
gradient norms by the factor of a `GradScaler`. `Readings` collects numbers on the device for some
steps, copies them to the host together, and returns them in a later step, when the copy is
complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fp8pass import compat, graph
from fp8pass.optim.optimizer import Optimizer
from fp8pass.optim.shards import find_quantized, local, whole
from fp8pass.stability.guard.past import Numbers

SAMPLE = 1024  # maximum number of elements that are sampled from a parameter
ABSENT = -1.0  # replaces a number that does not exist


class ParameterNorms:
    """Norms of the trained parameters of a model, of their gradients, and of their changes.

    The change of a parameter since the last measurement is computed from up to `SAMPLE` evenly
    spread elements. Therefore only these elements are copied, not all weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = trained_names(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # Module path and parameter name of each trained parameter.
        split = (graph.clean_path(name).rpartition(".") for name in self.trained)
        self.names = [(module, name) for module, _, name in split]
        self.gradients_seen = False  # whether the last measurement found a gradient
        self._before: list[Tensor] = []

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return fp32 [3, parameters]: norms of weights and of gradients, and relative changes.

        Norms of missing gradients, and changes in the first measurement, are `ABSENT`. Norms of a
        sharded weight are norms of this rank's shard. For quantized weights, the scales of their
        rows are measured, because the weights may be in host memory or are being copied there.
        """
        quantized = [find_quantized(p) for p in self.parameters]
        weights = [
            local(p) if q is None else q.scales
            for p, q in zip(self.parameters, quantized, strict=True)
        ]
        samples = [_take_sample(w) for w in weights]
        absent = weights[0].new_full((), ABSENT, dtype=torch.float32)
        changes = [absent] * len(samples)
        if self._before:
            moved = compat.foreach_sub(samples, self._before)
            pairs = zip(_compute_norms(moved), _compute_norms(samples), strict=True)
            changes = [change / size for change, size in pairs]
        self._before = [sample.clone() for sample in samples]
        rows = _compute_norms(weights), self._measure_gradients(absent), changes
        device = absent.device
        return torch.stack(
            [torch.stack([x.to(device, non_blocking=True) for x in row]) for row in rows]
        )

    def forget(self) -> None:
        """Drop the last samples. Call after a rollback.

        Then the next measurement reports no changes since the previous measurement.
        """
        self._before = []

    def _measure_gradients(self, absent: Tensor) -> list[Tensor]:
        gradients = [p.grad for p in self.parameters]
        dense = [local(g) for g in gradients if g is not None and not g.is_sparse]
        self.gradients_seen = bool(dense)
        norms = iter(_compute_norms(dense))
        return [absent if g is None or g.is_sparse else next(norms) for g in gradients]


def trained_names(model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


def _compute_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        return []
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    wide = any(x.dtype == torch.float64 for x in real)  # PyTorch refuses to reduce fp64 in fp32
    dtype = torch.float64 if wide else torch.float32
    return [x.float() for x in compat.foreach_norm(real, 2, dtype=dtype)]


def _take_sample(weight: Tensor) -> Tensor:
    elements = weight.detach().reshape(-1)
    return elements[:: max(1, elements.numel() // SAMPLE)][:SAMPLE]


class LossScale:
    """The factor of `torch.amp.GradScaler` by which gradients are still multiplied after a step.

    GradScaler divides gradients before the step, unless the optimizer has the attribute
    `_step_supports_amp_scaling`. For such an optimizer, GradScaler stores the factor in
    `optimizer.grad_scale`, and a nonzero `optimizer.found_inf` if a gradient is not finite. Fused
    optimizers of PyTorch divide finite gradients in place. Optimizers of fp8pass do not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._factor: Tensor | None = None
        self._skipped: Tensor | None = None
        self._optimizer = optimizer
        self._leaves_factor = isinstance(optimizer, Optimizer)
        self.handle = optimizer.register_step_pre_hook(self._read)

    def unscale(self, norms: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Divide the gradient norms of the optimizer's parameters by the factor.

        If the step was skipped, these norms become `ABSENT`. Norms of other `parameters` do not
        change.
        """
        if self._factor is None and self._skipped is None:
            return norms
        mine = {p for group in self._optimizer.param_groups for p in group["params"]}
        chosen = torch.tensor([p in mine for p in parameters])
        chosen = chosen.to(norms.device, non_blocking=True) & (norms != ABSENT)
        if self._factor is not None:
            norms = torch.where(chosen, norms / self._factor.to(norms.device), norms)
        if self._skipped is not None:
            chosen &= self._skipped.to(norms.device) != 0
            norms = torch.where(chosen, ABSENT, norms)
        return norms

    def _read(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factor = getattr(optimizer, "grad_scale", None)
        self._factor = factor if self._leaves_factor else None
        self._skipped = getattr(optimizer, "found_inf", None)


@dataclass(frozen=True)
class Reading:
    """Measurements of the steps since the previous reading, on the host."""

    step: int  # the last of these steps
    losses: Numbers  # of the steps for which a loss was passed
    gradient_norms: Numbers  # of the steps for which a norm was passed
    norms: Numbers  # result of `ParameterNorms.measure` in the last step, [3, parameters]


@dataclass(frozen=True)
class _Transfer:
    """Numbers that are being copied to the host."""

    step: int
    losses: list[Tensor | float]
    gradient_norms: list[Tensor | float]
    norms: int  # number of elements of the result of `ParameterNorms.measure`
    host: Tensor  # the copy: the norms, then the tensors in the lists
    arrival: torch.cuda.Event | None  # the end of the copy; None if the numbers are on the host


class Readings:
    """Collects numbers on the device, and returns them when they have arrived on the host."""

    def __init__(self) -> None:
        self._losses: list[Tensor | float] = []
        self._gradient_norms: list[Tensor | float] = []
        self._transfers: deque[_Transfer] = deque()

    def add(self, loss: Tensor | float | None, gradient_norm: Tensor | float | None) -> None:
        """Add the numbers of a step. Tensors are copied, because a CUDA graph may overwrite them.

        Raises:
            ValueError: a tensor has more or less than one element.
        """
        for value, values in ((loss, self._losses), (gradient_norm, self._gradient_norms)):
            if isinstance(value, Tensor):
                value = whole(value)
                if value.numel() != 1:
                    raise ValueError(
                        "Guard takes the loss and the gradient norm of a step as one number each, "
                        f"got a tensor of shape {tuple(value.shape)}. Pass its mean."
                    )
                values.append(value.detach().to(torch.float32, copy=True))
            elif value is not None:
                values.append(float(value))

    def send(self, step: int, norms: Tensor) -> None:
        """Start to copy the added numbers, and `norms` of this step, to the host."""
        values = norms, *self._losses, *self._gradient_norms
        tensors = [x for x in values if isinstance(x, Tensor)]
        parts = [x.to(norms.device, non_blocking=True).reshape(-1) for x in tensors]
        copied = _start_copy(torch.cat(parts))
        sent = _Transfer(step, self._losses, self._gradient_norms, norms.numel(), *copied)
        self._transfers.append(sent)
        self._losses, self._gradient_norms = [], []

    def collect(self) -> Iterator[Reading]:
        """Yield the readings that have arrived on the host, without waiting for more."""
        while self._transfers:
            sent = self._transfers[0]
            if sent.arrival is not None and not sent.arrival.query():
                return
            self._transfers.popleft()
            norms, others = np.split(np.asarray(sent.host, dtype=float), [sent.norms])
            arrived = iter(others)
            losses, gradient_norms = (
                np.array([next(arrived) if isinstance(x, Tensor) else x for x in values])
                for values in (sent.losses, sent.gradient_norms)
            )
            yield Reading(sent.step, losses, gradient_norms, norms.reshape(3, -1))

    def drop(self) -> None:
        """Drop numbers that were not collected. Call this if other weights were measured."""
        self._losses, self._gradient_norms = [], []
        self._transfers.clear()


def _start_copy(x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start to copy `x` to host memory. Return the copy, and the event at its end."""
    if x.device.type != "cuda":
        return x, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return host, arrival
