"""Find signals (numbers far from their past), and suspects (tensors that may be the cause).

A number is a signal if it is far from its past (`past.py`) both in units of noise and as a factor.
The thresholds are in `LIMITS`. They were tuned on training runs with other seeds than the runs in
`benchmarks/results/guard.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8pass.stability.guard.measurements import Reading
from fp8pass.stability.guard.past import History, Numbers, Trend, logs
from fp8pass.stability.monitor.statistics import LANDSCAPE, TensorStatistics

MOST_SUSPECTS = 5  # maximum number of suspects of an alarm


@dataclass(frozen=True)
class Limit:
    """Thresholds of a signal, in robust standard deviations and as a factor."""

    deviations: float
    factor: float

    def is_reached(self, deviations: float, factor: float) -> bool:
        return deviations >= self.deviations and factor >= self.factor


@dataclass(frozen=True)
class Signal:
    """A measured number that is far from its past values.

    A strong signal alone raises an alarm. A weak signal raises an alarm together with a signal of
    another name.
    """

    name: str  # a key of `LIMITS`
    strong: bool
    text: str  # the name and the measured value or its change, in words


@dataclass(frozen=True)
class Suspect:
    """A tensor with a norm or a statistic that is far from its earlier values."""

    module: str  # path in the model
    # A parameter, e.g. `weight`, or `gradient of weight` or `change of weight`; or
    # `TensorStatistics.tensor` of a Monitor's row.
    tensor: str
    factor: float  # relative to the median of earlier values; infinite if an element is not finite
    deviations: float  # size of the change in robust standard deviations (`past.py`)

    def __str__(self) -> str:
        return f"{self.module or 'top level'} {self.tensor} (×{self.factor:.3g})"


@dataclass(frozen=True)
class Event:
    """A detection or an action of a guard.

    `kind` is `alarm`, `confirmed` (the loss has risen after an alarm) or `false alarm`; the action
    `lower lr`, `high precision` or `roll back`; the end of a lasting action, such as `end of lower
    lr`; or `no roll back`, if no good copy exists or after `MOST_ROLLBACKS` rollbacks.
    """

    step: int  # number of optimizer steps done before the event
    kind: str
    message: str
    signals: tuple[Signal, ...] = ()  # of an alarm
    suspects: tuple[Suspect, ...] = ()  # of an alarm, the most likely first

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message}"

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Event:
        """Return the event that `dataclasses.asdict` converted to `state`."""
        signals = tuple(Signal(**s) for s in state["signals"])
        suspects = tuple(Suspect(**s) for s in state["suspects"])
        return cls(**{**state, "signals": signals, "suspects": suspects})


# For each kind of signal, the limits of weak and of strong signals.
LIMITS: dict[str, tuple[Limit, Limit]] = {
    "loss": (Limit(1.5, 1.03), Limit(3.0, 1.10)),
    "gradient norm": (Limit(4.0, 1.5), Limit(12.0, 5.0)),
    "update size": (Limit(4.0, 1.5), Limit(12.0, 5.0)),
    "weights": (Limit(20.0, 1.5), Limit(20.0, 2.0)),
    "quantization": (Limit(6.0, 4.0), Limit(20.0, 16.0)),
    "sharpness": (Limit(4.0, 2.0), Limit(12.0, 8.0)),
}
# The rise of the loss that confirms an alarm. It is lower than the limit of a strong signal,
# because the alarm is evidence already.
RISEN = Limit(2.0, 1.10)
SUSPECT = Limit(4.0, 1.5)  # from these limits on, a tensor is a suspect
# For each kind of norm of a parameter: the lower limit of the noise in the norm's logarithm.
NOISE_FLOORS = {"{}": 0.02, "gradient of {}": 0.2, "change of {}": 0.2}
Name = tuple[str, str]  # module path, and name of a parameter or another tensor

# The gradient norm that the guard measures has a separate trend: it is not measured in every step.
MEASURED_NORM = "sampled gradient norm"
STATISTICS = ("amax", "underflow", "saturation", "noise")  # compared statistics of a Monitor's row


class Signals:
    """Compares a guard's readings and a Monitor's samples with earlier readings and samples."""

    def __init__(self) -> None:
        self.has_risen = False  # the loss of the last reading is high enough to confirm an alarm
        self.rise = ""  # the rise of the loss in words, for the event
        steps = {"recent": 8, "block": 20, "blocks": 10}
        readings = {"recent": 2, "block": 8, "blocks": 5}
        self._trends = {
            "loss": Trend(**steps, floor=1e-6),
            "gradient norm": Trend(**steps, floor=0.1),
            MEASURED_NORM: Trend(**readings, floor=0.1),
            "update size": Trend(**readings, floor=0.1),
            "sharpness": Trend(recent=1, block=5, blocks=4, floor=0.1),
        }
        # For each parameter, logarithms of three numbers: the growth of its norm between readings,
        # the norm of its gradient, and its relative change.
        self._histories = {kind: History(floor) for kind, floor in NOISE_FLOORS.items()}
        self._weights: Numbers = np.empty(0)  # logarithms of parameter norms in the last reading
        self._rows = History(floor=0.2, window=20, least=5)
        self._keys: list[tuple[str, str, str]] = []  # module, tensor and scales of each row
        self._suspects: list[Suspect] = []
        self._earlier: list[Suspect] = []

    def read(self, reading: Reading, names: Sequence[Name]) -> list[Signal]:
        """Return the signals of a reading, and add the reading to the past.

        `names` are the names of the parameters in `reading.norms`.
        """
        self._earlier, self._suspects = self._suspects, []
        return [
            *self._check_loss(reading),
            *self._check_totals(reading),
            *self._check_parameters(reading.norms, names),
        ]

    def sample(self, rows: Sequence[TensorStatistics]) -> list[Signal]:
        """Return the signals of a Monitor's sample, and add the sample to the past."""
        found = list(self._check_rows([r for r in rows if r.tensor != LANDSCAPE]))
        for row in rows:
            if row.tensor == LANDSCAPE and row.sharpness > 0:
                found += self._check_trend("sharpness", [row.sharpness])
        return found

    def suspects(self) -> tuple[Suspect, ...]:
        """Return the suspects of the last two readings, the most likely first."""
        found = sorted([*self._suspects, *self._earlier], key=lambda s: -s.deviations)
        first = {(s.module, s.tensor): s for s in reversed(found)}
        return tuple(s for s in found if first[s.module, s.tensor] is s)[:MOST_SUSPECTS]

    def freeze(self, *, frozen: bool) -> None:
        """Stop or resume adding new numbers to the past."""
        for past in self._list_pasts():
            past.frozen = frozen

    def forget(self) -> None:
        for past in self._list_pasts():
            past.forget()

    def forget_recent(self) -> None:
        """Forget recent numbers. Call this after older weights were restored."""
        self._weights = np.empty(0)
        for trend in self._trends.values():
            trend.forget(recent=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "trends": {name: trend.state_dict() for name, trend in self._trends.items()},
            "histories": [history.state_dict() for history in self._histories.values()],
            "rows": self._rows.state_dict(),
            "keys": [list(key) for key in self._keys],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, trend in state["trends"].items():
            self._trends[name].load_state_dict(trend)
        for history, rows in zip(self._histories.values(), state["histories"], strict=True):
            history.load_state_dict(rows)
        self._rows.load_state_dict(state["rows"])
        self._keys = [(module, tensor, scales) for module, tensor, scales in state["keys"]]

    def _list_pasts(self) -> list[Trend | History]:
        return [*self._trends.values(), *self._histories.values(), self._rows]

    def _check_loss(self, reading: Reading) -> Iterator[Signal]:
        wrong = reading.losses[~np.isfinite(reading.losses)]
        if wrong.size:
            yield Signal("loss", strong=True, text=f"loss is {wrong[0]}")
        trend = self._trends["loss"]
        trend.extend(reading.losses)
        rise = trend.rise()
        factor = 1 + rise.difference / max(abs(rise.before), trend.floor)
        self.has_risen = wrong.size > 0 or RISEN.is_reached(rise.deviations, factor)
        now = "is not finite" if wrong.size else f"has risen to {rise.now:.4g}"
        self.rise = f"the loss {now}"
        text = f"loss {rise.now:.4g} after {rise.before:.4g}"
        yield from _make_signal("loss", rise.deviations, factor, text)

    def _check_totals(self, reading: Reading) -> Iterator[Signal]:
        weights, gradients, changes = (np.where(x >= 0, x, np.nan) for x in reading.norms)
        if reading.gradient_norms.size:
            yield from self._check_trend("gradient norm", reading.gradient_norms)
        else:
            yield from self._check_trend(MEASURED_NORM, [_add_norms(gradients)])
        moved = _add_norms(weights * changes) / max(_add_norms(weights), 1e-30)
        yield from self._check_trend("update size", [moved])

    def _check_trend(self, name: str, values: Iterable[float]) -> Iterator[Signal]:
        """Compare the logarithms of positive numbers with their past."""
        trend = self._trends[name]
        trend.extend(logs(np.array(list(values))))
        rise = trend.rise()
        name = "gradient norm" if name == MEASURED_NORM else name
        text = f"{name} ×{math.exp(rise.difference):.3g}"
        yield from _make_signal(name, rise.deviations, math.exp(rise.difference), text)

    def _check_parameters(self, norms: Numbers, names: Sequence[Name]) -> Iterator[Signal]:
        """Compare norms of parameters, gradients and updates with earlier norms. Add suspects."""
        if (broken := np.flatnonzero(~np.isfinite(norms[0]))).size:
            module, name = names[broken[0]]
            yield Signal("weights", strong=True, text=f"{module} {name} is not finite")
            if broken.size < len(names):  # otherwise the origin is unknown
                self._suspects += [Suspect(*names[int(i)], math.inf, math.inf) for i in broken]
        weights, *others = (logs(x) for x in norms)
        is_known = self._weights.shape == weights.shape
        growth = weights - self._weights if is_known else np.full(len(names), np.nan)
        self._weights = weights
        jumps = []
        for (kind, history), row in zip(self._histories.items(), (growth, *others), strict=True):
            jumps.append(history.jumps(row))
            history.push(row)
            self._add_suspects([(module, kind.format(name)) for module, name in names], *jumps[-1])
        change, deviations = jumps[0]
        i = int(np.abs(deviations).argmax())
        text = f"norm of {' '.join(names[i])} ×{math.exp(change[i]):.3g}"
        yield from _make_signal("weights", abs(deviations[i]), math.exp(abs(change[i])), text)

    def _check_rows(self, rows: Sequence[TensorStatistics]) -> Iterator[Signal]:
        """Compare statistics of quantized tensors with earlier samples. Add suspects."""
        if not rows:
            return
        keys = [(r.module, r.tensor, r.scales) for r in rows]
        if keys != self._keys:
            self._rows.forget()
            self._keys = keys
        if broken := [r for r in rows if r.nonfinite]:
            text = f"{broken[0].module} {broken[0].tensor} has elements that are not finite"
            yield Signal("quantization", strong=True, text=text)
            self._suspects += [Suspect(r.module, r.tensor, math.inf, math.inf) for r in broken]
        measured = np.concatenate([_take_logs(r) for r in rows])
        change, deviations = self._rows.jumps(measured)
        self._rows.push(measured)
        # Index of the statistic that jumped most, for each tensor.
        worst = np.abs(deviations).reshape(len(rows), -1).argmax(axis=1)
        worst += np.arange(len(rows)) * len(STATISTICS)
        self._add_suspects([(m, t) for m, t, _ in keys], change[worst], deviations[worst])
        i = int(np.abs(deviations).argmax())
        module, tensor, _ = keys[i // len(STATISTICS)]
        text = f"{STATISTICS[i % len(STATISTICS)]} of {module} {tensor} jumped"
        yield from _make_signal("quantization", abs(deviations[i]), math.exp(abs(change[i])), text)

    def _add_suspects(self, names: Sequence[Name], change: Numbers, deviations: Numbers) -> None:
        for name, log, by in zip(names, change, np.abs(deviations), strict=True):
            if SUSPECT.is_reached(by, math.exp(abs(log))):
                self._suspects.append(Suspect(*name, math.exp(log), float(by)))


def _take_logs(row: TensorStatistics) -> Numbers:
    """Return the logarithm of amax, and other statistics in the same unit.

    Underflow or saturation of a tenth of the elements, or a loss of 6 dB of SQNR, counts as much as
    an amax 4 times larger.
    """
    amax = logs(np.array([row.amax]))[0]
    others = (10 * row.underflow, 10 * row.saturated, -row.sqnr_db / 6)
    return np.array([amax, *(x * math.log(4) for x in others)])


def _make_signal(name: str, deviations: float, factor: float, text: str) -> Iterator[Signal]:
    weak, strong = LIMITS[name]
    if strong.is_reached(deviations, factor):
        yield Signal(name, strong=True, text=text)
    elif weak.is_reached(deviations, factor):
        yield Signal(name, strong=False, text=text)


def _add_norms(norms: Numbers) -> float:
    """Return the norm of all tensors together, given the norm of each tensor. NaN is ignored."""
    return float(np.sqrt(np.nansum(np.square(norms))))
