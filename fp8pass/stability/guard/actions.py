"""Responses to alarms: lower learning rates, high precision, and restored weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.optim.backward import steps_in_backward
from fp8pass.optim.shards import is_distributed
from fp8pass.option_checks import ConfigError
from fp8pass.stability.guard.snapshots import Snapshots
from fp8pass.stability.monitor import Monitor

LOWER_LR, HIGH_PRECISION, ROLL_BACK = ACTIONS = ("lower lr", "high precision", "roll back")

Done = tuple[str, str]  # kind and message of an event


class Actions:
    """Responds to alarms with the actions that the user allows.

    Lasting actions (`lower lr`, `high precision`) start in the order of `act`. An action starts
    only if the earlier actions were not enough. If all lasting actions are not enough, `lower lr`
    multiplies learning rates by `factor` once more. Lasting actions end after `hold` steps.
    If an alarm follows within `quiet` steps, the same actions restart and last twice as long.
    """

    def __init__(
        self, act: tuple[str, ...], factor: float, hold: int, quiet: int, monitor: Monitor | None
    ) -> None:
        if unknown := [a for a in act if a not in ACTIONS]:
            listed = ", ".join(map(repr, ACTIONS))
            raise ConfigError(f"Unknown action act={unknown[0]!r}. Actions are {listed}.")
        if HIGH_PRECISION in act and not (monitor and monitor.fallback):
            raise ConfigError(
                "act='high precision' needs a Monitor that names the layers to switch. Pass the "
                "same monitor=fp8pass.Monitor(fallback=('*',)) to Guard and to the backend; '*' "
                "matches all layers."
            )
        self.act, self.factor, self.hold, self.quiet = act, factor, hold, quiet
        self._monitor = monitor
        self._lasting = tuple(a for a in act if a != ROLL_BACK)
        self._level = 0  # number of started lasting actions, plus further reductions of rates
        self._times = 0  # number of starts of lasting actions since the last quiet time
        self._until: int | None = None  # step at which lasting actions end; None without an action
        self._quiet_since = 0  # last step with an alarm or a lasting action
        self._rates: list[LowerRate] = []
        self._snapshots = Snapshots(quiet)
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def bind(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the model and the optimizers that actions change."""
        if self.act and is_distributed() and torch.distributed.get_world_size() > 1:
            raise ConfigError(
                f"act={self.act!r} does not support several ranks, because each rank would decide "
                "by itself. Leave act out: Guard then warns on every rank."
            )
        self._check_steps(optimizers)
        self._close_rates()
        self._model, self._optimizers = model, tuple(optimizers)
        if LOWER_LR in self.act:
            self._rates = [LowerRate(optimizer) for optimizer in optimizers]
        self._apply()

    @property
    def active(self) -> bool:
        return self._until is not None

    @property
    def rate_factor(self) -> float:
        lowers = LOWER_LR in self._lasting[: self._level] and self.active
        return self.factor ** (1 + max(0, self._level - len(self._lasting))) if lowers else 1.0

    def begin(self, step: int) -> Iterator[Done]:
        """Start lasting actions. If some are on, start the next action, too. Yield their events."""
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
            yield action, f"{self._describe(action)} for {steps} steps"

    def roll_back(self) -> int | None:
        """Restore the last good snapshot. Return its step, or None without a good snapshot."""
        good = self._snapshots.good
        if good is None or self._model is None:
            return None
        good.restore(self._model, *self._optimizers)
        return good.step

    def follow_trained(self, names: Collection[str]) -> None:
        """Add the parameters `names` to the snapshots if they were frozen until now."""
        if self._model is not None:
            self._snapshots.add(self._model, names)

    def tend(self, step: int, *, alarmed: bool) -> Iterator[Done]:
        """End actions that are over. Without an alarm, take snapshots. Called in each step."""
        self._check_steps(self._optimizers)  # step_in_backward may be called after `bind`
        snapshots = self._snapshots if ROLL_BACK in self.act else None
        if self._until is not None and step >= self._until:
            self._until = None
            self._apply()
            if not alarmed and snapshots and self._model is not None:
                # Accept this snapshot as good immediately: the next steps run without the action
                # and may fail again.
                snapshots.keep(step, self._model, *self._optimizers)
            for action in self._lasting[: self._level]:
                yield f"end of {action}", "its planned steps are over"
        if alarmed or self._until is not None:
            self._quiet_since = step
        if alarmed:
            self._snapshots.distrust()
        elif snapshots and self._model is not None:
            snapshots.tend(step, self._model, *self._optimizers)
        if step - self._quiet_since >= self.quiet:
            self._level = self._times = 0

    def close(self) -> None:
        self._until = None
        self._apply()
        self._close_rates()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of lasting actions, without snapshots, for a checkpoint."""
        return {
            "level": self._level,
            "times": self._times,
            "until": self._until,
            "quiet_since": self._quiet_since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._level, self._times = state["level"], state["times"]
        self._until, self._quiet_since = state["until"], state["quiet_since"]
        self._apply()

    def _close_rates(self) -> None:
        for rate in self._rates:
            rate.close()
        self._rates = []

    def _check_steps(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        if LOWER_LR in self.act and any(map(steps_in_backward, optimizers)):
            raise ConfigError(
                "act='lower lr' has no effect with fp8pass.optim.step_in_backward, because this "
                "action changes learning rates in optimizer.step(). Leave out 'lower lr' or "
                "step_in_backward."
            )

    def _describe(self, action: str) -> str:
        if action == LOWER_LR:
            return f"learning rates ×{self.rate_factor:.3g}"
        return f"layers {', '.join(self._monitor.fallback if self._monitor else ())}"

    def _apply(self) -> None:
        for rate in self._rates:
            rate.factor = self.rate_factor
        if self._monitor is not None and HIGH_PRECISION in self.act:
            on = HIGH_PRECISION in self._lasting[: self._level]
            self._monitor.falls_back = self.active and on


class LowerRate:
    """Multiplies an optimizer's learning rates by a factor while the optimizer steps.

    Between steps the optimizer has the rates of the user's schedule, so schedules work unchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0  # leaves learning rates unchanged
        self._optimizer = optimizer
        self._rates: list[Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._restore),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_post_hook(self._forget),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._restore(self._optimizer)

    def _lower(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # the last step may have ended with an error
        if self.factor == 1:
            return
        groups = optimizer.param_groups
        # Copy all rates before the first change, because groups may share a rate's tensor.
        self._rates = [_copy(group["lr"]) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            _set_rate(group, rate * self.factor)

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._rates is None:
            return
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, rate)
        self._rates = None

    def _save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Put the original rates into a checkpoint that is saved while the rates are lowered."""
        if self._rates is not None:
            for group, rate in zip(state_dict["param_groups"], self._rates, strict=True):
                group["lr"] = _copy(rate)

    def _forget(self, _: torch.optim.Optimizer) -> None:
        """Forget the rates of a failed step, because a loaded checkpoint has its own rates."""
        self._rates = None


def _copy(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate)  # in place, because a CUDA graph reads this tensor
    else:
        group["lr"] = rate
