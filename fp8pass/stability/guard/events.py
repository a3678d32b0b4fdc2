"""Records of a guard's detections and actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Signal:
    """A measured number that is far from its past values.

    Attributes:
        name: `loss`, `gradient norm`, `update size`, `weights`, `quantization`, `sharpness`.
        strong: whether the signal alone raises an alarm. A weak signal raises an alarm together
            with a signal of another name.
        text: the name and the measured value or its change, in words.
    """

    name: str
    strong: bool
    text: str


@dataclass(frozen=True)
class Suspect:
    """A tensor with a norm or statistics far from their earlier values.

    Attributes:
        module: path of the module in the model.
        tensor: name of a parameter, e.g. `weight`, or `gradient of weight` or `change of weight`;
            or `TensorStatistics.tensor` of a Monitor's row.
        factor: new value divided by the median of earlier values; infinite if the tensor is not
            finite.
        deviations: size of the change in robust standard deviations (`past.py`).
    """

    module: str
    tensor: str
    factor: float
    deviations: float

    def __str__(self) -> str:
        return f"{self.module or 'top level'} {self.tensor} (×{self.factor:.3g})"


@dataclass(frozen=True)
class Event:
    """A detection or an action of a guard.

    Attributes:
        step: number of optimizer steps done before the event.
        kind: `alarm`, `confirmed` (the loss has risen after an alarm) or `false alarm`; the action
            `lower lr`, `high precision` or `roll back`; the end of a lasting action, such as `end
            of lower lr`; or `no roll back`, if no good copy exists or after `MOST_ROLLBACKS`
            rollbacks.
        message: the event in words.
        signals: signals of an alarm.
        suspects: suspects of an alarm, the most likely first.
    """

    step: int
    kind: str
    message: str
    signals: tuple[Signal, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message}"

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Event:
        """Return the event that `dataclasses.asdict` converted to `state`."""
        signals = tuple(Signal(**s) for s in state["signals"])
        suspects = tuple(Suspect(**s) for s in state["suspects"])
        return cls(**{**state, "signals": signals, "suspects": suspects})
