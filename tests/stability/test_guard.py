"""`Guard` in training: alarms, their suspects, and whether they are confirmed."""

import json
import logging

import pytest
import torch
from guard_helpers import Training, event_kinds, guard_losses
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8pass import ConfigError, Guard, Monitor


@pytest.mark.parametrize("layer", ["0", "4", "6"])
def test_the_scaled_layer_is_the_first_suspect(layer):
    training = Training().run(150)
    assert not training.guard.events
    with torch.no_grad():
        training.model.get_submodule(layer).weight.mul_(100)
    alarm = training.run(5).guard.events[0]
    assert alarm.kind == "alarm"
    assert (alarm.suspects[0].module, alarm.suspects[0].tensor) == (layer, "weight")
    assert alarm.suspects[0].factor == pytest.approx(100, rel=0.1)
    assert f"{layer} weight (×" in alarm.message


def test_a_nonfinite_weight_is_named():
    training = Training().run(20)
    with torch.no_grad():
        training.model.get_submodule("2").bias[3] = torch.nan
        training.guard.every = 1
    training.guard.step(1.0)  # before a loss makes everything NaN
    alarm = training.guard.events[0]
    assert alarm.suspects[0].module == "2"
    assert "2 bias is not finite" in alarm.message


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_may_have_any_precision(dtype):
    training = Training()
    other = nn.Parameter(torch.ones(3, dtype=dtype))
    training.model.register_parameter("other", other)
    optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
    guard = Guard(None, optimizer, model=training.model, every=1)
    other.grad = torch.full_like(other, 2.0)
    guard.step(1.0)
    guard.step(1.0)
    assert not guard.events


def test_a_compiled_model_is_guarded():
    """The truth value of a compiled model is the length of its module."""
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    guard = Guard(None, torch.optim.SGD(model.parameters(), 0.1), model=model, every=1)
    guard.step(1.0)
    assert not guard.events


def test_warnings_are_logged(caplog):
    guard_losses([1.0, torch.nan, 1.0, 1.0, 1.0])
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any(m.startswith("step 5: alarm: loss is nan") for m in messages)


def test_an_alarm_is_false_if_the_loss_continues_normally():
    training = Training(quiet=30).run(154)
    weight = training.model.get_submodule("0").weight
    before = weight.detach().clone()
    with torch.no_grad():  # restored before the next forward
        weight.mul_(100)
        training.guard.step()
        weight.copy_(before)
    training.run(36)
    assert event_kinds(training.guard) == ["alarm", "false alarm"]
    assert "1 alarms: 0 confirmed, 1 false" in str(training.guard)


def test_a_permanent_change_raises_one_alarm():
    losses = [1.0 + 0.01 * (i % 3) for i in range(200)]
    guard = guard_losses(losses + [3 * x for x in losses] * 3, quiet=50)
    assert event_kinds(guard) == ["alarm", "confirmed"]


def test_steps_between_readings_read_nothing_from_the_device():
    class Reads(TorchDispatchMode):
        """Counts operators and reads that wait for a device."""

        def __init__(self):
            super().__init__()
            self.calls, self.reads = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            self.reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(None, optimizer, model=model, every=50)
    loss, norm = torch.ones(()), torch.ones(())
    with Reads() as found:
        for _ in range(49):
            guard.step(loss, gradient_norm=norm)
        assert found.calls <= 4 * 49  # copies of both numbers, and views
        guard.step(loss, gradient_norm=norm)
    assert found.reads == 0


def test_a_loss_is_copied_before_it_is_overwritten():
    """CUDA graphs overwrite their outputs."""
    model, loss = nn.Linear(1, 1), torch.ones(())
    guard = Guard(None, torch.optim.SGD(model.parameters()), model=model)
    for value in (1.0, torch.nan, 1.0, 1.0, 1.0):
        loss.fill_(value)
        guard.step(loss)
    assert event_kinds(guard)[0] == "alarm"


def test_missing_gradients_are_reported_once(caplog):
    guard_losses([1.0] * 20)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "call guard.step(loss) before optimizer.zero_grad()" in message


@pytest.mark.long
def test_a_checkpoint_contains_history_and_alarm():
    whole, first, second = (Training(act="lower lr", hold=40, quiet=30) for _ in range(3))
    for training in (whole, first):
        training.run(120).run(20, factor=30.0)
    assert "lower lr" in event_kinds(whole.guard)
    state = json.loads(json.dumps(first.guard.state_dict()))
    second.guard.load_state_dict(state)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.step = first.step
    for training in (whole, second):
        training.run(60, factor=30.0)
    assert event_kinds(second.guard) == event_kinds(whole.guard)
    assert "end of lower lr" in event_kinds(second.guard)
    assert [e.step for e in second.guard.events] == [e.step for e in whole.guard.events]


@pytest.mark.parametrize("state", [{}, {"guard": {}}, None, "guard.json"])
def test_invalid_checkpoints_are_refused(state):
    guard = guard_losses([1.0] * 3)
    with pytest.raises(ConfigError, match=r"has no alarm, .* Load the result of guard\.state_dict"):
        guard.load_state_dict(state)
    assert guard.steps == 3


# --- wrong arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": 3}, "fp8pass.Monitor or None, got int"),
        ({"every": 0}, "every must be a whole number of steps"),
        ({"hold": True}, "hold must be a whole number of steps"),
        ({"quiet": 1.5}, "quiet must be a whole number of steps"),
        ({"factor": 1.0}, "factor must be a number between 0 and 1"),
        ({"act": "pray"}, "Unknown action act='pray'. Actions are 'lower lr'"),
        ({"act": "high precision"}, r"Monitor\(fallback="),
        ({"act": "high precision", "monitor": Monitor()}, r"Monitor\(fallback="),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Guard(**options)


def test_a_guard_needs_a_model_and_an_optimizer():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ConfigError, match="optimizer must be a torch"):
        Guard(None, "adam", model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="model=model"):
        Guard(None, optimizer)
    with pytest.raises(ConfigError, match="no optimizer"):
        Guard().step(1.0)
