"""The update of parameters whose states are on the host: through buffers on their device.

The states of a parameter, and the parameter if only its codes are on the device, are copied in,
updated by the same kernel as others, and copied out, in pieces of consecutive elements. Nothing
else changes: the random bits of an element depend on its position in the parameter, wherever the
piece begins. Of a new weight its codes are made before it leaves.
"""

from __future__ import annotations

import math
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
from fp8pass.weights.quantized_parameter import CodedWeight


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter.

    Attributes:
        parameter: number of the parameter among those that are updated together.
        slot: the piece with what is on the host in a buffer.
        buffer: the buffer's number.
        host, device: tensors of the host, and the same in the buffer.
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
        parameters: themselves; those in codes are on the host.
        states: their entries in the optimizer's state.
        gradients: gradients with the dtypes of those in all steps.
        storage: how their states are stored.
        staging: the buffers of their device.
        fuses: whether the kernel runs there.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Sequence[Tensor],
        states: Sequence[State],
        gradients: Sequence[Tensor],
        storage: Storage,
        staging: Staging,
        *,
        fuses: bool,
    ) -> None:
        self.slots, self.storage, self.staging = slots, storage, staging
        self.coded = [p if isinstance(p, CodedWeight) else None for p in parameters]
        self.pieces = [piece for i in range(len(slots)) for piece in self._pieces(i)]
        self.fused: FusedUpdate | None = None
        if fuses:
            owners = [states[piece.parameter] for piece in self.pieces]
            parts = [piece.of(gradients[piece.parameter]) for piece in self.pieces]
            staged = [piece.slot for piece in self.pieces]
            self.fused = FusedUpdate(staged, owners, parts, storage, apart=True)

    def _pieces(self, parameter: int) -> list[Piece]:
        slot, size = self.slots[parameter], self._piece_size(parameter)
        return [
            # Parameters with one piece each take turns, too.
            self._piece(parameter, slot.piece(first, size, self.storage.group_size), i)
            for i, first in enumerate(range(0, slot.parameter.numel(), size), start=slot.number)
        ]

    def _piece_size(self, parameter: int) -> int:
        """How many elements fit into a buffer: programs of the kernel, and rows with a scale."""
        multiple = math.lcm(CHUNK, self.storage.group_size)
        if self.coded[parameter] is not None:
            multiple = math.lcm(multiple, self.slots[parameter].parameter.shape[-1])
        whole = self._on_host(parameter, self.slots[parameter])
        size = sum(x.numel() * x.itemsize for x in whole)
        return largest_piece(size / self.slots[parameter].parameter.numel(), multiple)

    def _piece(self, parameter: int, slot: Slot, turn: int) -> Piece:
        buffer, host = turn % DEPTH, self._on_host(parameter, slot)
        device = self.staging.place(buffer, host)
        staged = iter(device)
        weights = slot.parameter if self.coded[parameter] is None else next(staged)
        states = {
            name: Stored(*(None if x is None else next(staged) for x in stored))  # type: ignore[arg-type]
            for name, stored in slot.states.items()
        }
        return Piece(
            parameter, replace(slot, parameter=weights, states=states), buffer, host, device
        )

    def _on_host(self, parameter: int, slot: Slot) -> list[Tensor]:
        weights = [] if self.coded[parameter] is None else [slot.parameter]
        states = (x for stored in slot.states.values() for x in stored if x is not None)
        return [*weights, *states]

    def step(self, gradients: Sequence[Tensor], group: dict[str, Any], control: Tensor) -> None:
        """Update with gradients times `control[0]`; do nothing if `control[1]` is not 0."""
        self.staging.begin([control], gradients)
        with self.staging.computing():
            parts = [piece.of(gradients[piece.parameter]) for piece in self.pieces]
            launches = self._launches(parts, group, control)
        for piece, launch in zip(self.pieces, launches, strict=True):
            into = list(zip(piece.host, piece.device, strict=True))
            out = list(zip(piece.device, piece.host, strict=True))
            self.staging.run(piece.buffer, into, launch, out, self._coding(piece))
        for weight in self.coded:
            if weight is not None:
                weight.mark_quantized()

    def _coding(self, piece: Piece) -> Callable[[], object] | None:
        """Makes codes of new weights, if the device has these alone."""
        if (weight := self.coded[piece.parameter]) is None:
            return None
        row = weight.shape[-1]
        rows = piece.slot.parameter.view(-1, row)
        return partial(weight.code_again, piece.slot.first // row, rows)

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
