"""A lower learning rate for some steps, whatever sets it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LowerRate:
    """Multiplies learning rates by a factor within the steps of an optimizer.

    Between steps they are what the user's schedule made of them, whatever kind of schedule it is,
    so that there is nothing to restore.

    Attributes:
        factor: the factor; 1 leaves learning rates as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        self._optimizer = optimizer
        self._rates: list[Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._restore),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_post_hook(self._forget),
        ]

    def close(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()
        self._restore(self._optimizer)

    def _lower(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # the step before may have ended in an error
        if self.factor == 1:
            return
        groups = optimizer.param_groups
        self._rates = [_copy(group["lr"]) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):  # a tensor may be of several
            _set_rate(group, rate * self.factor)

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._rates is None:
            return
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, rate)
        self._rates = None

    def _save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Give a checkpoint, which may be saved within a step, the rates of the schedule."""
        if self._rates is not None:
            for group, rate in zip(state_dict["param_groups"], self._rates, strict=True):
                group["lr"] = _copy(rate)

    def _forget(self, _: torch.optim.Optimizer) -> None:
        """Leave the rates of a checkpoint as they are, where the step before it failed."""
        self._rates = None


def _copy(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a learning rate; in place if it is a tensor, which a CUDA graph reads again."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
