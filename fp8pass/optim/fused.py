"""Prepared updates: `FusedUpdate` launches a kernel, `StreamedUpdate` streams offloaded states.

`FusedUpdate` launches one kernel for all parameters of a dtype. Tables on the device contain the
addresses of parameters and states. A step rewrites the addresses of gradients and of Muon's
directions only if they have changed. The CPU never waits for the GPU.

`StreamedUpdate` copies offloaded states through staging buffers in pieces. The address of a piece
in the tables is its address in the buffer, minus the offset of its first element in the parameter.
So the position of an element selects the same random bits as in an update of the whole parameter.
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
from fp8pass.optim.kernel import CHUNK, LAUNCH, FusedRule, kernel, table_columns
from fp8pass.optim.offload import DEPTH, Copies, Staging, largest_piece
from fp8pass.optim.slots import Slot
from fp8pass.optim.state_formats import Quantized
from fp8pass.optim.update import Group, Rule, Tensors, update_eagerly

Launches = Sequence[Callable[[], object]]
# Vectorized loads and stores need addresses (in bytes) and sizes (in elements) that are multiples
# of this number.
VECTOR_ALIGNMENT = 16
# Largest number of captures of a step in CUDA graphs without an eager step between them.
CAPTURES = 8


class FusedUpdate:
    """Updates `slots` with a Triton kernel. Each program of the kernel updates a chunk of a slot.

    The step counts in `optimizer.state` become views of one tensor. Slots have contiguous
    parameters of one dtype on one device. Gradients of every step have the dtypes of `gradients`.
    With `separate`, each slot has its own launch. `after` is an update of the same slots that runs
    earlier in each step and increments the step counts.
    """

    def __init__(
        self,
        rule: FusedRule,
        slots: Sequence[Slot],
        gradients: Tensors,
        storage: Storage,
        *,
        separate: bool = False,
        after: FusedUpdate | None = None,
    ) -> None:
        first = slots[0].parameter
        self.rule, self.device, self.storage = rule, first.device, storage
        self.counts_steps = after is None
        self.steps: Tensor = after.steps if after else torch.stack([slot.step for slot in slots])
        for slot, step in zip(slots, self.steps, strict=True):
            slot.entries["step"] = step
        shapes = [(s.shape[0], math.prod(s.shape[1:])) if s.shape else (1, 1) for s in slots]
        self.shapes = self._tensor(shapes, torch.float64)
        self.firsts = [s.first for s in slots]
        self.sizes = self._tensor([s.first + s.parameter.numel() for s in slots], torch.int64)
        self.numbers = self._tensor([s.number for s in slots], torch.int32)
        self.tables = self._tensor(self._addresses(slots), torch.int64).t().contiguous()
        count = len(slots) * (2 if rule.result else 1)
        self.addresses = self._tensor([0] * count, torch.int64)
        # Replays of a CUDA graph read the addresses of the captured step from pinned memory. Such
        # memory cannot be allocated during a capture, so there is a row for each later capture.
        self.pinned = [self._pin_memory()]
        self.captures = 0
        self.pointers: list[int] = []
        self.are_aligned = False  # whether the tensors at `addresses` are aligned
        self.first_chunk = self._tensor([0] * len(slots), torch.int32)
        self.launches = self._make_launches(slots, gradients, separate=separate)
        # The kernel reads these tensors only for formats with a table of values.
        self.values = [
            state_formats.values_of(format, self.device) if format.values else self.steps
            for format in storage.moments.values()
        ]

    def step(
        self, gradients: Tensors, group: Group, control: Tensor, results: Tensors = ()
    ) -> None:
        """Update all slots, and write `results` if the rule has a result."""
        for launch in self.prepare(gradients, group, control, results):
            launch()

    def prepare(
        self, gradients: Tensors, group: Group, control: Tensor, results: Tensors = ()
    ) -> Launches:
        """Increment step counts, and return the launches of this step."""
        self._set_addresses([*gradients, *results])
        if self.counts_steps:
            self.steps.add_(1 - control[1])
        factors = self.rule.factors(group, self.steps, self.shapes)
        seed = rounding.wrap_to_int32(group["seed"])
        numbers = [find(group) for find in self.rule.numbers.values()]

        def launch(function: Any, parameter_of: Tensor, aligned: bool) -> None:
            of_parameters = (self.tables, self.addresses, self.sizes, self.numbers, self.steps)
            of_step = (factors, control, parameter_of, self.first_chunk, *self.values)
            options = {"ALIGNED": aligned and self.are_aligned, **LAUNCH}
            arguments = (*of_parameters, *of_step, len(self.steps), seed, *numbers)
            with torch.cuda.device_of(self.steps):
                function[(len(parameter_of),)](*arguments, **options)

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
        """Return the launches: kernel, slot index of each program, and whether slots are aligned.

        Programs of aligned slots use vectorized loads and stores.
        """
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
                function = kernel(self.rule, self.storage, slots[0].parameter.dtype, dtype)
                launches.append((function, parameter_of, aligned))
        self.first_chunk.copy_(self._tensor(first_chunk, torch.int32))
        return launches

    def _set_addresses(self, tensors: Tensors) -> None:
        """Write the addresses of `tensors` (gradients and results) if they have changed.

        For a slice, this is the address of element 0 of the whole tensor.
        """
        firsts = self.firsts * (len(tensors) // len(self.firsts))
        pointers = [_address_of_element_0(x, n) for x, n in zip(tensors, firsts, strict=True)]
        is_capturing = _is_capturing(self.device)
        # Replays write the addresses of the captured step, which an eager step must replace.
        if pointers == self.pointers and not is_capturing and not self.captures:
            return
        self.pointers = pointers
        self.are_aligned = all(pointer % VECTOR_ALIGNMENT == 0 for pointer in pointers)
        addresses = torch.tensor(pointers, dtype=torch.int64)
        if is_capturing:
            row = self.captures % CAPTURES
            if self.captures == CAPTURES * len(self.pinned):
                raise RuntimeError(
                    f"optimizer.step() was captured in {CAPTURES} CUDA graphs in a row. Run a step "
                    "without capturing it before the next capture."
                )
            addresses = self.pinned[-1][row].copy_(addresses)
            self.captures += 1
        elif self.captures == CAPTURES * len(self.pinned):
            self.pinned.append(self._pin_memory())
        self.addresses.copy_(addresses, non_blocking=True)

    def _pin_memory(self) -> Tensor:
        pin = self.device.type == "cuda"
        return torch.empty(CAPTURES, len(self.addresses), dtype=torch.int64, pin_memory=pin)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _address_of_element_0(part: Tensor, first: int) -> int:
    """Return the address of element 0 of a tensor, given its `part` that starts at `first`."""
    return part.data_ptr() - first * part.itemsize


def _is_aligned(slot: Slot) -> bool:
    tensors = [slot.parameter, *(stored.data for stored in slot.states.values())]
    pointers = (x.data_ptr() % VECTOR_ALIGNMENT == 0 for x in tensors)
    return slot.parameter.numel() % VECTOR_ALIGNMENT == 0 and all(pointers)


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter with offloaded states."""

    parameter: int  # index among the parameters that are updated together
    slot: Slot  # its offloaded tensors are views of the staging buffer
    buffer: int  # index of the staging buffer
    into: Copies  # host memory -> buffer
    out: Copies  # buffer -> host memory
    requantize: Callable[[], object] | None  # writes the FP8 data of offloaded weights


class StreamedUpdate:
    """Updates `slots` with states in host memory, eagerly or with a Triton kernel."""

    def __init__(
        self,
        slots: Sequence[Slot],
        gradients: Tensors,
        storage: Storage,
        staging: Staging,
        rule: Rule | FusedRule,
    ) -> None:
        self.slots, self.storage, self.staging, self.rule = slots, storage, staging, rule
        self.pieces = [piece for i, slot in enumerate(slots) for piece in self._divide(i, slot)]
        if isinstance(rule, FusedRule):
            staged, parts = [piece.slot for piece in self.pieces], self._divide_gradients(gradients)
            self.fused = FusedUpdate(rule, staged, parts, storage, separate=True)

    def _divide(self, parameter: int, slot: Slot) -> list[Piece]:
        """Divide a slot into pieces of whole chunks, groups and rows.

        Each piece fits into a staging buffer.
        """
        weight, group_size = slot.offloaded, self.storage.group_size
        row = 1 if weight is None else weight.shape[-1]
        count = slot.parameter.numel()
        nbytes = sum(x.numel() * x.itemsize for x in _host_tensors(slot))
        size = largest_piece(nbytes / count, math.lcm(CHUNK, group_size, row))
        pieces = []
        # Slots start with different buffers. Otherwise all slots with one piece would use buffer 0.
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
        if isinstance(self.rule, FusedRule):
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
