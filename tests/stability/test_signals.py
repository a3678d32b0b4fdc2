"""Signals: numbers compared with their history, and suspect tensors."""

import math

import numpy as np
import pytest
from guard_helpers import event_kinds, guard_losses
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8pass.stability.guard.past import History, Trend, logs
from fp8pass.stability.guard.signals import Signals
from fp8pass.stability.monitor.statistics import LANDSCAPE, TensorStatistics


def make_falling_losses(seed, steps=400, start=6.0, end=2.0, pace=80.0, noise=0.1):
    """Return noisy losses that fall exponentially."""
    random = np.random.default_rng(seed)
    curve = end + (start - end) * np.exp(-np.arange(steps) / pace)
    return (curve + noise * random.standard_normal(steps)).tolist()


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    end=st.floats(0.05, 5.0),
    pace=st.floats(20.0, 2000.0),
    noise=st.floats(0.0, 0.3),
)
def test_noisy_falling_losses_raise_no_alarm(seed, end, pace, noise):
    losses = make_falling_losses(seed, start=2 * end, end=end, pace=pace, noise=noise * end)
    assert not guard_losses(losses).events


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 20), where=st.lists(st.integers(60, 390), max_size=4, unique=True))
def test_single_outliers_raise_no_alarm(seed, where):
    losses = make_falling_losses(seed)
    for step in where:
        losses[step] = 50.0
    # The median of the eight recent losses ignores three outliers.
    if all(sum(abs(a - b) < 8 for b in where) <= 3 for a in where):
        assert not guard_losses(losses).events


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 20), growth=st.floats(1.01, 1.2))
def test_a_growing_loss_raises_an_alarm_before_it_has_doubled(seed, growth):
    losses = make_falling_losses(seed, steps=500, noise=0.05)
    doubled = 300 + math.log(2) / math.log(growth)
    for step in range(300, 500):
        losses[step] *= min(growth ** (step - 300), 8.0)
    alarm = guard_losses(losses).events[0]
    assert alarm.kind == "alarm"
    assert alarm.step > 300
    # The median of eight losses, read in every fifth step, is at most this late.
    assert alarm.step < max((300 + doubled) / 2, 300) + 13


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_raises_an_alarm_at_once(value):
    guard = guard_losses([2.0, 1.9, value, 1.8, 1.7])
    assert event_kinds(guard)[:2] == ["alarm", "confirmed"]
    assert guard.events[0].step == 5
    assert guard.events[0].signals[0].strong
    assert str(value) in guard.events[0].message
    assert guard.events[1].message == "the loss is not finite"


def test_a_trend_does_not_follow_a_slow_rise():
    trend = Trend(recent=4, block=10, blocks=10, floor=0.01)
    trend.extend([1.0] * 50)
    trend.extend(np.linspace(1.0, 1.5, 50))
    assert trend.rise().before == 1.0
    assert trend.rise().difference > 0.4


def test_a_trend_ignores_nonfinite_numbers_and_needs_a_history():
    trend = Trend(recent=2, block=2, blocks=3, floor=0.1)
    trend.extend([1.0, math.nan, 1.0, 1.0, math.inf, 9.0, 9.0])
    assert trend.rise().deviations == 0
    trend.extend([9.0, 9.0])
    assert trend.rise().now == 9
    assert trend.rise().before == 1


def test_a_history_compares_each_number_with_its_past():
    history = History(floor=0.01)
    for _ in range(10):
        history.push(np.array([0.0, 5.0, np.nan]))
    change, deviations = history.jumps(np.array([1.0, 5.0, 3.0]))
    assert change.tolist() == [1, 0, 0]
    assert deviations.tolist() == pytest.approx([100, 0, 0])


def test_undefined_logarithms_are_nan():
    assert np.isnan(logs(np.array([0.0, -1.0, np.nan, np.inf]))).all()


# --- a Monitor's samples -----------------------------------------------------------------------


def sample(step, *, amax=1.0, underflow=0.0, nonfinite=0):
    """Return a sample of two tensors. The arguments are statistics of the second tensor."""

    def row(module, amax, underflow, nonfinite):
        counts = {"elements": 100, "amax": amax, "saturated": 0.01, "underflow": underflow}
        names = (step, module, "input", "row", "e4m3", "bfloat16")
        return TensorStatistics(*names, **counts, sqnr_db=30.0, nonfinite=nonfinite)

    return [row("first", 1.0, 0.0, 0), row("second", amax, underflow, nonfinite)]


@pytest.mark.parametrize(
    "changes", [{"amax": 100.0}, {"underflow": 0.5}, {"nonfinite": 3}], ids=lambda c: next(iter(c))
)
def test_a_change_of_quantization_statistics_is_a_signal(changes):
    signals = Signals()
    for step in range(8):
        assert not signals.sample(sample(step))
    (signal,) = signals.sample(sample(8, **changes))
    assert signal.name == "quantization"
    assert "second input" in signal.text
    (suspect,) = signals.suspects()
    assert (suspect.module, suspect.tensor) == ("second", "input")


def test_rising_sharpness_is_a_signal():
    signals = Signals()
    for step in range(20):
        sharpness = 1.0 + 0.01 * (step % 2)
        assert not signals.sample([TensorStatistics(step, "", LANDSCAPE, sharpness=sharpness)])
    (signal,) = signals.sample([TensorStatistics(20, "", LANDSCAPE, sharpness=4.0)])
    assert signal.name == "sharpness"
