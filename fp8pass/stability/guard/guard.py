"""`fp8pass.Guard`: detects that a training is about to fail, names suspects, and can intervene."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8pass.optim.backward import steps_in_backward
from fp8pass.option_checks import ConfigError, is_whole
from fp8pass.stability.callbacks import StepObserver
from fp8pass.stability.guard.actions import ROLL_BACK, Actions
from fp8pass.stability.guard.measurements import (
    LossScale,
    ParameterNorms,
    Reading,
    Readings,
    trained_names,
)
from fp8pass.stability.guard.signals import Event, Signal, Signals, Suspect
from fp8pass.stability.monitor import Monitor

log = logging.getLogger("fp8pass")

AGREEMENT = 10  # maximum number of steps between weak signals of two kinds that raise an alarm
REACTION = 20  # minimum number of steps between two rollbacks
MOST_ROLLBACKS = 10  # maximum number of rollbacks after one alarm
NO_OPTIMIZER = "Guard has no optimizer: write Guard(monitor, optimizer, model=model)."


@dataclass
class Alarm:
    """An alarm that is not over yet."""

    step: int  # of the alarm, or of the last rollback after the alarm
    confirmed: bool = False  # the loss has risen since the alarm
    acted: bool = False  # an action was taken
    rollbacks: int = 0  # number of rollbacks after the alarm
    stuck: bool = False  # no good snapshot exists, or `MOST_ROLLBACKS` rollbacks did not help


class Guard(StepObserver):
    """Watches a training: loss, gradient norm, update size, weights, and a `Monitor`'s samples.

    Call `step(loss)` after the steps of all optimizers and before `zero_grad()`. An alarm adds an
    event with the most likely suspects to `events`, and logs a warning to the logger `fp8pass`.

    Args:
        monitor: a Monitor whose samples the guard also watches. Also call `monitor.step()`.
        *optimizers: the optimizers of the model, e.g. Muon and AdamW. Callbacks set them.
        model: the module that is trained, by default the monitor's. Callbacks set it.
        every: steps between readings, which measure the norms of all parameters.
        act: actions after an alarm, by default none. `high precision`: the layers named by
            `Monitor(fallback=...)` run in high precision. `lower lr`: learning rates are multiplied
            by `factor` within the optimizers' steps. If `act` contains both, the later one starts
            only if the earlier one was not enough. `roll back`: once the loss has risen, weights,
            buffers and optimizer states are restored from a copy in host memory.
        factor: factor of learning rates for `lower lr`, between 0 and 1.
        hold: number of steps after which `high precision` and `lower lr` end. If a new alarm
            follows soon, they restart for twice as many steps.
        quiet: number of steps after which an alarm is over. A copy in host memory counts as good if
            no alarm follows within this number of steps.

    Attributes:
        steps: number of optimizer steps done.
        events: the detections and actions of the guard, in order.

    Raises:
        ConfigError: an argument has a wrong type or value, or an action is not possible.
    """

    def __init__(
        self,
        monitor: Monitor | None = None,
        *optimizers: torch.optim.Optimizer,
        model: nn.Module | None = None,
        every: int = 5,
        act: Iterable[str] = (),
        factor: float = 0.1,
        hold: int = 200,
        quiet: int = 100,
    ) -> None:
        if monitor is not None and not isinstance(monitor, Monitor):
            kind = type(monitor).__name__
            raise ConfigError(f"monitor must be a fp8pass.Monitor or None, got {kind}.")
        for name, value in (("every", every), ("hold", hold), ("quiet", quiet)):
            if not is_whole(value) or value < 1:
                raise ConfigError(
                    f"{name} must be a whole number of steps, at least 1, got {value!r}."
                )
        if not isinstance(factor, (int, float)) or not 0 < factor < 1:
            raise ConfigError(f"factor must be a number between 0 and 1, got {factor!r}.")
        actions = (act,) if isinstance(act, str) else tuple(act)
        self.monitor, self.model, self.every, self.quiet = monitor, model, every, quiet
        self.steps = 0
        self.events: list[Event] = []
        self._actions = Actions(actions, factor, hold, quiet, monitor)
        self._readings = Readings()
        self._norms: ParameterNorms | None = None
        self._loss_scales: list[LossScale] = []
        self._handles: list[RemovableHandle] = []
        self._signals = Signals()
        self._pending: list[tuple[int, Signal]] = []  # steps and signals that may become an alarm
        self._alarm: Alarm | None = None
        self._sampled: int | None = None  # step of the last sample that was read
        self._needs_gradients = False
        if optimizers:
            self.watch(model, *optimizers)

    def watch(self, model: nn.Module | None, *optimizers: torch.optim.Optimizer) -> None:
        """Set the model (by default the monitor's) and the optimizers. Callbacks call this method.

        Raises:
            ConfigError: the model or the optimizer is missing or has a wrong type, or an action is
                not possible with this training.
        """
        # Not `or`, because an empty nn.Sequential is false.
        others = (self.model, self.monitor.model if self.monitor else None)
        model = next((m for m in (model, *others) if m is not None), None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "Guard needs the model: write Guard(monitor, optimizer, model=model)."
            )
        if not optimizers:
            raise ConfigError(NO_OPTIMIZER)
        for optimizer in optimizers:
            if not hasattr(optimizer, "param_groups"):  # wrappers are not instances of Optimizer
                raise ConfigError(
                    f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
                )
        self.model = model
        self._actions.bind(model, optimizers)
        self._norms = ParameterNorms(model)
        self._detach()
        self._loss_scales = [LossScale(x) for x in optimizers]
        self._handles = [
            *(scale.handle for scale in self._loss_scales),
            *(x.register_step_pre_hook(self._follow_trained) for x in optimizers),
        ]
        self._needs_gradients = not all(map(steps_in_backward, optimizers))

    def step(
        self, loss: Tensor | float | None = None, *, gradient_norm: Tensor | float | None = None
    ) -> None:
        """Count a step of all optimizers; call it after the step and before `zero_grad()`.

        Args:
            loss: scalar loss of the step, averaged over micro-batches. Optional.
            gradient_norm: norm of all gradients before clipping, the return value of
                `clip_grad_norm_`. Under FSDP2 pass this argument on every rank. With
                `torch.amp.GradScaler` pass the norm after `scaler.unscale_(optimizer)`. Without
                this argument, the guard measures the norm of the unscaled gradients in every
                `every`-th step.

        Raises:
            ConfigError: the guard has no optimizer.
            ValueError: a tensor has more or less than one element.
        """
        if self._norms is None:
            raise ConfigError(NO_OPTIMIZER)
        self._follow_trained()
        self.steps += 1
        self._readings.add(loss, gradient_norm)
        if self.steps % self.every == 0:
            self._readings.send(self.steps, self._measure(self._norms))
            self._check_gradients(self._norms)
        for reading in self._readings.collect():
            self._judge(reading, self._norms)
        ends = list(self._actions.tend(self.steps, alarmed=self._alarm is not None))
        for kind, message in ends:
            self._note(kind, message)
        if ends:
            self._norms.forget()  # the next change would mix steps with two learning rates
        # Numbers that were measured with a lower learning rate are too low for comparisons.
        if self._alarm is None and not self._actions.active:
            self._signals.freeze(frozen=False)

    def resume(self, steps: int) -> None:
        """Continue a training that has done `steps` optimizer steps."""
        self.steps = steps

    def close(self) -> None:
        """End all actions, and remove the hooks from the optimizers."""
        self._actions.close()
        self._detach()

    def _begin(self, model: Any, optimizers: Sequence[Any], steps: int) -> None:
        self.watch(model, *optimizers)
        self.resume(steps)

    def _end_step(self, loss: Any, gradient_norm: Any) -> None:
        self.step(loss, gradient_norm=gradient_norm)

    @property
    def counts(self) -> dict[str, int]:
        """Number of events of each kind."""
        return dict(Counter(e.kind for e in self.events))

    def __str__(self) -> str:
        """Return a line with the numbers of steps and alarms, and one line for each event."""
        alarms, confirmed, wrong = (
            self.counts.get(kind, 0) for kind in ("alarm", "confirmed", "false alarm")
        )
        first = f"{self.steps} steps, {alarms} alarms: {confirmed} confirmed, {wrong} false"
        return "\n".join([first, *(str(e) for e in self.events)])

    def state_dict(self) -> dict[str, Any]:
        """Return the state without copies of weights, as a dict that JSON can store."""
        return {
            "steps": self.steps,
            "events": [asdict(e) for e in self.events],
            "signals": self._signals.state_dict(),
            "responses": self._actions.state_dict(),
            "alarm": asdict(self._alarm) if self._alarm else None,
            "noticed": [[step, asdict(signal)] for step, signal in self._pending],
            "sampled": self._sampled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the past numbers, the alarm and the actions that a checkpoint contains.

        Raises:
            ConfigError: `state` was not returned by `state_dict()` of a guard.
        """
        keys = state if isinstance(state, Mapping) else ()
        if missing := set(self.state_dict()) - set(keys):
            raise ConfigError(
                f"The checkpoint ({type(state).__name__}) has no {', '.join(sorted(missing))}. "
                "Load the result of guard.state_dict()."
            )
        self.steps, self._sampled = state["steps"], state["sampled"]
        self.events = [Event.of(e) for e in state["events"]]
        self._alarm = Alarm(**state["alarm"]) if state["alarm"] else None
        self._pending = [(step, Signal(**signal)) for step, signal in state["noticed"]]
        self._signals.load_state_dict(state["signals"])
        self._actions.load_state_dict(state["responses"])

    def _measure(self, norms: ParameterNorms) -> Tensor:
        weights, gradients, changes = norms.measure()
        for scale in self._loss_scales:
            gradients = scale.unscale(gradients, norms.parameters)
        return torch.stack([weights, gradients, changes])

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _follow_trained(self, *_: Any) -> None:
        """Watch the parameters that are trained now, if the user froze or unfroze some.

        Snapshots add the values of newly unfrozen parameters. So optimizers call this method as a
        hook before each step, because the step changes the values. If the backward updates the
        parameters, the values have changed already.
        """
        assert self._norms is not None
        assert self.model is not None
        trained = trained_names(self.model)
        if trained and trained != self._norms.trained:  # nothing to measure if all are frozen
            self._actions.follow_trained(trained)
            self._norms = ParameterNorms(self.model)
            self._readings.drop()  # numbers not read yet belong to other parameters

    def _judge(self, reading: Reading, norms: ParameterNorms) -> None:
        found = [*self._signals.read(reading, norms.names), *self._read_monitor()]
        if self._alarm is None:
            self._pending = [(s, x) for s, x in self._pending if self.steps - s <= AGREEMENT]
            self._pending += [(self.steps, x) for x in found]
            agreeing = {x.name: x for _, x in self._pending}
            if len(agreeing) > 1 or any(x.strong for x in found):
                self._alarm = self._raise_alarm(list(agreeing.values()))
        if self._alarm is not None:
            self._follow(self._alarm, norms)

    def _read_monitor(self) -> list[Signal]:
        """Return the signals of the monitor's new sample; [] if there is no new sample."""
        rows = self.monitor.latest if self.monitor else []
        if not rows or rows[0].step == self._sampled:
            return []
        self._sampled = rows[0].step
        return self._signals.sample(rows)

    def _raise_alarm(self, found: Sequence[Signal]) -> Alarm:
        suspects = self._signals.suspects()
        blame = ", ".join(map(str, suspects)) or "no tensor stands out"
        text = "; ".join(x.text for x in found)
        self._note("alarm", f"{text}. Suspects: {blame}", tuple(found), suspects)
        self._pending.clear()
        self._signals.freeze(frozen=True)
        return Alarm(self.steps, acted=self._act())

    def _follow(self, alarm: Alarm, norms: ParameterNorms) -> None:
        risen = self._signals.has_risen
        if risen and not alarm.confirmed:
            alarm.confirmed = True
            self._note("confirmed", self._signals.rise)
        can_roll_back = ROLL_BACK in self._actions.act and not alarm.stuck
        wait = REACTION if alarm.rollbacks else 0
        if risen and can_roll_back and self.steps >= alarm.step + wait:
            self._roll_back(alarm, norms)
        elif self.steps - alarm.step >= self.quiet:
            self._end(alarm)

    def _end(self, alarm: Alarm) -> None:
        if not alarm.confirmed and not alarm.acted:
            reason = f"the loss has not risen in {self.quiet} steps after the alarm"
            self._note("false alarm", reason)
        self._alarm = None
        if alarm.confirmed and not alarm.rollbacks:
            self._signals.forget()  # compare later numbers only with numbers after this alarm
            self._signals.freeze(frozen=False)

    def _act(self) -> bool:
        """Start the next lasting actions. Return whether an action started."""
        done = list(self._actions.begin(self.steps))
        if done and self._norms is not None:
            self._norms.forget()
        for kind, message in done:
            self._note(kind, message)
        return bool(done)

    def _roll_back(self, alarm: Alarm, norms: ParameterNorms) -> None:
        step, reason = None, f"the loss is still high after {MOST_ROLLBACKS} rollbacks"
        if alarm.rollbacks < MOST_ROLLBACKS:
            step, reason = self._actions.roll_back(), "there is no snapshot of good weights"
        if step is None:
            alarm.stuck = True
            self._note("no roll back", reason)
            return
        if alarm.rollbacks:  # the actions so far were not enough
            self._act()
        alarm.step, alarm.acted = self.steps, True
        alarm.rollbacks += 1
        self._readings.drop()
        norms.forget()
        self._signals.forget_recent()
        self._note(ROLL_BACK, f"restored weights and optimizer states of step {step}")

    def _note(
        self,
        kind: str,
        message: str,
        signals: tuple[Signal, ...] = (),
        suspects: tuple[Suspect, ...] = (),
    ) -> None:
        event = Event(self.steps, kind, message, signals, suspects)
        self.events.append(event)
        log.warning("%s", event)

    def _check_gradients(self, norms: ParameterNorms) -> None:
        if self._needs_gradients and not norms.gradients_seen:
            self._needs_gradients = False
            log.warning(
                "step %d: no parameter has a gradient, so Guard cannot find layers whose gradients "
                "change: call guard.step(loss) before optimizer.zero_grad().",
                self.steps,
            )
