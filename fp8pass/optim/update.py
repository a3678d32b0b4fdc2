"""Elementwise updates of many parameters in vectorized PyTorch.

Tests compare the Triton kernels with this reference. The arithmetic is in fp32 (paper COAT,
appendix A). Where a parameter differs from its rounded master copy, the user has changed the
parameter, and the update starts from the parameter. Parameters are concatenated to one matrix with
one row for each group, so that small parameters share launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim import rounding
from fp8pass.optim.group_options import PARAMETER, Storage
from fp8pass.optim.slots import Slot, group_count
from fp8pass.optim.state_formats import Quantized, StateFormat, dequantize, quantize

# Number of elements that are updated at once. On a CPU, ten fp32 temporaries of this size fit into
# the cache. On other devices, the temporaries are small compared with the states.
CPU_BATCH = 1 << 17
DEVICE_BATCH = 1 << 24
Group = dict[str, Any]  # a parameter group with its options
Tensors = Sequence[Tensor]
# Updates the same parameters in every step, given gradients, the group, and `control`, fp32 [2].
# Gradients are multiplied by `control[0]`. A fused update does nothing if `control[1]` is not 0.
# Before other updates, the caller must check `control[1]`.
PreparedUpdate = Callable[[Tensors, Group, Tensor], None]


def batch_size(device: torch.device) -> int:
    return CPU_BATCH if device.type == "cpu" else DEVICE_BATCH


def update_eagerly(
    slots: Sequence[Slot],
    storage: Storage,
    rule: Rule,
    gradients: Tensors,
    group: Group,
    control: Tensor,
) -> None:
    for found in _batches(slots, gradients, storage.group_size):
        batch = Batch([slot for slot, _ in found], group, storage)
        joined = batch.join([g for _, g in found], torch.float32)
        rule(batch, joined * control[0])


def _batches(
    slots: Sequence[Slot], gradients: Tensors, group_size: int
) -> Iterator[list[tuple[Slot, Tensor]]]:
    """Yield batches of slots with their gradients. Slots larger than a batch are divided."""
    limit = batch_size(slots[0].parameter.device)
    size = limit // group_size * group_size
    batch: list[tuple[Slot, Tensor]] = []
    joined = 0
    for slot, gradient in zip(slots, gradients, strict=True):
        pieces = [(slot, gradient)]
        if slot.parameter.numel() > size and slot.parameter.is_contiguous():
            flat = gradient.reshape(-1)
            pieces = [
                (slot.narrow(first, size, group_size), flat[first : first + size])
                for first in range(0, len(flat), size)
            ]
        for piece in pieces:
            if batch and joined + piece[1].numel() > limit:
                yield batch
                batch, joined = [], 0
            batch.append(piece)
            joined += piece[1].numel()
    if batch:
        yield batch


class Batch:
    """Slots that are updated at once, and access to their parameters and states as rows [R, G].

    The slots have parameters of one dtype and device. Each slot begins a new row.
    """

    def __init__(self, slots: Sequence[Slot], group: Group, storage: Storage) -> None:
        self.slots, self.group, self.storage = slots, group, storage
        self.sizes = [s.parameter.numel() for s in slots]
        self.counts = [group_count(n, storage.group_size) for n in self.sizes]  # rows of each slot
        self.steps = torch.stack([s.step for s in slots])  # includes the update after `count_step`
        self.dtype = slots[0].parameter.dtype

    def count_step(self) -> None:
        """Increment the step counts of slots that contain the first element of their parameter."""
        for slot in self.slots:
            if slot.first == 0:
                slot.step.add_(1)
        self.steps = torch.stack([s.step for s in self.slots])

    def join(self, tensors: Tensors, dtype: torch.dtype, fill: int = 0) -> Tensor:
        """Concatenate one tensor for each slot to rows [R, G], padded with `fill`."""
        shape = sum(self.counts), self.storage.group_size
        joined = tensors[0].new_full(shape, fill, dtype=dtype)
        for part, tensor in zip(self._parts(joined), tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        return joined

    def _split(self, joined: Tensor, into: Iterable[Tensor]) -> None:
        """Copy rows [R, G], without the padding, into one tensor for each slot."""
        for part, tensor in zip(self._parts(joined), into, strict=True):
            tensor.copy_(part.view_as(tensor))

    def _parts(self, joined: Tensor) -> list[Tensor]:
        parts = joined.split(self.counts)
        return [part.view(-1)[:n] for part, n in zip(parts, self.sizes, strict=True)]

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat `x` [n] for the rows of each slot: [R, 1]."""
        counts = torch.tensor(self.counts, device=x.device)
        return x.repeat_interleave(counts).unsqueeze(-1)

    def read(self, name: str) -> Tensor:
        """Return the dequantized values of the state `name`, fp32 [R, G]."""
        stored, format = [s.states[name] for s in self.slots], self._formats[name]
        data = self.join([x.data for x in stored], format.storage_dtype, format.zero_code)
        parts = (torch.cat([getattr(x, part) for x in stored]) for part in format.parts)
        return dequantize(Quantized(data, *parts), format)

    def read_weights(self) -> Tensor:
        """Return the weights, fp32 [R, G], from master copies if the storage has them."""
        weights = self.join([s.parameter for s in self.slots], torch.float32)
        if "master" not in self._formats:
            return weights
        copies = self.read("master")
        return torch.where(copies.to(self.dtype).float() == weights, copies, weights)

    def write(self, values: dict[str, Tensor]) -> None:
        """Round and store new values, fp32 [R, G], by the name of the state.

        The key of the weights is `PARAMETER`.
        """
        if PARAMETER in values and "master" in self._formats:
            values = {**values, "master": values[PARAMETER]}
        bits = self._draw([x for x in self.storage.rounded(self.dtype) if x in values])
        weights = values.get(PARAMETER)
        for name in [name for name in values if name != PARAMETER]:
            stored = self._write_state(name, values[name], bits.get(name))
            if name == "master":  # the next update compares the parameter with this stored copy
                weights = dequantize(stored, self._formats[name])
        if weights is not None:
            if PARAMETER in bits:
                weights = rounding.round_to_bf16(weights, bits[PARAMETER])
            self.write_parameter(weights)

    def write_parameter(self, values: Tensor) -> None:
        """Round `values` [R, G] to nearest, and store them in the parameters."""
        self._split(values, [s.parameter for s in self.slots])

    @property
    def _formats(self) -> dict[str, StateFormat]:
        return self.storage.states(self.dtype)

    def _draw(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return random bits, int32 [R, G], for the rounding of each of the named tensors."""
        if not names:
            return {}
        device = self.steps.device
        numbers = torch.tensor([s.number for s in self.slots], dtype=torch.int32, device=device)
        keys = self.repeat(rounding.keys(self.group["seed"], numbers, self.steps))
        shared = rounding.random_bits(keys, self._positions(device))
        return {name: rounding.rotate(shared, rounding.ROTATIONS[name]) for name in names}

    def _positions(self, device: torch.device) -> Tensor:
        """Return each element's position in its parameter, int64 [R, G]."""
        size = self.storage.group_size
        rows = [
            torch.arange(count, device=device) * size + slot.first
            for count, slot in zip(self.counts, self.slots, strict=True)
        ]
        return torch.cat(rows).unsqueeze(-1) + torch.arange(size, device=device)

    def _write_state(self, name: str, values: Tensor, bits: Tensor | None) -> Quantized:
        format, into = self._formats[name], [s.states[name] for s in self.slots]
        stored = quantize(values, format, bits)
        self._split(stored.data, [x.data for x in into])
        for part in format.parts:
            parts = getattr(stored, part).split(self.counts)
            for x, new in zip(into, parts, strict=True):
                getattr(x, part).copy_(new)
        return stored


# Updates a batch in place, given its gradients, fp32 [R, G].
Rule = Callable[[Batch, Tensor], None]
