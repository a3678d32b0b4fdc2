"""Sums of the gradients of several backwards, in groups that share a scale (AGoQ 5).

A sum is decoded, a gradient added in fp32, and the result encoded again, rounded stochastically.
Rounded to nearest, it would lose gradients smaller than half the distance of two codes. The price
of its mean being right is noise that grows with every gradient: many take 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fp8pass.optim import fused
from fp8pass.optim.groups import Stored, decode, encode
from fp8pass.optim.rounding import SumStamp, random_bits
from fp8pass.optim.slots import group_count
from fp8pass.optim.staging import DEPTH, Staging, largest_piece
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.update import batch_size
from fp8pass.runtime.arena import Arena

GROUP_SIZE = 128
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Elsewhere:
    """Where sums are that are not on their device: memory of the host, and buffers for pieces."""

    arena: Arena
    staging: Staging


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a sum, computed with at once.

    Attributes:
        first: position of the first one in the parameter.
        stored: codes [R, G] and scales bf16 [R] on the device; those of the host in a buffer.
        host, device: the same as bytes, codes and scales in one: a copy takes the CPU as long as
            a kernel. None if the sum is on the device.
        buffer: the buffer's number.
    """

    first: int
    stored: Stored
    host: Tensor | None = None
    device: Tensor | None = None
    buffer: int = 0


@dataclass
class Accumulated:
    """A sum of gradients of one parameter, and the number of backwards that it sums.

    Attributes:
        format: how it is stored.
        elsewhere: the host; None if the sum is on the parameter's device.
        number: of the parameter; its pieces begin with another buffer than those of the next one.
        pieces: where it is; none on a device that sums nothing yet.
        count: how many gradients it sums.
    """

    format: StateFormat
    elsewhere: Elsewhere | None = None
    number: int = 0
    pieces: list[Piece] = field(default_factory=list, repr=False)
    count: int = 0

    def add(self, gradient: Tensor, seed: int, step: Tensor) -> None:
        """Add a gradient, rounded by random bits of a seed and the last step, fp32 []."""
        if not self.pieces:
            self.pieces = list(self._new_pieces(gradient))
        self.count += 1
        stamp = SumStamp(seed, self.number, step, self.count)

        def compute(piece: Piece, part: Tensor) -> None:
            add_to(piece.stored, part, self.format, stamp, piece.first)

        if self.elsewhere is not None:
            self.elsewhere.staging.begin([step], [gradient])
        self._by_pieces(gradient, compute, read=self.count > 1, write=True)

    def move_to(self, gradient: Tensor) -> None:
        """Add the sum to the last gradient, in place, and start a new one."""

        def compute(piece: Piece, part: Tensor) -> None:
            add_from(piece.stored, part, self.format)

        if self.count:
            if self.elsewhere is not None:
                self.elsewhere.staging.begin([gradient])  # it waits for its update
            self._by_pieces(gradient, compute, read=True, write=False)
        self.clear()

    def clear(self) -> None:
        """Start a new sum; memory of the host is kept for it."""
        self.count = 0
        if self.elsewhere is None:
            self.pieces = []

    def _new_pieces(self, gradient: Tensor) -> Iterator[Piece]:
        device, count = gradient.device, gradient.numel()
        if self.elsewhere is None:
            size = _bytes(count, self.format)
            yield Piece(0, _parts(torch.empty(size, dtype=torch.uint8, device=device), self.format))
            return
        arena, staging = self.elsewhere.arena, self.elsewhere.staging
        largest = largest_piece(_bytes(GROUP_SIZE, self.format) / GROUP_SIZE, GROUP_SIZE)
        for i, first in enumerate(range(0, count, largest), start=self.number):
            size = _bytes(min(largest, count - first), self.format)
            host = arena.empty(torch.Size([size]), torch.uint8)
            (staged,) = staging.place(i % DEPTH, [host])
            yield Piece(first, _parts(staged, self.format), host, staged, i % DEPTH)

    def _by_pieces(
        self,
        gradient: Tensor,
        compute: Callable[[Piece, Tensor], None],
        *,
        read: bool,
        write: bool,
    ) -> None:
        """Compute with the sum where it is, or with pieces of it in the device's buffers."""
        flat = gradient.view(-1)
        if self.elsewhere is None:
            compute(self.pieces[0], flat)
            return
        for piece in self.pieces:
            assert piece.host is not None
            assert piece.device is not None
            part = flat[piece.first : piece.first + piece.stored.codes.numel()]
            into = [(piece.host, piece.device)] if read else []
            out = [(piece.device, piece.host)] if write else []
            self.elsewhere.staging.run(piece.buffer, into, partial(compute, piece, part), out)


def _bytes(count: int, format: StateFormat) -> int:
    """Of codes and scales of so many elements."""
    groups = group_count(count, GROUP_SIZE)
    return groups * (GROUP_SIZE * format.stored.itemsize + SCALE_DTYPE.itemsize)


def _parts(memory: Tensor, format: StateFormat) -> Stored:
    """Codes and scales that lie in some bytes, one behind the other."""
    each = GROUP_SIZE * format.stored.itemsize
    groups = len(memory) // (each + SCALE_DTYPE.itemsize)
    codes, scales = memory.split([groups * each, groups * SCALE_DTYPE.itemsize])
    return Stored(codes.view(format.stored).view(groups, GROUP_SIZE), scales.view(SCALE_DTYPE))


def add_to(
    sum_: Stored, gradient: Tensor, format: StateFormat, stamp: SumStamp, first: int
) -> None:
    """Add a gradient [N] to a sum in place.

    Args:
        sum_: codes [R, G] and scales [R]; their numbers do not count before the first gradient.
        gradient: consecutive elements of a parameter's gradient.
        format: of the sum.
        stamp: what the random bits that round it depend on; its count includes the gradient.
        first: the position of the first element in the parameter.
    """
    if _has_kernel(gradient.device, format):
        from fp8pass.optim import sum_kernel

        sum_kernel.add_to(sum_, gradient, format, stamp, first)
        return
    key = stamp.key()
    # In pieces: random bits and what else encoding needs would be larger than the sum.
    size = batch_size(gradient.device) // GROUP_SIZE * GROUP_SIZE
    for begin in range(0, len(gradient), size):
        part, piece = _part(sum_, begin, size), gradient[begin : begin + size]
        rows = _rows(piece, part)
        if stamp.count > 1:
            rows += decode(part, format)
        elements = torch.arange(rows.numel(), device=rows.device).view_as(rows) + first + begin
        new = encode(rows, format, random_bits(key, elements))
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
