"""The fused update of many parameters: one launch of the kernel for all parameters of a dtype.

The addresses of parameters and states, and the parameter that each program updates, are written
into tables on the device once. A step increments the step counts, computes the factors, updates
the gradients' addresses if they changed, and launches the kernel. Nothing waits for the GPU.

Of a piece of a parameter the tables have the addresses where its first element would be, and the
size up to the end of the piece: programs begin at the piece, and draw the random bits that they
would draw if the parameter were whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.optim import groups, rounding
from fp8pass.optim.kernel import CHUNK, LAUNCH, kernel, table_columns
from fp8pass.optim.options import PARAMETER, Storage
from fp8pass.optim.slots import Slot, State
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.update import factors

# Alignment of pointers, in bytes, and of sizes, in elements, with which threads read vectors.
ALIGNMENT = 16


@cache
def why_not(device: torch.device) -> str | None:
    """The reason why updates on `device` are not fused; None if they are."""
    return hardware.why_no_triton_kernels(device)


@dataclass(frozen=True)
class UpdateLaunch:
    """One launch of the kernel; each program updates a chunk of a parameter.

    Attributes:
        kernel: the Triton function.
        parameter_of: the tables' row of the parameter that a program updates, int32 [programs].
        aligned: whether parameters and states may be read in vectors.
    """

    kernel: Any
    parameter_of: Tensor
    aligned: bool


class FusedUpdate:
    """Updates the same parameters in every step.

    Args:
        slots: the parameters, of one dtype on one device, contiguous.
        states: their entries in the optimizer's state, whose steps become views of one tensor.
        gradients: gradients with the dtypes of those in all steps.
        storage: how their states are stored.
        apart: whether each slot has a launch of its own.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        states: Sequence[State],
        gradients: Sequence[Tensor],
        storage: Storage,
        *,
        apart: bool = False,
    ) -> None:
        first = slots[0].parameter
        self.device, self.storage = first.device, storage
        self.steps = torch.stack([slot.step for slot in slots])
        for i, state in enumerate(states):
            state["step"] = self.steps[i]
        self.columns = table_columns(storage, first.dtype)
        self.firsts = [s.first for s in slots]
        ends = [s.first + s.parameter.numel() for s in slots]
        self.sizes = self._tensor(ends, torch.int64)
        self.numbers = self._tensor([s.number for s in slots], torch.int32)
        self.tables = self._tables(slots)
        self.gradients = torch.zeros_like(self.sizes)
        # Replays of a CUDA graph read it again, so that nothing else may be written to it.
        self.captured = torch.empty(
            len(slots), dtype=torch.int64, pin_memory=self.device.type == "cuda"
        )
        self.pointers: list[int] = []
        self.gradients_aligned = False
        self.first_chunk = self._tensor([0] * len(slots), torch.int32)
        self.launches = self._launches(slots, gradients, apart=apart)
        self.values = [self._values(format) for format in (storage.first, storage.second)]

    def step(self, gradients: Sequence[Tensor], group: dict[str, Any], control: Tensor) -> None:
        """Update with gradients times `control[0]`; do nothing if `control[1]` is not 0."""
        for launch in self.prepared(gradients, group, control):
            launch()

    def prepared(
        self, gradients: Sequence[Tensor], group: dict[str, Any], control: Tensor
    ) -> list[Callable[[], None]]:
        """The launches of a step, which counts as taken; each slot's if they are `apart`."""
        self._set_gradients(gradients)
        self.steps.add_(1 - control[1])
        table = torch.stack(factors(group, self.steps))
        return [partial(self._launch, launch, table, group, control) for launch in self.launches]

    def _launch(
        self, launch: UpdateLaunch, table: Tensor, group: dict[str, Any], control: Tensor
    ) -> None:
        beta1, beta2 = map(float, group["betas"])  # Triton would compile again for an int
        with self._device():
            launch.kernel[(len(launch.parameter_of),)](
                self.tables,
                self.gradients,
                self.sizes,
                self.numbers,
                self.steps,
                table,
                control,
                launch.parameter_of,
                self.first_chunk,
                *self.values,
                len(self.steps),
                rounding.wrapped(group["seed"]),
                1 - beta1,
                beta2,
                1 - beta2,
                float(group["eps"]),
                ALIGNED=launch.aligned and self.gradients_aligned,
                **LAUNCH,
            )

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _values(self, format: StateFormat) -> Tensor:
        """Values of a dynamic format; for other formats a tensor that is not used."""
        return groups.values_of(format, self.device) if format.values else self.steps

    def _tables(self, slots: Sequence[Slot]) -> Tensor:
        """Addresses of each parameter and of its states' tensors, int64 [parameters, columns]."""
        rows = {PARAMETER: [_address(s.parameter, s.first) for s in slots]}
        size = self.storage.group_size
        for name, format in self.storage.states(slots[0].parameter.dtype).items():
            rows[name] = [_address(s.states[name].codes, s.first) for s in slots]
            for part in format.parts:
                rows[f"{name}_{part}"] = [
                    _address(getattr(s.states[name], part), s.first // size) for s in slots
                ]
        return self._tensor([rows[name] for name in self.columns], torch.int64).t().contiguous()

    def _launches(
        self, slots: Sequence[Slot], gradients: Sequence[Tensor], *, apart: bool
    ) -> list[UpdateLaunch]:
        batches: dict[Any, list[int]] = defaultdict(list)
        for i, (slot, gradient) in enumerate(zip(slots, gradients, strict=True)):
            batches[gradient.dtype, _aligned(slot), i if apart else 0].append(i)
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
                launches.append(UpdateLaunch(function, parameter_of, aligned))
        self.first_chunk.copy_(self._tensor(first_chunk, torch.int32))
        return launches

    def _set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients' addresses to the device if they changed."""
        pointers = [_address(g, first) for g, first in zip(gradients, self.firsts, strict=True)]
        if pointers == self.pointers:
            return
        self.pointers = pointers
        self.gradients_aligned = all(pointer % ALIGNMENT == 0 for pointer in pointers)
        addresses = torch.tensor(pointers, dtype=torch.int64)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            addresses = self.captured.copy_(addresses)
        self.gradients.copy_(addresses, non_blocking=True)

    def _device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _address(part: Tensor, first: int) -> int:
    """Where element 0 would be, if `part` begins with element `first`."""
    return part.data_ptr() - first * part.itemsize


def _aligned(slot: Slot) -> bool:
    tensors = [slot.parameter, *(stored.codes for stored in slot.states.values())]
    pointers = (x.data_ptr() % ALIGNMENT == 0 for x in tensors)
    return slot.parameter.numel() % ALIGNMENT == 0 and all(pointers)
