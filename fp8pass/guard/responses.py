"""What is done about alarms: a lower learning rate, higher precision, the last good weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8pass.config import ConfigError
from fp8pass.guard.rate import LowerRate
from fp8pass.guard.snapshots import Snapshots
from fp8pass.monitor import Monitor
from fp8pass.optim.backward import steps_in_backward

LOWER_LR, HIGH_PRECISION, ROLL_BACK = ACTIONS = ("lower lr", "high precision", "roll back")

Done = tuple[str, str]  # an action, or its end, and what it was


class Responses:
    """The actions that a user allows.

    Lasting ones end by themselves. If alarms follow each other, each lowers the learning rate
    further, and lasts twice as long.

    Args:
        act: the actions.
        factor: of the learning rate.
        hold: steps that lasting actions last.
        quiet: steps after which a copy of the weights is trusted, and alarms no longer follow each
            other.
        monitor: that switches graphs.

    Raises:
        ConfigError: an action is not known, or not possible.
    """

    def __init__(
        self, act: tuple[str, ...], factor: float, hold: int, quiet: int, monitor: Monitor | None
    ) -> None:
        if unknown := [a for a in act if a not in ACTIONS]:
            raise ConfigError(f"act has {unknown[0]!r}; it is out of {ACTIONS}.")
        if HIGH_PRECISION in act and not (monitor and monitor.fallback):
            raise ConfigError(
                "act='high precision' needs layers to switch: monitor=fp8pass.Monitor(fallback="
                "('*',)), given to the backend, too."
            )
        self.act, self.factor, self.hold, self.quiet = act, factor, hold, quiet
        self._monitor = monitor
        self._lasting = tuple(a for a in (LOWER_LR, HIGH_PRECISION) if a in act)
        self._level = 0  # alarms that followed each other
        self._until: int | None = None  # the step that ends lasting actions
        self._quiet_since = 0  # the last step of an alarm, or of lasting actions
        self._rate: LowerRate | None = None
        self._snapshots = Snapshots(quiet)
        self._training: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set what is acted on.

        Raises:
            ConfigError: an action is not possible with it.
        """
        if self.act and _ranks() > 1:
            raise ConfigError(
                f"act={self.act!r} needs a training in one process, as each rank would decide by "
                "itself. Leave it out: warnings work on each rank."
            )
        if LOWER_LR in self.act and steps_in_backward(optimizer):
            raise ConfigError(
                "act='lower lr' lowers the rate within optimizer.step(), which does nothing where "
                "fp8pass.optim.attach updates in the backward: leave out one of both."
            )
        if self._rate is not None:
            self._rate.close()
        self._training = model, optimizer
        self._rate = LowerRate(optimizer) if LOWER_LR in self.act else None
        self._apply()

    def begin(self, step: int) -> Iterator[Done]:
        """Begin lasting actions, or stronger ones if some are on or ended just now."""
        if not self._lasting:
            return
        self._level += 1
        steps = self.hold << (self._level - 1)
        self._until = step + steps
        self._apply()
        if LOWER_LR in self.act:
            yield LOWER_LR, f"learning rates ×{self.factor**self._level:.3g} for {steps} steps"
        if HIGH_PRECISION in self.act and self._monitor:
            layers = ", ".join(self._monitor.fallback)
            yield HIGH_PRECISION, f"layers {layers} for {steps} steps"

    def roll_back(self) -> int | None:
        """Set the training to the last good copy; its step, None if there is none."""
        good = self._snapshots.good
        if good is None or self._training is None:
            return None
        good.restore(*self._training)
        return good.step

    def tend(self, step: int, *, alarmed: bool) -> Iterator[Done]:
        """After each step: end what is over, and take copies of weights where all is quiet."""
        if self._until is not None and step >= self._until:
            self._until = None
            self._apply()
            yield from ((f"end of {action}", "its time is over") for action in self._lasting)
        if alarmed or self._until is not None:
            self._quiet_since = step
        if alarmed:
            self._snapshots.distrust()
        elif ROLL_BACK in self.act and self._training is not None:
            self._snapshots.tend(step, *self._training)
        if step - self._quiet_since >= self.quiet:
            self._level = 0

    def close(self) -> None:
        """End all actions, and leave the optimizer alone."""
        self._until = None
        self._apply()
        if self._rate is not None:
            self._rate.close()

    def state_dict(self) -> dict[str, Any]:
        """What is going on, for a checkpoint, without copies of weights."""
        return {"level": self._level, "until": self._until, "quiet_since": self._quiet_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was going on."""
        self._level, self._until = state["level"], state["until"]
        self._quiet_since = state["quiet_since"]
        self._apply()

    def _apply(self) -> None:
        """Have the optimizer and the model do what is going on."""
        active = self._until is not None
        if self._rate is not None:
            self._rate.factor = self.factor**self._level if active else 1.0
        if self._monitor is not None and HIGH_PRECISION in self.act:
            self._monitor.falls_back = active


def _ranks() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()
