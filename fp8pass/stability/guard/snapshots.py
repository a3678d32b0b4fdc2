"""Weights and optimizer states of steps that were good, in the memory of the host.

    step      0 ── quiet steps ── 100 ── quiet steps ── 200 ── alarm
    trial     copy of 0            copy of 100            copy of 200, dropped
    good                           that of 0              that of 100

A copy is on trial until so many steps after it were quiet: what breaks a run may be in its weights
before the loss shows it. The two copies take turns in two sets of buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.optim.adamw import AdamW
from fp8pass.optim.shards import local
from fp8pass.runtime.arena import Arena

# Of a parameter or a buffer, `model` and its name; of a state, its parameter's number and its name.
Key = tuple[str | int, str]


@dataclass
class Snapshot:
    """A copy of all tensors of a training.

    Attributes:
        step: optimizer steps that had been done.
        tensors: copies on the host.
        values: states that are no tensors.
    """

    step: int = 0
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)

    @torch.no_grad()
    def take(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy a training, into the same memory as before."""
        tensors, self.values = _live(model, optimizer)
        before, self.step, self.tensors = self.tensors, step, {}
        arenas: dict[torch.device, Arena] = {}
        for key, x in tensors.items():
            host = before.get(key)
            if host is None or (host.shape, host.dtype) != (x.shape, x.dtype):
                arena = arenas.setdefault(x.device, Arena(x.device))
                host = arena.empty(x.shape, x.dtype)
            self.tensors[key] = host.copy_(x, non_blocking=True)

    @torch.no_grad()
    def add(self, model: nn.Module, names: Collection[str]) -> None:
        """Copy parameters that were frozen until now, and so are those of this step."""
        for name, parameter in model.named_parameters():
            if name in names and ("model", name) not in self.tensors:
                x = local(parameter).detach()
                self.tensors["model", name] = Arena(x.device).empty(x.shape, x.dtype).copy_(x)

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set a training to this copy, bit for bit; options of the optimizer stay as they are.

        Frozen parameters, and what the model has got since, stay as they are, too.
        """
        tensors, _ = _live(model, optimizer)
        if tensors.keys() != self.tensors.keys():
            self._load_states(optimizer)  # some parameters got their first gradient since
            tensors, _ = _live(model, optimizer)
        for key in tensors.keys() & self.tensors.keys():
            tensors[key].copy_(self.tensors[key], non_blocking=True)
        _set_values(optimizer, self.values)
        if isinstance(optimizer, AdamW):
            optimizer.prepare_again()

    def _load_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer the states that it had, in whatever memory."""
        live = optimizer.state_dict()
        kept = {index for index, _ in self.tensors if isinstance(index, int)}
        states = {index: state for index, state in live["state"].items() if index in kept}
        optimizer.load_state_dict({**live, "state": copy.deepcopy(states)})


class Snapshots:
    """The last good copy of a training, and one on trial.

    Args:
        quiet: steps without an alarm after which a copy is good.
    """

    def __init__(self, quiet: int) -> None:
        self.quiet = quiet
        self.good: Snapshot | None = None
        self._trial: Snapshot | None = None
        self._spare: Snapshot | None = None

    def tend(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After a quiet step: take a copy if none is on trial, and trust the one that was."""
        trial = self._trial
        if trial is not None:
            if step - trial.step < self.quiet:
                return
            self._spare, self.good = self.good, trial
        self._trial = self._spare or Snapshot()
        self._spare = None
        self._trial.take(step, model, optimizer)

    def add(self, model: nn.Module, names: Collection[str]) -> None:
        """Copy parameters that are trained from the next step on."""
        for snapshot in (self.good, self._trial):
            if snapshot is not None:
                snapshot.add(model, names)

    def keep(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a copy that is good."""
        self.distrust()
        self._spare, self.good = self.good, self._spare or Snapshot()
        self.good.take(step, model, optimizer)

    def distrust(self) -> None:
        """After an alarm: drop the copy on trial."""
        if self._trial is not None:
            self._spare, self._trial = self._trial, None


def _live(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[Key, Tensor], dict[Key, Any]]:
    """The tensors of a training, and other states."""
    tensors: dict[Key, Tensor] = {}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, x in (*trained, *model.named_buffers()):
        tensors["model", name] = local(x).detach()
    values: dict[Key, Any] = {}
    # As a checkpoint, so that what is on its way to the host has arrived there.
    for index, state in optimizer.state_dict()["state"].items():
        for name, x in state.items():
            if isinstance(x, Tensor):
                tensors[index, name] = local(x)
            else:
                values[index, name] = copy.copy(x)
    return tensors, values


def _set_values(optimizer: torch.optim.Optimizer, values: dict[Key, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for (index, name), value in values.items():
        optimizer.state[parameters[int(index)]][name] = value
