"""Sums of gradients over ranks, sent in FP8 (section 5 of the paper AGoQ).

Each rank receives one part of the gradients from all ranks, dequantizes the values, and adds them
up in fp32. An all-reduce then sends the sums in FP8 to all ranks.

Each parameter starts a new quantization group:

    row      p p p p p q q s s s s            parameters p, q, s
    padded   p p p p|p 0 0 0|q q 0 0|s s s s  in groups of 4

With tensor parallelism, ranks hold equal copies of one parameter (a norm) next to different shards
of another parameter. If both had a common scale, each rank would round its copy of the first
parameter differently, and the copies would drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fp8pass.compat.data_parallel import all_gather_single
from fp8pass.dialect.formats import E4M3
from fp8pass.distributed.wire import WIRE_GROUP_SIZE, add_up, pack, split_into_groups
from fp8pass.stability.monitor import Monitor
from fp8pass.stability.monitor.findings import SENT
from fp8pass.stability.monitor.statistics import TensorName, measure


@dataclass
class Traffic:
    """Counts of sent values and bytes."""

    elements: int = 0  # sent values, counted once for each receiving rank
    bytes: int = 0

    def add(self, elements: int, sent: int, copies: float) -> None:
        """Count values and bytes that are sent to `copies` ranks. `copies` may be a fraction."""
        self.elements += int(elements * copies)
        self.bytes += int(sent * copies)

    @property
    def ratio(self) -> float:
        """Sent bytes relative to the bytes of the values in BF16; 1 before the first send."""
        return self.bytes / (2 * self.elements) if self.elements else 1.0


@dataclass(frozen=True)
class ParameterLayout:
    """Positions of parameters in a row of gradients, with and without padding."""

    sizes: tuple[int, ...]  # elements of each parameter in a row, in order; at least 1
    unit: int = WIRE_GROUP_SIZE  # elements of a group

    @cached_property
    def _runs(self) -> tuple[int, ...]:
        """The numbers of elements of sequences of parameters without padding between them."""
        runs = [0]
        for size in self.sizes:
            runs[-1] += size
            if size % self.unit:
                runs.append(0)
        return tuple(run for run in runs if run)

    @cached_property
    def _padded_runs(self) -> tuple[int, ...]:
        *others, last = self._runs
        return (*(run + -run % self.unit for run in others), last)

    def pad(self, rows: Tensor) -> Tensor:
        """Insert zeros into rows [R, N], so that each parameter starts a group."""
        if len(self._runs) == 1:
            return rows
        padded = rows.new_zeros(len(rows), sum(self._padded_runs))
        for target, run in self._pair_runs(padded, rows):
            target[:, : run.shape[-1]] = run
        return padded

    def unpad(self, padded: Tensor, rows: Tensor) -> None:
        """Copy `padded`, without the padding, to `rows` [R, N]."""
        for source, run in self._pair_runs(padded, rows):
            run.copy_(source[:, : run.shape[-1]])

    def _pair_runs(self, padded: Tensor, rows: Tensor) -> zip[tuple[Tensor, Tensor]]:
        return zip(padded.split(self._padded_runs, -1), rows.split(self._runs, -1), strict=True)


@lru_cache(maxsize=1024)
def make_layout(sizes: tuple[int, ...]) -> ParameterLayout:
    """Return the layout of parameters of these sizes, without parameters of size 0."""
    return ParameterLayout(tuple(size for size in sizes if size))


class GradientSums:
    """Sums of gradients over ranks, sent in E4M3 with a scale for each group of 128.

    The monitor measures sent gradients in sampled steps, under the module's `path`.
    """

    def __init__(self, traffic: Traffic, monitor: Monitor | None = None, path: str = "") -> None:
        self.traffic, self.monitor, self.path = traffic, monitor, path

    def reduce_scatter(
        self, output: Tensor, terms: Tensor, sizes: tuple[int, ...], group: Any, factor: float
    ) -> None:
        """Write this rank's part of the sum of `terms` over ranks, times `factor`, to `output`.

        `terms`, [world · N], are this rank's gradients; part `i`, of N elements, is for rank `i`.
        `sizes` are the numbers of elements of each parameter in a part, in order.
        """
        layout = make_layout(sizes)
        self.traffic.add(terms.numel(), 0, 1 - 1 / group.size())  # a rank keeps its own part
        rows = layout.pad(terms.view(group.size(), -1))
        layout.unpad(self._scatter(rows, group, factor), output.view(1, -1))

    def all_reduce(self, x: Tensor, sizes: tuple[int, ...], group: Any, factor: float) -> None:
        """Replace `x` [N] by its sum over ranks, times `factor`, with the same bits on all ranks.

        `sizes` are the numbers of elements of each parameter, in order.
        """
        world = group.size()
        if world == 1:
            x.mul_(factor)
            return
        layout = make_layout(sizes)
        self.traffic.add(x.numel(), 0, 2 * (1 - 1 / world))
        padded = layout.pad(x.view(1, -1))
        length = padded.numel()
        part = -(-length // (world * WIRE_GROUP_SIZE)) * WIRE_GROUP_SIZE
        terms = x.new_zeros(world, part, dtype=torch.float32)
        terms.view(-1)[:length] = padded[0]
        sent = pack(self._scatter(terms, group, factor))
        self.traffic.add(0, sent.numel(), world - 1)
        received = sent.new_empty(world, sent.shape[1])
        all_gather_single(received, sent, group=group)
        sums = add_up(received.unsqueeze(0), terms).view(1, -1)
        layout.unpad(sums[:, :length], x.view(1, -1))

    def _scatter(self, rows: Tensor, group: Any, factor: float) -> Tensor:
        """Return this rank's row [1, N] of the sum of `rows` [world, N], times `factor`."""
        sent = pack(rows)
        if self.monitor is not None and self.monitor.sampling:
            padded, scales = split_into_groups(rows)
            name = TensorName("", SENT, f"1×{WIRE_GROUP_SIZE}", E4M3.name, padded.dtype)
            self.monitor.record(self.path, name, measure(padded, scales, E4M3, WIRE_GROUP_SIZE))
        self.traffic.add(0, sent.numel(), 1 - 1 / group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return add_up(received.unsqueeze(1), torch.empty_like(rows[:1]), factor)
