"""What a guard notices and does, as a record: alarms, actions, and what became of alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Signal:
    """A number that is not as it was.

    Attributes:
        name: `loss`, `gradient norm`, `update size`, `weights`, `quantization`, `sharpness`.
        strong: whether it is an alarm by itself; others are one together.
        text: what was measured, and what is usual.
    """

    name: str
    strong: bool
    text: str


@dataclass(frozen=True)
class Suspect:
    """A tensor that changed, beside its own past.

    Attributes:
        module: path of the module in the model.
        tensor: the tensor of the module: the name of a parameter, `gradient of` or `change of` it,
            or the tensor of a Monitor's row.
        factor: what its norm, or amax, is multiplied by; infinite where it is not finite.
        deviations: that change in robust standard deviations.
    """

    module: str
    tensor: str
    factor: float
    deviations: float

    def __str__(self) -> str:
        return f"{self.module or 'top level'} {self.tensor} (×{self.factor:.3g})"


@dataclass(frozen=True)
class Event:
    """What a guard noticed or did.

    Attributes:
        step: number of optimizer steps when it did.
        kind: `alarm`; what became of it: `confirmed`, the loss has risen, or `false alarm`; an
            action: `lower lr`, `high precision`, `roll back`; `end of` a lasting one; `no roll
            back`, where there was nothing to roll back to.
        message: the event in words.
        signals: of an alarm.
        suspects: of an alarm, the most likely first.
    """

    step: int
    kind: str
    message: str
    signals: tuple[Signal, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        """Numbers and text alone, for a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Event:
        """The event of `as_dict`."""
        signals = tuple(Signal(**s) for s in state["signals"])
        suspects = tuple(Suspect(**s) for s in state["suspects"])
        return cls(**{**state, "signals": signals, "suspects": suspects})
