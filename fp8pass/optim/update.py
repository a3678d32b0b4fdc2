"""The AdamW update of many parameters in vectorized PyTorch: for any device, and as the reference
that tests compare the kernel with.

    w ← w (1 - lr·λ)          m ← β₁ m + (1 - β₁) g          v ← β₂ v + (1 - β₂) g²
    w ← w - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)

in fp32, from decoded states (COAT A), which are encoded again afterwards. A parameter with a master
copy is the stored copy rounded to the parameter's dtype. Where it is another number, the user has
written it, and the update continues from this number, as `torch.optim` does.

Parameters are joined to one matrix of groups, so that small ones take no operators of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass.optim import rounding
from fp8pass.optim.groups import Stored, decode, encode
from fp8pass.optim.options import PARAMETER, Storage
from fp8pass.optim.slots import Slot, group_count
from fp8pass.optim.state_formats import StateFormat

# Elements joined at once: on a CPU about ten fp32 temporaries fit into the cache; elsewhere they
# are small compared with the states. Larger parameters are updated in pieces.
CPU_BATCH = 1 << 17
BATCH = 1 << 24
# A smaller ε is replaced by this one: nothing is divided by zero where gradients were zero.
SMALLEST_EPS = 2.0**-100


def batch_size(device: torch.device) -> int:
    """How many elements are computed with at once on a device."""
    return CPU_BATCH if device.type == "cpu" else BATCH


class Factors(NamedTuple):
    """The factors of the update, fp32 [n] each: one for each parameter at its step.

    Attributes:
        decay: 1 - lr·λ.
        rate: lr / (1 - β₁ᵗ).
        correction: 1 / √(1 - β₂ᵗ).
    """

    decay: Tensor
    rate: Tensor
    correction: Tensor


def factors(group: dict[str, Any], steps: Tensor) -> Factors:
    """The factors of parameters at `steps` [n], computed in fp64, without synchronizing."""
    steps = steps.double()
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(steps).reshape(())
    decay = torch.ones_like(steps) - lr * group["weight_decay"]
    rate = lr / (1 - beta1**steps)
    correction = (1 - beta2**steps).rsqrt()
    return Factors(decay.float(), rate.float(), correction.float())


@dataclass(frozen=True)
class Rows:
    """Parameters of `sizes` elements as one matrix of groups [R, G]; each begins a new row."""

    sizes: tuple[int, ...]
    group_size: int

    @property
    def counts(self) -> list[int]:
        """Number of rows of each parameter."""
        return [group_count(size, self.group_size) for size in self.sizes]

    def join(self, tensors: Iterable[Tensor], dtype: torch.dtype, fill: int = 0) -> Tensor:
        """Tensors of `sizes` as [R, G], padded with `fill`."""
        tensors = list(tensors)
        joined = tensors[0].new_full((sum(self.counts), self.group_size), fill, dtype=dtype)
        for part, tensor in zip(self._parts(joined), tensors, strict=True):
            part.copy_(tensor.reshape(-1))
        return joined

    def split(self, joined: Tensor, into: Iterable[Tensor]) -> None:
        """Copy [R, G] back into tensors of `sizes`."""
        for part, tensor in zip(self._parts(joined), into, strict=True):
            tensor.copy_(part.view_as(tensor))

    def join_groups(self, groups: Iterable[Tensor | None]) -> Tensor | None:
        """Values of groups, [R], from those of each parameter; None if there are none."""
        found = [x for x in groups if x is not None]
        return torch.cat(found) if found else None

    def split_groups(self, joined: Tensor, into: Iterable[Tensor]) -> None:
        """Copy values of groups, [R], back into those of each parameter."""
        for part, tensor in zip(joined.split(self.counts), into, strict=True):
            tensor.copy_(part)

    def spread(self, x: Tensor) -> Tensor:
        """Values of parameters, [n], repeated for each of their rows, [R, 1]."""
        counts = torch.tensor(self.counts, device=x.device)
        return x.repeat_interleave(counts).unsqueeze(-1)

    def elements(self, firsts: Iterable[int], device: torch.device) -> Tensor:
        """The position of each element in its parameter, int64 [R, G], from `firsts` on."""
        rows = [
            torch.arange(count, device=device) * self.group_size + first
            for count, first in zip(self.counts, firsts, strict=True)
        ]
        columns = torch.arange(self.group_size, device=device)
        return torch.cat(rows).unsqueeze(-1) + columns

    def _parts(self, joined: Tensor) -> list[Tensor]:
        parts = joined.split(self.counts)
        return [part.view(-1)[:n] for part, n in zip(parts, self.sizes, strict=True)]


def update(
    slots: Sequence[Slot],
    gradients: Sequence[Tensor],
    group: dict[str, Any],
    storage: Storage,
    factor: Tensor | float = 1.0,
) -> None:
    """Update parameters and their states in place, with gradients times `factor`.

    Slots must have the same dtype, device and `storage`, and steps that count this update.
    """
    for batch in _batches(slots, gradients, storage.group_size):
        _update_batch([s for s, _ in batch], [g for _, g in batch], group, storage, factor)


def _batches(
    slots: Sequence[Slot], gradients: Sequence[Tensor], group_size: int
) -> Iterator[list[tuple[Slot, Tensor]]]:
    """Slots, or pieces of them, with their gradients, in batches to be joined."""
    limit = batch_size(slots[0].parameter.device)
    batch: list[tuple[Slot, Tensor]] = []
    joined = 0
    for slot, gradient in zip(slots, gradients, strict=True):
        for piece in _pieces(slot, gradient, limit // group_size * group_size, group_size):
            size = piece[1].numel()
            if batch and joined + size > limit:
                yield batch
                batch, joined = [], 0
            batch.append(piece)
            joined += size
    if batch:
        yield batch


def _pieces(
    slot: Slot, gradient: Tensor, size: int, group_size: int
) -> Iterator[tuple[Slot, Tensor]]:
    if slot.parameter.numel() <= size or not slot.parameter.is_contiguous():
        yield slot, gradient
        return
    flat = gradient.reshape(-1)
    for first in range(0, len(flat), size):
        yield slot.piece(first, size, group_size), flat[first : first + size]


def _update_batch(
    slots: Sequence[Slot],
    gradients: Sequence[Tensor],
    group: dict[str, Any],
    storage: Storage,
    factor: Tensor | float,
) -> None:
    rows = Rows(tuple(s.parameter.numel() for s in slots), storage.group_size)
    steps = torch.stack([s.step for s in slots])
    decay, rate, correction = (rows.spread(x) for x in factors(group, steps))
    (beta1, beta2), eps = group["betas"], max(group["eps"], SMALLEST_EPS)
    master = storage.master(slots[0].parameter.dtype)

    gradient = rows.join(gradients, torch.float32) * factor
    m = _read(rows, slots, "exp_avg", storage.first).lerp(gradient, 1 - beta1)
    v = _read(rows, slots, "exp_avg_sq", storage.second) * beta2
    v = v.addcmul(gradient, gradient, value=1 - beta2)
    weights = rows.join((s.parameter for s in slots), torch.float32)
    if master:
        copies = _read(rows, slots, "master", master)
        rounded = copies.to(slots[0].parameter.dtype).float()
        weights = torch.where(rounded == weights, copies, weights)
    weights = weights * decay - rate * (m / (v.sqrt() * correction + eps))

    bits: dict[str, Tensor] = {}
    if names := storage.rounded(slots[0].parameter.dtype):
        numbers = torch.tensor([s.number for s in slots], dtype=torch.int32, device=steps.device)
        keys = rows.spread(rounding.keys(group["seed"], numbers, steps))
        shared = rounding.random_bits(keys, rows.elements((s.first for s in slots), steps.device))
        bits = {name: rounding.rotated(shared, rounding.ROTATIONS[name]) for name in names}
    values = {"exp_avg": m, "exp_avg_sq": v, "master": weights}
    for name, format in storage.states(slots[0].parameter.dtype).items():
        stored = encode(values[name], format, bits.get(name))
        _write(rows, slots, name, stored)
        if name == "master":  # not what was encoded: the next update compares the two
            weights = decode(stored, format)
    if PARAMETER in bits:
        weights = rounding.round_to_bf16(weights, bits[PARAMETER])
    rows.split(weights, (s.parameter for s in slots))


def _read(rows: Rows, slots: Sequence[Slot], name: str, format: StateFormat) -> Tensor:
    """A state of all slots, decoded, fp32 [R, G]."""
    stored = [s.states[name] for s in slots]
    codes = rows.join((x.codes for x in stored), format.stored, format.zero)
    scale = rows.join_groups(x.scale for x in stored)
    return decode(Stored(codes, scale, rows.join_groups(x.power for x in stored)), format)


def _write(rows: Rows, slots: Sequence[Slot], name: str, stored: Stored) -> None:
    """Copy an encoded state back into the slots."""
    into = [s.states[name] for s in slots]
    rows.split(stored.codes, (x.codes for x in into))
    if stored.scale is not None:
        rows.split_groups(stored.scale, (x.scale for x in into if x.scale is not None))
    if stored.power is not None:
        rows.split_groups(stored.power, (x.power for x in into if x.power is not None))
