"""The update of parameters whose states are on the host: through buffers on their device.

The states of a parameter are copied in, updated by the same kernel as others, and copied out, in
pieces of consecutive elements. Nothing else changes: the random bits of an element depend on its
position in the parameter, wherever the piece begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from fp8pass.optim.fused import FusedUpdate
from fp8pass.optim.groups import Stored
from fp8pass.optim.kernel import CHUNK
from fp8pass.optim.options import Storage
from fp8pass.optim.slots import Slot, State
from fp8pass.optim.staging import DEPTH, Staging, largest_piece
from fp8pass.optim.update import update


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter.

    Attributes:
        parameter: number of the parameter among those that are updated together.
        slot: the piece with its states in a buffer.
        buffer: the buffer's number.
        host, device: the states' tensors, there and in the buffer.
    """

    parameter: int
    slot: Slot
    buffer: int
    host: list[Tensor]
    device: list[Tensor]

    def of(self, x: Tensor) -> Tensor:
        """These elements of a tensor that is shaped like the parameter."""
        return x.reshape(-1)[self.slot.first : self.slot.first + self.slot.parameter.numel()]


class StreamedUpdate:
    """Updates the same parameters in every step.

    Args:
        slots: the parameters, of one dtype on one device, contiguous, with states on the host.
        states: their entries in the optimizer's state.
        gradients: gradients with the dtypes of those in all steps.
        storage: how their states are stored.
        staging: the buffers of their device.
        fuses: whether the kernel runs there.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        states: Sequence[State],
        gradients: Sequence[Tensor],
        storage: Storage,
        staging: Staging,
        *,
        fuses: bool,
    ) -> None:
        self.slots, self.storage, self.staging = slots, storage, staging
        size = largest_piece(_state_bytes(slots[0]), max(CHUNK, storage.group_size))
        self.pieces = [
            piece for i, slot in enumerate(slots) for piece in self._pieces(i, slot, size)
        ]
        self.fused: FusedUpdate | None = None
        if fuses:
            owners = [states[piece.parameter] for piece in self.pieces]
            parts = [piece.of(gradients[piece.parameter]) for piece in self.pieces]
            staged = [piece.slot for piece in self.pieces]
            self.fused = FusedUpdate(staged, owners, parts, storage, apart=True)

    def _pieces(self, parameter: int, slot: Slot, size: int) -> list[Piece]:
        found = []
        for i, first in enumerate(range(0, slot.parameter.numel(), size)):
            piece = slot.piece(first, size, self.storage.group_size)
            # Parameters with one piece each take turns, too.
            buffer = (slot.number + i) % DEPTH
            host = [x for stored in piece.states.values() for x in stored if x is not None]
            device = self.staging.place(buffer, host)
            staged = iter(device)
            states = {
                name: Stored(*(None if x is None else next(staged) for x in stored))  # type: ignore[arg-type]
                for name, stored in piece.states.items()
            }
            piece = replace(piece, states=states)
            found.append(Piece(parameter, piece, buffer, host, device))
        return found

    def step(self, gradients: Sequence[Tensor], group: dict[str, Any], control: Tensor) -> None:
        """Update with gradients times `control[0]`; do nothing if `control[1]` is not 0."""
        self.staging.begin([*gradients, control])
        with self.staging.computing():
            parts = [piece.of(gradients[piece.parameter]) for piece in self.pieces]
            launches = self._launches(parts, group, control)
        for piece, launch in zip(self.pieces, launches, strict=True):
            into = list(zip(piece.host, piece.device, strict=True))
            out = list(zip(piece.device, piece.host, strict=True))
            self.staging.run(piece.buffer, into, launch, out)

    def _launches(
        self, gradients: list[Tensor], group: dict[str, Any], control: Tensor
    ) -> list[Callable[[], object]]:
        if self.fused is not None:
            return list(self.fused.prepared(gradients, group, control))
        for slot in self.slots:
            slot.step.add_(1)
        return [
            partial(update, [piece.slot], [gradient], group, self.storage, control[0])
            for piece, gradient in zip(self.pieces, gradients, strict=True)
        ]


def _state_bytes(slot: Slot) -> float:
    """Bytes of the states of an element."""
    tensors = [x for stored in slot.states.values() for x in stored if x is not None]
    return sum(x.numel() * x.itemsize for x in tensors) / slot.parameter.numel()
