"""Prepared updates: with the fused kernel (`FusedUpdate`), and of offloaded states.

`FusedUpdate` launches one kernel for all parameters of a dtype. Tables on the device have the
addresses of parameters and states. A step rewrites only changed addresses of gradients, so the CPU
never waits for the GPU.

`StreamedUpdate` copies offloaded states through staging buffers in pieces. Tables have the address
that element 0 of the parameter would have, so positions select the same random bits, and results
equal an update of the whole parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim import rounding, state_formats
from fp8pass.optim.group_options import PARAMETER, Storage
from fp8pass.optim.kernel import CHUNK, LAUNCH, kernel, table_columns
from fp8pass.optim.offload import DEPTH, Copies, Staging, largest_piece
from fp8pass.optim.slots import Slot
from fp8pass.optim.state_formats import Quantized
from fp8pass.optim.update import Group, Rule, Tensors, factors, update_eagerly

Launches = Sequence[Callable[[], object]]
# For vectors, addresses (bytes) and sizes (elements) are multiples of this.
VECTOR_ALIGNMENT = 16


class FusedUpdate:
    """Updates `slots` with the Triton kernel. Each program of the kernel updates a chunk of a slot.

    The step counts in `optimizer.state` become views of one tensor. Slots have contiguous
    parameters of one dtype on one device. Gradients of every step have the dtypes of `gradients`.
    With `separate`, each slot has its own launch.
    """

    def __init__(
        self, slots: Sequence[Slot], gradients: Tensors, storage: Storage, *, separate: bool = False
    ) -> None:
        first = slots[0].parameter
        self.device, self.storage = first.device, storage
        self.steps = torch.stack([slot.step for slot in slots])
        for slot, step in zip(slots, self.steps, strict=True):
            slot.entries["step"] = step
        self.firsts = [s.first for s in slots]
        self.sizes = self._tensor([s.first + s.parameter.numel() for s in slots], torch.int64)
        self.numbers = self._tensor([s.number for s in slots], torch.int32)
        self.tables = self._tensor(self._addresses(slots), torch.int64).t().contiguous()
        self.gradients = torch.zeros_like(self.sizes)
        # Replays of a CUDA graph read this buffer.
        pin = self.device.type == "cuda"
        self.captured = torch.empty(len(slots), dtype=torch.int64, pin_memory=pin)
        self.pointers: list[int] = []
        self.gradients_aligned = False
        self.first_chunk = self._tensor([0] * len(slots), torch.int32)
        self.launches = self._make_launches(slots, gradients, separate=separate)
        # Otherwise the kernel does not read the tensor.
        self.values = [
            state_formats.values_of(format, self.device) if format.values else self.steps
            for format in storage.moments.values()
        ]

    def step(self, gradients: Tensors, group: Group, control: Tensor) -> None:
        for launch in self.prepare(gradients, group, control):
            launch()

    def prepare(self, gradients: Tensors, group: Group, control: Tensor) -> Launches:
        """Increment step counts, and return the launches of this step."""
        self._set_gradients(gradients)
        self.steps.add_(1 - control[1])
        table = torch.stack(factors(group, self.steps))
        beta1, beta2 = map(float, group["betas"])  # Triton would recompile for an int
        seed = rounding.wrap_to_int32(group["seed"])
        numbers = (len(self.steps), seed, 1 - beta1, beta2, 1 - beta2, float(group["eps"]))

        def launch(function: Any, parameter_of: Tensor, aligned: bool) -> None:
            of_parameters = (self.tables, self.gradients, self.sizes, self.numbers, self.steps)
            of_step = (table, control, parameter_of, self.first_chunk, *self.values, *numbers)
            options = {"ALIGNED": aligned and self.gradients_aligned, **LAUNCH}
            with torch.cuda.device_of(self.steps):
                function[(len(parameter_of),)](*of_parameters, *of_step, **options)

        return [partial(launch, *each) for each in self.launches]

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _addresses(self, slots: Sequence[Slot]) -> list[list[int]]:
        """Return a list of addresses for each column of the table."""
        dtype, size = slots[0].parameter.dtype, self.storage.group_size
        rows = {PARAMETER: [_address_of_element_0(s.parameter, s.first) for s in slots]}
        for name, format in self.storage.states(dtype).items():
            rows[name] = [_address_of_element_0(s.states[name].data, s.first) for s in slots]
            for part in format.parts:
                rows[f"{name}_{part}"] = [
                    _address_of_element_0(getattr(s.states[name], part), s.first // size)
                    for s in slots
                ]
        return [rows[name] for name in table_columns(self.storage, dtype)]

    def _make_launches(
        self, slots: Sequence[Slot], gradients: Tensors, *, separate: bool
    ) -> list[tuple[Any, Tensor, bool]]:
        """Return kernel, slot index of each program, and whether sizes allow vectors."""
        batches: dict[Any, list[int]] = defaultdict(list)
        for i, (slot, gradient) in enumerate(zip(slots, gradients, strict=True)):
            batches[gradient.dtype, _is_aligned(slot), i if separate else 0].append(i)
        first_chunk, launches = [0] * len(slots), []
        for (dtype, aligned, _), members in batches.items():
            counts, begun = [], 0
            for i in members:
                first_chunk[i] = begun - slots[i].first // CHUNK
                counts.append(-(-slots[i].parameter.numel() // CHUNK))
                begun += counts[-1]
            if begun:
                columns = self._tensor(members, torch.int32)
                parameter_of = columns.repeat_interleave(self._tensor(counts, torch.int64))
                function = kernel(self.storage, slots[0].parameter.dtype, dtype)
                launches.append((function, parameter_of, aligned))
        self.first_chunk.copy_(self._tensor(first_chunk, torch.int32))
        return launches

    def _set_gradients(self, gradients: Tensors) -> None:
        """Write only changed addresses."""
        pairs = zip(gradients, self.firsts, strict=True)
        pointers = [_address_of_element_0(g, first) for g, first in pairs]
        if pointers == self.pointers:
            return
        self.pointers = pointers
        self.gradients_aligned = all(pointer % VECTOR_ALIGNMENT == 0 for pointer in pointers)
        addresses = torch.tensor(pointers, dtype=torch.int64)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            addresses = self.captured.copy_(addresses)
        self.gradients.copy_(addresses, non_blocking=True)


def _address_of_element_0(part: Tensor, first: int) -> int:
    """Return the address of a tensor whose `part` starts at element `first`."""
    return part.data_ptr() - first * part.itemsize


def _is_aligned(slot: Slot) -> bool:
    tensors = [slot.parameter, *(stored.data for stored in slot.states.values())]
    pointers = (x.data_ptr() % VECTOR_ALIGNMENT == 0 for x in tensors)
    return slot.parameter.numel() % VECTOR_ALIGNMENT == 0 and all(pointers)


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter with offloaded states."""

    parameter: int  # index among the parameters that are updated together
    slot: Slot  # offloaded tensors are in a staging buffer
    buffer: int  # index of the staging buffer
    into: Copies  # host memory -> buffer
    out: Copies  # buffer -> host memory
    requantize: Callable[[], object] | None  # writes the FP8 data of offloaded weights


class StreamedUpdate:
    """Updates `slots` with states in host memory.

    `rule` is for `update_eagerly`. Without `rule`, the Triton kernel runs.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        gradients: Tensors,
        storage: Storage,
        staging: Staging,
        rule: Rule | None,
    ) -> None:
        self.slots, self.storage, self.staging, self.rule = slots, storage, staging, rule
        self.pieces = [piece for i, slot in enumerate(slots) for piece in self._divide(i, slot)]
        if rule is None:
            staged, parts = [piece.slot for piece in self.pieces], self._divide_gradients(gradients)
            self.fused = FusedUpdate(staged, parts, storage, separate=True)

    def _divide(self, parameter: int, slot: Slot) -> list[Piece]:
        """Divide a slot into pieces that fit into a buffer, of whole chunks, groups and rows."""
        weight, group_size = slot.offloaded, self.storage.group_size
        row = 1 if weight is None else weight.shape[-1]
        count = slot.parameter.numel()
        nbytes = sum(x.numel() * x.itemsize for x in _host_tensors(slot))
        size = largest_piece(nbytes / count, math.lcm(CHUNK, group_size, row))
        pieces = []
        # Parameters of one piece would otherwise all use the same buffer.
        for turn, first in enumerate(range(0, count, size), start=slot.number):
            part, buffer = slot.narrow(first, size, group_size), turn % DEPTH
            host = _host_tensors(part)
            device = self.staging.allocate(buffer, host)
            staged, weights, requantize = iter(device), part.parameter, None
            if weight is not None:
                weights = next(staged)
                requantize = partial(weight.requantize, part.first // row, weights.view(-1, row))
            states = {
                name: Quantized(*(None if x is None else next(staged) for x in stored))  # type: ignore[arg-type]
                for name, stored in part.states.items()
            }
            part = replace(part, parameter=weights, states=states)
            into = list(zip(host, device, strict=True))
            out = list(zip(device, host, strict=True))
            pieces.append(Piece(parameter, part, buffer, into, out, requantize))
        return pieces

    def step(self, gradients: Tensors, group: Group, control: Tensor) -> None:
        self.staging.begin([control], gradients)
        with self.staging.on_compute_stream():
            launches = self._prepare(self._divide_gradients(gradients), group, control)
        for piece, launch in zip(self.pieces, launches, strict=True):
            self.staging.run(piece.buffer, piece.into, launch, piece.out, piece.requantize)
        for slot in self.slots:
            if slot.offloaded is not None:
                slot.offloaded.mark_quantized()

    def _prepare(self, parts: Tensors, group: Group, control: Tensor) -> Launches:
        if self.rule is None:
            return self.fused.prepare(parts, group, control)
        return [
            partial(update_eagerly, [x.slot], self.storage, self.rule, [part], group, control)
            for x, part in zip(self.pieces, parts, strict=True)
        ]

    def _divide_gradients(self, gradients: Tensors) -> list[Tensor]:
        """Select each piece's elements, given gradients shaped like the parameters."""
        return [
            gradients[x.parameter].reshape(-1)[x.slot.first :][: x.slot.parameter.numel()]
            for x in self.pieces
        ]


def _host_tensors(slot: Slot) -> list[Tensor]:
    states = [x for stored in slot.states.values() for x in stored if x is not None]
    return states if slot.offloaded is None else [slot.parameter, *states]
