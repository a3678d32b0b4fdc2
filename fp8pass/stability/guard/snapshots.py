"""Snapshots: copies of weights and optimizer states in host memory.

    step      0 ── quiet steps ── 100 ── quiet steps ── 200 ── alarm
    trial     copy of 0            copy of 100            copy of 200, dropped
    good                           copy of 0              copy of 100

A copy is on trial for `quiet` steps, because weights may be broken before the loss rises. If no
alarm follows in these steps, the copy is good. The good copy and the copy on trial use two sets of
buffers in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.optim.optimizer import Optimizer
from fp8pass.optim.shards import local
from fp8pass.runtime.arena import Arena

# The number of an optimizer, the index of a parameter, and the name of a state.
StateKey = tuple[int, int, str]
# Parameters and buffers have the key ("model", name).
Key = tuple[str, str] | StateKey


@dataclass
class Snapshot:
    """A copy of the weights, buffers and optimizer states of a training."""

    step: int = 0  # optimizer steps done before the copy
    tensors: dict[Key, Tensor] = field(default_factory=dict)  # in host memory
    values: dict[StateKey, Any] = field(default_factory=dict)  # states that are not tensors

    @torch.no_grad()
    def take(self, step: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Copy weights, buffers and optimizer states into this snapshot. Reuse its host memory."""
        tensors, self.values = _collect_tensors(model, optimizers)
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
        """Add parameters that were frozen until now. They have not changed since the snapshot."""
        for name, parameter in model.named_parameters():
            if name in names and ("model", name) not in self.tensors:
                x = local(parameter).detach()
                self.tensors["model", name] = Arena(x.device).take(x)

    @torch.no_grad()
    def restore(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Restore weights, buffers and optimizer states bit for bit.

        This does not change options of the optimizers, frozen parameters, or tensors that were
        created after the snapshot.
        """
        tensors, _ = _collect_tensors(model, optimizers)
        if tensors.keys() != self.tensors.keys():
            for number, optimizer in enumerate(optimizers):
                self._load_states(number, optimizer)  # some states are newer than the snapshot
            tensors, _ = _collect_tensors(model, optimizers)
        for key in tensors.keys() & self.tensors.keys():
            tensors[key].copy_(self.tensors[key], non_blocking=True)
        parameters = [[p for group in x.param_groups for p in group["params"]] for x in optimizers]
        for (number, index, name), value in self.values.items():
            optimizers[number].state[parameters[number][index]][name] = copy.copy(value)
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.prepare_again()

    def _load_states(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Drop optimizer states of parameters that had no state in the snapshot."""
        live = optimizer.state_dict()
        known = {index for of, index, *_ in self.tensors if of == number}
        states = {index: state for index, state in live["state"].items() if index in known}
        optimizer.load_state_dict({**live, "state": copy.deepcopy(states)})


class Snapshots:
    """The last good copy of a training, and a newer copy on trial."""

    def __init__(self, quiet: int) -> None:
        self.quiet = quiet  # steps without an alarm after which a copy on trial is good
        self.good: Snapshot | None = None
        self._trial: Snapshot | None = None
        self._spare: Snapshot | None = None

    def tend(self, step: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Take a new copy if no copy is on trial, or if the copy on trial has become good.

        Called after each step without an alarm.
        """
        trial = self._trial
        if trial is not None:
            if step - trial.step < self.quiet:
                return
            self._spare, self.good = self.good, trial
        self._trial = self._spare or Snapshot()
        self._spare = None
        self._trial.take(step, model, *optimizers)

    def add(self, model: nn.Module, names: Collection[str]) -> None:
        """Add the parameters `names` to both copies if they were frozen until now."""
        for snapshot in (self.good, self._trial):
            if snapshot is not None:
                snapshot.add(model, names)

    def keep(self, step: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Take a copy and mark it as good immediately, without a trial."""
        self.distrust()
        self._spare, self.good = self.good, self._spare or Snapshot()
        self.good.take(step, model, *optimizers)

    def distrust(self) -> None:
        """Drop the copy on trial. Called after an alarm."""
        if self._trial is not None:
            self._spare, self._trial = self._trial, None


def _collect_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[Key, Tensor], dict[StateKey, Any]]:
    """Return all tensors of a snapshot, and the optimizer states that are not tensors."""
    tensors: dict[Key, Tensor] = {}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, x in (*trained, *model.named_buffers()):
        tensors["model", name] = local(x).detach()
    values: dict[StateKey, Any] = {}
    for number, optimizer in enumerate(optimizers):
        # state_dict() waits until offloaded states have been copied to the host.
        for index, state in optimizer.state_dict()["state"].items():
            for name, x in state.items():
                if isinstance(x, Tensor):
                    tensors[number, index, name] = local(x)
                else:
                    values[number, index, name] = copy.copy(x)
    return tensors, values
