"""The record of a step: what happens in one forward and backward, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fp8pass.hardware import Work
from fp8pass.passes import Context


@dataclass(eq=False)
class Region:
    """A part of the model that is compiled as one graph.

    Attributes:
        path: of the module that ran it first.
        outputs: fake values of what the forward returns; whether each has a gradient.
        gm: the joint graph before any pass; None if it has no backward.
        ctx: its context.
    """

    path: str
    outputs: list[tuple[Any, bool]]
    gm: fx.GraphModule | None = None
    ctx: Context | None = None


@dataclass(frozen=True)
class Allocated:
    """A storage is there from now on."""

    storage: int
    bytes: int


@dataclass(frozen=True)
class Freed:
    """A storage is no longer needed by the model or by autograd."""

    storage: int


@dataclass(frozen=True)
class Forward:
    """A region runs forward.

    Attributes:
        call: number of the call.
        inputs: storages of its inputs, by their position; None for those that were there before.
        outputs: storages of its results.
    """

    region: Region
    call: int
    inputs: list[int | None]
    outputs: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class Backward:
    """The region of a call runs backward."""

    region: Region
    call: int


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter is final; `storage` holds it."""

    storage: int | None


@dataclass(frozen=True)
class Computed:
    """An operator has run outside of all regions."""

    work: Work


@dataclass(frozen=True)
class BackwardBegins:
    """The forward is over."""


Event = Allocated | Freed | Forward | Backward | Gradient | Computed | BackwardBegins


@dataclass
class Step:
    """What happens in one forward and backward.

    Attributes:
        events: in order.
        regions: the compiled graphs.
    """

    events: list[Event] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
