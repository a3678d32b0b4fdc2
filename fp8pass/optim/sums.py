"""Sums of the gradients of several backwards, in groups that share a scale (AGoQ 5).

A sum is decoded, a gradient added in fp32, and the result encoded again, rounded stochastically.
Rounded to nearest, it would lose gradients smaller than half the distance of two codes. The price
of its mean being right is noise that grows with every gradient: many take 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8pass.optim import fused, rounding
from fp8pass.optim.groups import Stored, decode, encode
from fp8pass.optim.host import Arena
from fp8pass.optim.slots import group_count
from fp8pass.optim.staging import DEPTH, Staging, largest_piece
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.update import batch_size

GROUP_SIZE = 128


@dataclass(frozen=True)
class Elsewhere:
    """Where sums are that are not on their device: memory of the host, and buffers for pieces."""

    arena: Arena
    staging: Staging


@dataclass
class Accumulated:
    """A sum of gradients of one parameter, and the number of backwards that it sums.

    Attributes:
        format: how it is stored.
        elsewhere: the host; None if the sum is on the parameter's device.
        number: of the parameter; its pieces begin with another buffer than those of the next one.
        stored: codes [R, G] and scales bf16 [R]; None if it sums nothing yet.
        count: how many gradients it sums.
    """

    format: StateFormat
    elsewhere: Elsewhere | None = None
    number: int = 0
    stored: Stored | None = None
    count: int = 0
    _key: Tensor | None = field(default=None, repr=False)
    _memory: Stored | None = field(default=None, repr=False)

    def add(self, gradient: Tensor, key: Callable[[], Tensor]) -> None:
        """Add a gradient, rounded by random bits of a key, int32 [1]: that of the last step.

        It is asked for once a sum.
        """
        if self.stored is None:
            self.stored, self._key = self._room(gradient), key()
        assert self._key is not None
        self.count += 1
        of_sum, count = self._key, self.count

        def compute(sum_: Stored, piece: Tensor, first: int) -> None:
            add_to(sum_, piece, self.format, of_sum, count, first)

        self._by_pieces(gradient, compute, read=count > 1, write=True, also=of_sum)

    def move_to(self, gradient: Tensor) -> None:
        """Add the sum to the last gradient, in place, and start a new one."""

        def compute(sum_: Stored, piece: Tensor, first: int) -> None:
            add_from(sum_, piece, self.format)

        if self.stored is not None:
            self._by_pieces(gradient, compute, read=True, write=False)
        self.clear()

    def clear(self) -> None:
        """Start a new sum."""
        self.stored, self.count, self._key = None, 0, None

    def _room(self, gradient: Tensor) -> Stored:
        """Memory for a sum; that on the host is kept for the next one."""
        if self._memory is not None:
            return self._memory
        groups, device = group_count(gradient.numel(), GROUP_SIZE), gradient.device
        shapes = (
            (torch.Size([groups, GROUP_SIZE]), self.format.stored),
            (
                torch.Size([groups]),
                torch.bfloat16,
            ),
        )
        if self.elsewhere is None:
            return Stored(*(torch.empty(shape, dtype=d, device=device) for shape, d in shapes))
        self._memory = Stored(*(self.elsewhere.arena.empty(*each) for each in shapes))
        return self._memory

    def _by_pieces(
        self,
        gradient: Tensor,
        compute: Callable[[Stored, Tensor, int], None],
        *,
        read: bool,
        write: bool,
        also: Tensor | None = None,
    ) -> None:
        """Compute with the sum where it is, or with pieces of it in the device's buffers."""
        assert self.stored is not None
        codes, scales, _ = self.stored
        assert scales is not None
        flat = gradient.view(-1)
        if self.elsewhere is None:
            compute(self.stored, flat, 0)
            return
        staging = self.elsewhere.staging
        staging.begin([gradient] if also is None else [gradient, also])
        size = largest_piece(codes.itemsize + 2 / GROUP_SIZE, GROUP_SIZE)
        for i, first in enumerate(range(0, len(flat), size)):
            rows = slice(first // GROUP_SIZE, group_count(first + size, GROUP_SIZE))
            host = [codes[rows], scales[rows]]
            buffer = (self.number + i) % DEPTH
            device = staging.place(buffer, host)
            piece = flat[first : first + size]

            def run(device: list[Tensor] = device, piece: Tensor = piece, at: int = first) -> None:
                compute(Stored(*device), piece, at)

            into = list(zip(host, device, strict=True)) if read else []
            out = list(zip(device, host, strict=True)) if write else []
            staging.run(buffer, into, run, out)


def add_to(
    sum_: Stored, gradient: Tensor, format: StateFormat, key: Tensor, count: int, first: int
) -> None:
    """Add a gradient [N] to a sum in place.

    Args:
        sum_: codes [R, G] and scales [R]; their numbers do not count before the first gradient.
        gradient: consecutive elements of a parameter's gradient.
        format: of the sum.
        key: of the random bits that round sums, int32 [1].
        count: which gradient of the sum it is, from 1 on.
        first: the position of the first element in the parameter.
    """
    if _has_kernel(gradient.device, format):
        from fp8pass.optim import sum_kernel

        sum_kernel.add_to(sum_, gradient, format, key, count, first)
        return
    key = rounding.key_of_sum(key, count)
    # In pieces: random bits and what else encoding needs would be larger than the sum.
    size = batch_size(gradient.device) // GROUP_SIZE * GROUP_SIZE
    for begin in range(0, len(gradient), size):
        part, piece = _part(sum_, begin, size), gradient[begin : begin + size]
        rows = _rows(piece, part)
        if count > 1:
            rows += decode(part, format)
        elements = torch.arange(rows.numel(), device=rows.device).view_as(rows) + first + begin
        new = encode(rows, format, rounding.random_bits(key, elements))
        for old, x in zip(part, new, strict=True):
            if old is not None and x is not None:
                old.copy_(x)


def add_from(sum_: Stored, gradient: Tensor, format: StateFormat) -> None:
    """Add a sum to a gradient [N], in place."""
    if _has_kernel(gradient.device, format):
        from fp8pass.optim import sum_kernel

        sum_kernel.add_from(sum_, gradient, format)
        return
    size = batch_size(gradient.device) // GROUP_SIZE * GROUP_SIZE
    for begin in range(0, len(gradient), size):
        part, piece = _part(sum_, begin, size), gradient[begin : begin + size]
        rows = _rows(piece, part) + decode(part, format)
        piece.copy_(rows.view(-1)[: len(piece)])


def _has_kernel(device: torch.device, format: StateFormat) -> bool:
    return fused.why_not(device) is None and not format.values


def _part(sum_: Stored, first: int, size: int) -> Stored:
    rows = slice(first // GROUP_SIZE, group_count(first + size, GROUP_SIZE))
    return Stored(*(None if x is None else x[rows] for x in sum_))  # type: ignore[arg-type]


def _rows(x: Tensor, like: Stored) -> Tensor:
    """`x` in fp32 rows, padded with zeros."""
    rows = torch.zeros(like.codes.shape, dtype=torch.float32, device=x.device)
    rows.view(-1)[: len(x)].copy_(x)
    return rows
