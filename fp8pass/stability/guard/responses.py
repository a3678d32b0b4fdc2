"""What is done about alarms: a lower learning rate, higher precision, the last good weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8pass.config import ConfigError
from fp8pass.optim.backward import steps_in_backward
from fp8pass.stability.guard.rate import LowerRate
from fp8pass.stability.guard.snapshots import Snapshots
from fp8pass.stability.monitor import Monitor

LOWER_LR, HIGH_PRECISION, ROLL_BACK = ACTIONS = ("lower lr", "high precision", "roll back")

Done = tuple[str, str]  # an action, or its end, and what it was


class Responses:
    """The actions that a user allows.

    Lasting ones are taken in the order given, the next one where those before were not enough, and
    then the learning rate is lowered again and again. They end by themselves; if what they are
    about comes back, they begin where they ended and last twice as long.

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
            listed = ", ".join(map(repr, ACTIONS))
            raise ConfigError(f"Unknown action act={unknown[0]!r}. Actions are {listed}.")
        if HIGH_PRECISION in act and not (monitor and monitor.fallback):
            raise ConfigError(
                "act='high precision' needs to know which layers to switch: give Guard and the "
                "backend the same monitor=fp8pass.Monitor(fallback=('*',)). '*' are all layers."
            )
        self.act, self.factor, self.hold, self.quiet = act, factor, hold, quiet
        self._monitor = monitor
        self._lasting = tuple(a for a in act if a != ROLL_BACK)
        self._level = 0  # how many actions there are, or times that the rate is lowered
        self._times = 0  # that they have begun in a row
        self._until: int | None = None  # the step that ends lasting actions
        self._quiet_since = 0  # the last step of an alarm, or of lasting actions
        self._rate: LowerRate | None = None
        self._has_stepped = False
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
        self._check_steps(optimizer)
        if self._rate is not None:
            self._rate.close()
        self._training = model, optimizer
        self._rate = LowerRate(optimizer) if LOWER_LR in self.act else None
        self._apply()

    @property
    def active(self) -> bool:
        """Whether lasting actions are on."""
        return self._until is not None

    @property
    def rate_factor(self) -> float:
        """The factor of learning rates."""
        lowers = LOWER_LR in self._lasting[: self._level] and self.active
        return self.factor ** (1 + max(0, self._level - len(self._lasting))) if lowers else 1.0

    def begin(self, step: int) -> Iterator[Done]:
        """Begin lasting actions, or add to those that are on."""
        if not self._lasting:
            return
        if self.active or self._level == 0:
            self._level += 1
        if not self.active:
            self._times += 1
        steps = self.hold << (self._times - 1)
        self._until = step + steps
        self._apply()
        for action in self._lasting[: self._level]:
            yield action, f"{self._described(action)} for {steps} steps"

    def roll_back(self) -> int | None:
        """Set the training to the last good copy; its step, None if there is none."""
        good = self._snapshots.good
        if good is None or self._training is None:
            return None
        good.restore(*self._training)
        return good.step

    def follow_trained(self, names: Collection[str]) -> None:
        """Act on parameters, too, that are trained from the next step on."""
        if self._training is not None:
            self._snapshots.add(self._training[0], names)

    def tend(self, step: int, *, alarmed: bool) -> Iterator[Done]:
        """After each step: end what is over, and take copies of weights where all is quiet."""
        if self._training is not None and not self._has_stepped:
            self._check_steps(self._training[1])  # it may have been attached since
        self._has_stepped = True
        if self._until is not None and step >= self._until:
            self._until = None
            self._apply()
            if not alarmed:  # the next steps are a trial
                self._keep(step)
            for action in self._lasting[: self._level]:
                yield f"end of {action}", "its time is over"
        if alarmed or self._until is not None:
            self._quiet_since = step
        if alarmed:
            self._snapshots.distrust()
        elif ROLL_BACK in self.act and self._training is not None:
            self._snapshots.tend(step, *self._training)
        if step - self._quiet_since >= self.quiet:
            self._level = self._times = 0

    def close(self) -> None:
        """End all actions, and leave the optimizer alone."""
        self._until = None
        self._apply()
        if self._rate is not None:
            self._rate.close()

    def state_dict(self) -> dict[str, Any]:
        """What is going on, for a checkpoint, without copies of weights."""
        return {
            "level": self._level,
            "times": self._times,
            "until": self._until,
            "quiet_since": self._quiet_since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was going on."""
        self._level, self._times = state["level"], state["times"]
        self._until = state["until"]
        self._quiet_since = state["quiet_since"]
        self._apply()

    def _check_steps(self, optimizer: torch.optim.Optimizer) -> None:
        if LOWER_LR in self.act and steps_in_backward(optimizer):
            raise ConfigError(
                "act='lower lr' lowers the rate within optimizer.step(), which does nothing where "
                "fp8pass.optim.attach updates in the backward: leave out one of the two."
            )

    def _keep(self, step: int) -> None:
        """Trust the weights as they are."""
        if ROLL_BACK in self.act and self._training is not None:
            self._snapshots.keep(step, *self._training)

    def _described(self, action: str) -> str:
        if action == LOWER_LR:
            return f"learning rates ×{self.rate_factor:.3g}"
        return f"layers {', '.join(self._monitor.fallback if self._monitor else ())}"

    def _apply(self) -> None:
        """Have the optimizer and the model do what is going on."""
        if self._rate is not None:
            self._rate.factor = self.rate_factor
        if self._monitor is not None and HIGH_PRECISION in self.act:
            self._monitor.falls_back = (
                self.active and HIGH_PRECISION in self._lasting[: self._level]
            )


def _ranks() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return distributed.get_world_size()
