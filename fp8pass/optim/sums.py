"""Gradients summed over several backwards, in quantized groups (section 5 of the paper AGoQ).

An addition dequantizes the sum, adds a gradient in fp32, and rounds stochastically. Rounding to
nearest would lose small gradients. Each addition adds noise, so sums of many gradients need 16
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE
from fp8pass.optim.offload import DEPTH, Copies, Staging, largest_piece
from fp8pass.optim.rounding import SumStamp, random_bits
from fp8pass.optim.shards import sharding_groups, zeros_like_shard
from fp8pass.optim.slots import group_count, to_rows
from fp8pass.optim.state_formats import SUM_GROUP_SIZE, Quantized, StateFormat, dequantize, quantize
from fp8pass.optim.update import batch_size
from fp8pass.runtime.arena import Arena

BUCKET = 1 << 25  # most elements that ranks send at once


@dataclass(frozen=True)
class SumPiece:
    first: int  # position of the piece in the parameter
    stored: Quantized  # data [R, G] and scales bf16 [R]; in a staging buffer if offloaded
    # Copies of an offloaded sum. Data and scales share a tensor of bytes, because launching a copy
    # takes the CPU as long as launching a kernel.
    into: Copies = ()  # host memory -> buffer
    out: Copies = ()  # buffer -> host memory
    buffer: int = 0  # index of the staging buffer


@dataclass
class GradientSum:
    """The sum of a parameter's gradients over several backwards."""

    format: StateFormat
    offload: tuple[Arena, Staging] | None = None
    number: int = 0  # of the parameter; selects the staging buffer of the first piece
    pieces: list[SumPiece] = field(default_factory=list, repr=False)
    count: int = 0  # gradients in the sum

    def add(self, gradient: Tensor, seed: int, step: Tensor) -> None:
        """Add a contiguous local gradient. `step`, fp32 [], counts the parameter's updates."""
        if not self.pieces:
            self.pieces = list(self._allocate(gradient))
        self.count += 1
        stamp = SumStamp(seed, self.number, step, self.count)
        if self.offload is not None:
            self.offload[1].begin([step], [gradient])
        self._run(
            gradient,
            lambda stored, part, first: add_to(stored, part, self.format, stamp, first),
            read=self.count > 1,
            write=True,
        )

    def move_to(self, gradient: Tensor) -> None:
        """Add the sum to `gradient` in place, and start a new sum."""
        self.add_into(gradient)
        self.clear()

    def add_into(self, gradient: Tensor) -> None:
        """Add the sum to `gradient` in place."""
        if self.count:
            if self.offload is not None:
                self.offload[1].begin([gradient])  # no gradient bytes: the update counts them
            self._run(
                gradient,
                lambda stored, part, _: add_from(stored, part, self.format),
                read=True,
                write=False,
            )

    def clear(self) -> None:
        """Start a new sum, which reuses the host memory of the old sum."""
        self.count = 0
        if self.offload is None:
            self.pieces = []

    def _allocate(self, gradient: Tensor) -> Iterator[SumPiece]:
        device, count = gradient.device, gradient.numel()
        if self.offload is None:
            memory = torch.empty(_sum_bytes(count, self.format), dtype=torch.uint8, device=device)
            yield SumPiece(0, _view_sum(memory, self.format))
            return
        arena, staging = self.offload
        largest = largest_piece(
            _sum_bytes(SUM_GROUP_SIZE, self.format) / SUM_GROUP_SIZE, SUM_GROUP_SIZE
        )
        for turn, first in enumerate(range(0, count, largest), start=self.number):
            size = _sum_bytes(min(largest, count - first), self.format)
            host, buffer = arena.empty(torch.Size([size]), torch.uint8), turn % DEPTH
            (staged,) = staging.allocate(buffer, [host])
            stored = _view_sum(staged, self.format)
            yield SumPiece(first, stored, [(host, staged)], [(staged, host)], buffer)

    def _run(
        self,
        gradient: Tensor,
        compute: Callable[[Quantized, Tensor, int], None],
        *,
        read: bool,
        write: bool,
    ) -> None:
        """Call `compute` with the stored sum, the gradient and the position of each piece.

        `read` copies offloaded sums to the device first, and `write` copies them back.
        """
        flat = gradient.view(-1)
        if self.offload is None:
            compute(self.pieces[0].stored, flat, 0)
            return
        for piece in self.pieces:
            part = flat[piece.first : piece.first + piece.stored.data.numel()]
            into, out = piece.into if read else (), piece.out if write else ()
            launch = partial(compute, piece.stored, part, piece.first)
            self.offload[1].run(piece.buffer, into, launch, out)


def _sum_bytes(count: int, format: StateFormat) -> int:
    groups = group_count(count, SUM_GROUP_SIZE)
    return groups * (SUM_GROUP_SIZE * format.storage_dtype.itemsize + GROUP_SCALE_DTYPE.itemsize)


def _view_sum(memory: Tensor, format: StateFormat) -> Quantized:
    """View data [R, G] and scales [R] in `memory`, uint8 [bytes]."""
    each = SUM_GROUP_SIZE * format.storage_dtype.itemsize
    groups = len(memory) // (each + GROUP_SCALE_DTYPE.itemsize)
    data, scales = memory.split([groups * each, groups * GROUP_SCALE_DTYPE.itemsize])
    data = data.view(format.storage_dtype).view(groups, SUM_GROUP_SIZE)
    return Quantized(data, scales.view(GROUP_SCALE_DTYPE))


def add_to(
    sum_: Quantized, gradient: Tensor, format: StateFormat, stamp: SumStamp, first: int
) -> None:
    """Add a gradient [N] to a sum in place.

    The first gradient (`stamp.count == 1`) overwrites data and scales. `first` is the position of
    `gradient` in the parameter.
    """
    if (kernels := _load_kernels(gradient.device, format)) is not None:
        kernels.add_to(sum_, gradient, format, stamp, first)
        return
    key = stamp.key()
    for begin, part, stored in _chunks(gradient, sum_):
        rows = to_rows(part, SUM_GROUP_SIZE, torch.float32)
        if stamp.count > 1:
            rows += dequantize(stored, format)
        elements = torch.arange(rows.numel(), device=rows.device).view_as(rows) + first + begin
        new = quantize(rows, format, random_bits(key, elements))
        for old, x in zip(stored, new, strict=True):
            if old is not None and x is not None:
                old.copy_(x)


def add_from(sum_: Quantized, gradient: Tensor, format: StateFormat) -> None:
    """Add a sum to a gradient [N] in place."""
    if (kernels := _load_kernels(gradient.device, format)) is not None:
        kernels.add_from(sum_, gradient, format)
        return
    for _, part, stored in _chunks(gradient, sum_):
        rows = to_rows(part, SUM_GROUP_SIZE, torch.float32) + dequantize(stored, format)
        part.copy_(rows.view(-1)[: len(part)])


def _load_kernels(device: torch.device, format: StateFormat) -> Any:
    """Return the module `sum_kernel`, if it supports the device and the format."""
    if hardware.why_no_triton_kernels(device) is not None or format.values:
        return None
    from fp8pass.optim import sum_kernel  # imports Triton

    return sum_kernel


def _chunks(gradient: Tensor, sum_: Quantized) -> Iterator[tuple[int, Tensor, Quantized]]:
    """Yield the position, gradient and sum of each chunk. Small chunks need small temporaries."""
    size = batch_size(gradient.device) // SUM_GROUP_SIZE * SUM_GROUP_SIZE
    for begin in range(0, len(gradient), size):
        rows = slice(begin // SUM_GROUP_SIZE, group_count(begin + size, SUM_GROUP_SIZE))
        parts = (None if x is None else x[rows] for x in sum_)
        yield begin, gradient[begin : begin + size], Quantized(*parts)  # type: ignore[arg-type]


def norm_of_sums(sums: Mapping[Tensor, GradientSum], parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, fp32 [], on the device of the first parameter.

    All ranks must pass the same parameters: squares of shards are added over their process groups.
    """
    squares: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = zeros_like_shard(parameter)
        sums[parameter].add_into(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        squares.setdefault(sharding_groups(parameter), []).append(square)
    totals = []
    for groups, found in squares.items():
        device = found[0].device
        total = torch.stack([x.to(device) for x in found]).sum()
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack([x.to(totals[0].device) for x in totals]).sum().sqrt()


def split_into_buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of consecutive parameters of one dtype and device.

    A bucket with several parameters has at most `BUCKET` elements.
    """
    for _, same in groupby(parameters, lambda p: (p.dtype, p.device)):
        bucket: list[Tensor] = []
        for parameter in same:
            if bucket and sum(p.numel() for p in (*bucket, parameter)) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket
