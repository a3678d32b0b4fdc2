"""Which numbers of a reading are not as they were: the signals, and the tensors that are suspect.

Every number is compared with its own past (`trend.py`, `history.py`), and has to be far from it
both in units of its noise and as a factor. `LIMITS` has the thresholds; they were set on training
runs of other seeds than those that `benchmarks/results/guard.json` reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8pass.stability.guard.events import Signal, Suspect
from fp8pass.stability.guard.history import History, Numbers, logs
from fp8pass.stability.guard.readings import Reading
from fp8pass.stability.guard.trend import Trend
from fp8pass.stability.monitor.statistics import LANDSCAPE, Row

LISTED = 5  # suspects of an alarm


@dataclass(frozen=True)
class Limit:
    """What makes a number a signal: both, as robust deviations and as a factor."""

    deviations: float
    factor: float

    def exceeded(self, deviations: float, factor: float) -> bool:
        """Whether a number is over the limit."""
        return deviations >= self.deviations and factor >= self.factor


# Of each signal, weak and strong.
LIMITS: dict[str, tuple[Limit, Limit]] = {
    "loss": (Limit(1.5, 1.03), Limit(3.0, 1.10)),
    "gradient norm": (Limit(4.0, 1.5), Limit(12.0, 5.0)),
    "update size": (Limit(4.0, 1.5), Limit(12.0, 5.0)),
    "weights": (Limit(20.0, 1.5), Limit(20.0, 2.0)),
    "quantization": (Limit(6.0, 4.0), Limit(20.0, 16.0)),
    "sharpness": (Limit(4.0, 2.0), Limit(12.0, 8.0)),
}
# By so much has the loss risen after an alarm, which is evidence already.
RISEN = Limit(2.0, 1.10)
SUSPECT = Limit(4.0, 1.5)
# What is compared of each parameter, with the least noise of its logarithm.
WEIGHT = "{}"
KINDS = {WEIGHT: 0.02, "gradient of {}": 0.2, "change of {}": 0.2}
Name = tuple[str, str]  # a module, and a parameter or another tensor of it

SAMPLED = "sampled gradient norm"
SHOWN = {SAMPLED: "gradient norm"}
STATISTICS = ("amax", "underflow", "saturation", "noise")  # of a Monitor's rows


class Signals:
    """Compares readings and samples with the past.

    Attributes:
        has_risen: whether the loss, in the last reading, is so high that an alarm was right.
        rise: that in words.
    """

    def __init__(self) -> None:
        self.has_risen, self.rise = False, ""
        steps = {"recent": 8, "block": 20, "blocks": 10}
        readings = {"recent": 2, "block": 8, "blocks": 5}
        self._trends = {
            "loss": Trend(**steps, floor=1e-6),
            "gradient norm": Trend(**steps, floor=0.1),
            SAMPLED: Trend(**readings, floor=0.1),
            "update size": Trend(**readings, floor=0.1),
            "sharpness": Trend(recent=1, block=5, blocks=4, floor=0.1),
        }
        # Growth between readings, gradients, and changes of each parameter, in logarithms.
        self._histories = {kind: History(floor) for kind, floor in KINDS.items()}
        self._weights: Numbers = np.empty(0)  # logarithms of norms in the last reading
        self._rows = History(floor=0.2, window=20, least=5)
        self._keys: list[tuple[str, str, str]] = []  # of the rows: module, tensor and scales
        self._suspects: list[Suspect] = []
        self._earlier: list[Suspect] = []

    def read(self, reading: Reading, names: Sequence[Name]) -> list[Signal]:
        """The signals of a reading of the named parameters, which then belongs to the past."""
        self._earlier, self._suspects = self._suspects, []
        return [
            *self._of_loss(reading),
            *self._of_totals(reading),
            *self._of_weights(reading.norms, names),
        ]

    def sample(self, rows: Sequence[Row]) -> list[Signal]:
        """The signals of a Monitor's sample, which then belongs to the past."""
        found = list(self._of_rows([r for r in rows if r.tensor != LANDSCAPE]))
        for row in rows:
            if row.tensor == LANDSCAPE and row.sharpness > 0:
                found += self._of_trend("sharpness", [row.sharpness])
        return found

    def suspects(self) -> tuple[Suspect, ...]:
        """Tensors that changed lately, the most likely first."""
        found = sorted([*self._suspects, *self._earlier], key=lambda s: -s.deviations)
        first = {(s.module, s.tensor): s for s in reversed(found)}
        return tuple(s for s in found if first[s.module, s.tensor] is s)[:LISTED]

    def freeze(self, *, frozen: bool) -> None:
        """Keep what comes out of the past, or no longer."""
        for past in self._all():
            past.frozen = frozen

    def forget(self) -> None:
        """Begin a new past."""
        for past in self._all():
            past.forget()

    def rolled_back(self) -> None:
        """Weights are those of the past again: recent numbers say nothing about them."""
        self._weights = np.empty(0)
        for trend in self._trends.values():
            trend.forget(recent=True)

    def state_dict(self) -> dict[str, Any]:
        """The past, for a checkpoint."""
        return {
            "trends": {name: trend.state_dict() for name, trend in self._trends.items()},
            "histories": [history.state_dict() for history in self._histories.values()],
            "rows": self._rows.state_dict(),
            "keys": [list(key) for key in self._keys],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the past of a checkpoint."""
        for name, trend in state["trends"].items():
            self._trends[name].load_state_dict(trend)
        for history, rows in zip(self._histories.values(), state["histories"], strict=True):
            history.load_state_dict(rows)
        self._rows.load_state_dict(state["rows"])
        self._keys = [(module, tensor, scales) for module, tensor, scales in state["keys"]]

    def _all(self) -> list[Trend | History]:
        return [*self._trends.values(), *self._histories.values(), self._rows]

    def _of_loss(self, reading: Reading) -> Iterator[Signal]:
        wrong = reading.losses[~np.isfinite(reading.losses)]
        if wrong.size:
            yield Signal("loss", strong=True, text=f"loss is {wrong[0]}")
        trend = self._trends["loss"]
        trend.extend(reading.losses)
        rise = trend.rise()
        factor = 1 + rise.difference / max(abs(rise.before), trend.floor)
        self.has_risen = wrong.size > 0 or RISEN.exceeded(rise.deviations, factor)
        now = "is not finite" if wrong.size else f"has risen to {rise.now:.4g}"
        self.rise = f"the loss {now}"
        text = f"loss {rise.now:.4g} after {rise.before:.4g}"
        yield from _signal("loss", rise.deviations, factor, text)

    def _of_totals(self, reading: Reading) -> Iterator[Signal]:
        """Of all parameters together: their gradients and changes."""
        weights, gradients, changes = (np.where(x >= 0, x, np.nan) for x in reading.norms)
        if reading.gradient_norms.size:
            yield from self._of_trend("gradient norm", reading.gradient_norms)
        else:
            yield from self._of_trend(SAMPLED, [_length(gradients)])
        moved = _length(weights * changes) / max(_length(weights), 1e-30)
        yield from self._of_trend("update size", [moved])

    def _of_trend(self, name: str, values: Iterable[float]) -> Iterator[Signal]:
        """Of a positive number, by its logarithm."""
        trend = self._trends[name]
        trend.extend(logs(np.array(list(values))))
        rise = trend.rise()
        shown = SHOWN.get(name, name)
        text = f"{shown} ×{math.exp(rise.difference):.3g}"
        yield from _signal(shown, rise.deviations, math.exp(rise.difference), text)

    def _of_weights(self, norms: Numbers, names: Sequence[Name]) -> Iterator[Signal]:
        """Of single parameters, their gradients and changes; those that jumped are suspects."""
        if (broken := np.flatnonzero(~np.isfinite(norms[0]))).size:
            module, name = names[broken[0]]
            yield Signal("weights", strong=True, text=f"{module} {name} is not finite")
            if broken.size < len(names):  # else they say nothing about where it began
                self._suspects += [Suspect(*names[int(i)], math.inf, math.inf) for i in broken]
        weights, *others = (logs(x) for x in norms)
        is_known = self._weights.shape == weights.shape
        growth = weights - self._weights if is_known else np.full(len(names), np.nan)
        self._weights = weights
        jumps = []
        for (kind, history), row in zip(self._histories.items(), (growth, *others), strict=True):
            jumps.append(history.jumps(row))
            history.push(row)
            self._suspect([(module, kind.format(name)) for module, name in names], *jumps[-1])
        change, deviations = jumps[0]
        i = int(np.abs(deviations).argmax())
        text = f"norm of {' '.join(names[i])} ×{math.exp(change[i]):.3g}"
        yield from _signal("weights", abs(deviations[i]), math.exp(abs(change[i])), text)

    def _of_rows(self, rows: Sequence[Row]) -> Iterator[Signal]:
        """Of quantized tensors: amax, what becomes zero, what is the largest code, and noise."""
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
        measured = np.concatenate([_logarithms(r) for r in rows])
        change, deviations = self._rows.jumps(measured)
        self._rows.push(measured)
        # Of each tensor the statistic that jumped most.
        worst = np.abs(deviations).reshape(len(rows), -1).argmax(axis=1)
        worst += np.arange(len(rows)) * len(STATISTICS)
        self._suspect([(m, t) for m, t, _ in keys], change[worst], deviations[worst])
        i = int(np.abs(deviations).argmax())
        module, tensor, _ = keys[i // len(STATISTICS)]
        text = f"{STATISTICS[i % len(STATISTICS)]} of {module} {tensor} jumped"
        yield from _signal("quantization", abs(deviations[i]), math.exp(abs(change[i])), text)

    def _suspect(self, names: Sequence[Name], change: Numbers, deviations: Numbers) -> None:
        for name, log, by in zip(names, change, np.abs(deviations), strict=True):
            if SUSPECT.exceeded(by, math.exp(abs(log))):
                self._suspects.append(Suspect(*name, math.exp(log), float(by)))


def _logarithms(row: Row) -> Numbers:
    """Statistics of a row as logarithms: 6 dB, or a tenth of all elements, count as a factor 4."""
    amax = logs(np.array([row.amax]))[0]
    others = (10 * row.underflow, 10 * row.saturated, -row.sqnr_db / 6)
    return np.array([amax, *(x * math.log(4) for x in others)])


def _signal(name: str, deviations: float, factor: float, text: str) -> Iterator[Signal]:
    """The signal of a number, if it is over a limit."""
    weak, strong = LIMITS[name]
    if strong.exceeded(deviations, factor):
        yield Signal(name, strong=True, text=text)
    elif weak.exceeded(deviations, factor):
        yield Signal(name, strong=False, text=text)


def _length(norms: Numbers) -> float:
    """The norm of all, of what is there."""
    return float(np.sqrt(np.nansum(np.square(norms))))
