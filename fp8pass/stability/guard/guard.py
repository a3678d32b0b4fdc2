"""`fp8pass.Guard`: notices that a training is about to fail, says where, and acts if asked to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8pass.config import ConfigError
from fp8pass.optim.backward import steps_in_backward
from fp8pass.stability.guard import callbacks
from fp8pass.stability.guard.events import Event, Signal, Suspect
from fp8pass.stability.guard.loss_scale import LossScale
from fp8pass.stability.guard.norms import Norms, trained_names
from fp8pass.stability.guard.readings import Reading, Readings
from fp8pass.stability.guard.responses import ROLL_BACK, Responses
from fp8pass.stability.guard.signals import Signals
from fp8pass.stability.monitor import Monitor

log = logging.getLogger("fp8pass")

AGREEMENT = 10  # steps within which weak signals of two kinds are an alarm
REACTION = 20  # steps after which it shows whether an action is enough
MOST_ROLLBACKS = 10  # for one alarm


@dataclass
class Alarm:
    """An alarm that is not over.

    Attributes:
        step: when it was raised, or the training rolled back last.
        confirmed: whether the loss has risen.
        acted: whether something was done about it.
        rollbacks: how often the training was rolled back.
        stuck: whether rolling back is of no use: nothing to go back to, or too often.
    """

    step: int
    confirmed: bool = False
    acted: bool = False
    rollbacks: int = 0
    stuck: bool = False


class Guard:
    """Watches a training: loss, gradient norm, update size, weights, and a `Monitor`'s samples.

    Call `step(loss)` after each `optimizer.step()`, before `zero_grad()`. Numbers stay on the
    device, and are read a few steps later, when they have been copied: nothing waits for it.
    Each is compared with its own past by medians. An alarm is raised where two kinds of them rose
    together, or one by very much, or is not finite: an event with the tensors that are likely to
    blame, and a warning of the logger `fp8pass`.

    Args:
        monitor: whose samples are watched, too; its `step()` is called as without a guard.
        optimizer: the optimizer; callbacks set it.
        model: the module that is trained, by default the monitor's; callbacks set it.
        every: steps between readings, in which the norms of all parameters are measured.
        act: what is done about an alarm, by default nothing. `high precision`: the layers that
            `Monitor(fallback=...)` names run in high precision. `lower lr`: learning rates are
            multiplied by `factor` within the optimizer's step, whatever schedule sets them. Of
            these two the one that is named first comes first, and the other where it was not
            enough. `roll back`: once the loss has risen, weights, buffers and optimizer
            states are set to a copy on the host from at least `quiet` steps before the alarm; the
            host holds two. Data, schedules and random numbers go on.
        factor: of learning rates.
        hold: steps that these two last; twice as long where an alarm follows their end.
        quiet: steps after which an alarm is over, false if the loss has not risen by then, and
            after which a copy is trusted.

    Attributes:
        steps: optimizer steps done.
        events: what was noticed and done, in order.

    Raises:
        ConfigError: an argument has a wrong type or value, or an action is not possible.
    """

    def __init__(
        self,
        monitor: Monitor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
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
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} must be a whole number of steps, at least 1, got {value!r}."
                )
        if not isinstance(factor, (int, float)) or not 0 < factor < 1:
            raise ConfigError(f"factor must be a number between 0 and 1, got {factor!r}.")
        actions = (act,) if isinstance(act, str) else tuple(act)
        self.monitor, self.model, self.every, self.quiet = monitor, model, every, quiet
        self.steps = 0
        self.events: list[Event] = []
        self._responses = Responses(actions, factor, hold, quiet, monitor)
        self._readings = Readings()
        self._norms: Norms | None = None
        self._loss_scale: LossScale | None = None
        self._handle: RemovableHandle | None = None
        self._signals = Signals()
        self._noticed: list[tuple[int, Signal]] = []
        self._alarm: Alarm | None = None
        self._sampled: int | None = None  # the step of the Monitor's last sample that was seen
        self._needs_gradients = False
        if optimizer is not None:
            self.watch(model, optimizer)

    def watch(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        """Set the model, by default the monitor's, and its optimizer, as callbacks do.

        Raises:
            ConfigError: there is no model, or an action is not possible.
        """
        others = (self.model, self.monitor.model if self.monitor else None)
        model = next((m for m in (model, *others) if m is not None), None)  # `or` would ask for len
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "Guard needs the module that is trained: Guard(monitor, optimizer, model=model)."
            )
        if not hasattr(optimizer, "param_groups"):  # wrappers are no Optimizer
            raise ConfigError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        self.model = model
        self._responses.bind(model, optimizer)
        self._norms = Norms(model)
        self._leave()
        self._loss_scale = LossScale(optimizer)
        self._handle = optimizer.register_step_pre_hook(self._follow_trained)
        self._needs_gradients = not steps_in_backward(optimizer)

    def step(
        self, loss: Tensor | float | None = None, *, gradient_norm: Tensor | float | None = None
    ) -> None:
        """Count an optimizer step; call it after the step and before `zero_grad()`.

        Args:
            loss: of the step, one number; of several micro-batches their mean. It may be missing.
            gradient_norm: what `clip_grad_norm_` returned, the norm before clipping; under FSDP2
                every rank has to give it, since each has a part of it. Without it the
                norm is measured in every `every`-th step, as the optimizer saw the gradients. With
                `torch.amp.GradScaler` that of unscaled ones, as after `scaler.unscale_(optimizer)`;
                what is measured is unscaled.

        Raises:
            ConfigError: the guard has no optimizer.
            ValueError: a tensor has not one element.
        """
        if self._norms is None:
            raise ConfigError("Guard has no optimizer: Guard(monitor, optimizer, model=model).")
        self._follow_trained()
        self.steps += 1
        self._readings.add(loss, gradient_norm)
        if self.steps % self.every == 0:
            self._readings.send(self.steps, self._measured(self._norms))
            self._check_gradients(self._norms)
        for reading in self._readings.arrived():
            self._judge(reading, self._norms)
        ends = list(self._responses.tend(self.steps, alarmed=self._alarm is not None))
        for kind, what in ends:
            self._note(kind, what)
        if ends:
            self._norms.forget()  # changes are those of another learning rate
        # With a lower learning rate loss and changes are lower: nothing to compare with later.
        if self._alarm is None and not self._responses.active:
            self._signals.freeze(frozen=False)

    def resume(self, steps: int) -> None:
        """Continue after `steps` optimizer steps."""
        self.steps = steps

    def close(self) -> None:
        """End all actions, and leave the optimizer alone."""
        self._responses.close()
        self._leave()

    def hugging_face(self) -> Any:
        """A callback for `transformers.Trainer`, in place of calls to `step()`.

        The Trainer tells callbacks the loss and the gradient norm that it logs: `logging_steps` is
        how often the guard sees them, 1 or a few. Checkpoints have its state.

        Raises:
            ImportError: transformers is not installed.
        """
        return callbacks.hugging_face(self)

    def lightning(self) -> Any:
        """A callback for Lightning's `Trainer`, in place of calls to `step()`.

        Checkpoints have its state.

        Raises:
            ImportError: neither `lightning` nor `pytorch_lightning` is installed.
        """
        return callbacks.lightning(self)

    @property
    def counts(self) -> dict[str, int]:
        """How many events there were of each kind."""
        return dict(Counter(e.kind for e in self.events))

    def __str__(self) -> str:
        """Counts of alarms, and all events."""
        alarms, confirmed, wrong = (
            self.counts.get(kind, 0) for kind in ("alarm", "confirmed", "false alarm")
        )
        first = f"{self.steps} steps, {alarms} alarms: {confirmed} confirmed, {wrong} false"
        return "\n".join([first, *(str(e) for e in self.events)])

    def state_dict(self) -> dict[str, Any]:
        """Numbers and text for a checkpoint, as JSON can hold them; no copies of weights."""
        return {
            "steps": self.steps,
            "events": [e.as_dict() for e in self.events],
            "signals": self._signals.state_dict(),
            "responses": self._responses.state_dict(),
            "alarm": asdict(self._alarm) if self._alarm else None,
            "noticed": [[step, asdict(signal)] for step, signal in self._noticed],
            "sampled": self._sampled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: with its past, and with what was going on.

        Raises:
            ConfigError: it is not what `state_dict()` of a guard returned.
        """
        keys = state if isinstance(state, Mapping) else ()
        if missing := set(self.state_dict()) - set(keys):
            raise ConfigError(
                f"The checkpoint ({type(state).__name__}) has no {', '.join(sorted(missing))}: it "
                "is not of a Guard. Load what guard.state_dict() returned."
            )
        self.steps, self._sampled = state["steps"], state["sampled"]
        self.events = [Event.of(e) for e in state["events"]]
        self._alarm = Alarm(**state["alarm"]) if state["alarm"] else None
        self._noticed = [(step, Signal(**signal)) for step, signal in state["noticed"]]
        self._signals.load_state_dict(state["signals"])
        self._responses.load_state_dict(state["responses"])

    def _measured(self, norms: Norms) -> Tensor:
        weights, gradients, changes = norms.measure()
        if self._loss_scale is not None:
            gradients = self._loss_scale.unscaled(gradients)
        return torch.stack([weights, gradients, changes])

    def _leave(self) -> None:
        if self._loss_scale is not None:
            self._loss_scale.close()
            self._loss_scale = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _follow_trained(self, *_: Any) -> None:
        """Watch the parameters that are trained now, if others were frozen or unfrozen.

        Before an optimizer's step, so that the values of what was unfrozen are those of all earlier
        steps; where the backward updates, after it.
        """
        assert self._norms is not None
        assert self.model is not None
        trained = trained_names(self.model)
        if trained and trained != self._norms.trained:  # without any there is nothing to measure
            self._responses.follow_trained(trained)
            self._norms = Norms(self.model)
            self._readings.drop()  # numbers that are still on the device are of other parameters

    def _judge(self, reading: Reading, norms: Norms) -> None:
        found = [*self._signals.read(reading, norms.names), *self._of_monitor()]
        if self._alarm is None:
            self._noticed = [(s, x) for s, x in self._noticed if self.steps - s <= AGREEMENT]
            self._noticed += [(self.steps, x) for x in found]
            agreeing = {x.name: x for _, x in self._noticed}
            if len(agreeing) > 1 or any(x.strong for x in found):
                self._alarm = self._raise(list(agreeing.values()))
        if self._alarm is not None:
            self._follow(self._alarm, norms)

    def _of_monitor(self) -> list[Signal]:
        """Signals of a new sample."""
        rows = self.monitor.latest if self.monitor else []
        if not rows or rows[0].step == self._sampled:
            return []
        self._sampled = rows[0].step
        return self._signals.sample(rows)

    def _raise(self, found: Sequence[Signal]) -> Alarm:
        suspects = self._signals.suspects()
        blame = ", ".join(map(str, suspects)) or "no tensor stands out"
        what = "; ".join(x.text for x in found)
        self._note("alarm", f"{what}. Suspects: {blame}", tuple(found), suspects)
        self._noticed.clear()
        self._signals.freeze(frozen=True)
        return Alarm(self.steps, acted=self._act())

    def _follow(self, alarm: Alarm, norms: Norms) -> None:
        """See what becomes of an alarm."""
        risen = self._signals.has_risen
        if risen and not alarm.confirmed:
            alarm.confirmed = True
            self._note("confirmed", self._signals.rise)
        can_roll_back = ROLL_BACK in self._responses.act and not alarm.stuck
        wait = REACTION if alarm.rollbacks else 0
        if risen and can_roll_back and self.steps >= alarm.step + wait:
            self._roll_back(alarm, norms)
        elif self.steps - alarm.step >= self.quiet:
            self._end(alarm)

    def _end(self, alarm: Alarm) -> None:
        if not alarm.confirmed and not alarm.acted:
            self._note("false alarm", f"{self.quiet} steps later the loss goes on as before")
        self._alarm = None
        if alarm.confirmed and not alarm.rollbacks:
            self._signals.forget()  # what is now is what later numbers are compared with
            self._signals.freeze(frozen=False)

    def _act(self) -> bool:
        """Begin lasting actions; whether there are any."""
        done = list(self._responses.begin(self.steps))
        if done and self._norms is not None:
            self._norms.forget()
        for kind, what in done:
            self._note(kind, what)
        return bool(done)

    def _roll_back(self, alarm: Alarm, norms: Norms) -> None:
        often = alarm.rollbacks == MOST_ROLLBACKS
        step = None if often else self._responses.roll_back()
        if step is None:
            alarm.stuck = True
            known = f"{MOST_ROLLBACKS} times were not enough"
            self._note("no roll back", known if often else "no weights are known to be good")
            return
        if alarm.rollbacks:  # what was done about it has not been enough
            self._act()
        alarm.step, alarm.acted = self.steps, True
        alarm.rollbacks += 1
        self._readings.drop()
        norms.forget()
        self._signals.rolled_back()
        self._note(ROLL_BACK, f"weights and optimizer states are those of step {step} again")

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

    def _check_gradients(self, norms: Norms) -> None:
        if self._needs_gradients and not norms.gradients_seen:
            self._needs_gradients = False
            log.warning(
                "step %d: no parameter has a gradient, so that Guard cannot say which layer's "
                "gradients changed: call guard.step(loss) before optimizer.zero_grad().",
                self.steps,
            )
