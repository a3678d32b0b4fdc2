"""Sums over ranks whose terms cross the wire in 8 bits (AGoQ 5).

Every rank gets its part of all ranks' terms, decodes them, and adds them up in fp32: nothing that
was added is rounded again, as it is by a reduction in 8 bits on the way (`scaled_sums.py`). Where
all ranks want all sums, these cross the wire in 8 bits once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from fp8pass.compat.collectives import all_gather_single
from fp8pass.distributed.layout import Layout, layout_of
from fp8pass.distributed.wire import GROUP_SIZE, add_up, grouped, packed


@dataclass
class Traffic:
    """What a rank has sent to others.

    Attributes:
        elements: numbers that it sent, each once for every rank that got it.
        bytes: what they were sent as.
    """

    elements: int = 0
    bytes: int = 0

    def add(self, elements: int, sent: int, copies: float) -> None:
        """Add numbers that are sent `copies` times as so many bytes."""
        self.elements += int(elements * copies)
        self.bytes += int(sent * copies)

    @property
    def ratio(self) -> float:
        """Bytes sent over those of bf16; 1 before anything was sent."""
        return self.bytes / (2 * self.elements) if self.elements else 1.0


class Sums(ABC):
    """How gradients are added up over ranks.

    Attributes:
        traffic: counts what is sent.
        watch: takes what is rounded to be sent, and its scales; None for nobody.
        unit: elements that share a scale.
    """

    unit: int

    def __init__(self, traffic: Traffic, watch: Watch | None = None) -> None:
        self.traffic, self.watch = traffic, watch

    def reduce_scatter(
        self, output: Tensor, terms: Tensor, sizes: tuple[int, ...], group: Any, factor: float
    ) -> None:
        """Write this rank's part of the sum of `terms` over ranks, times `factor`, to `output`.

        Args:
            output: [N], of any float dtype.
            terms: [world · N]; the part of each rank, one after the other.
            sizes: elements of each parameter in a part, in order.
            group: the process group.
            factor: what the sum is multiplied by, 1 / world for the mean.
        """
        layout = layout_of(sizes, self.unit)
        self.traffic.add(terms.numel(), 0, 1 - 1 / group.size())  # a rank keeps its own part
        spread = layout.spread(terms.view(group.size(), -1))
        layout.collect(self._scattered(spread, layout, group, factor), output.view(1, -1))

    @abstractmethod
    def _scattered(self, rows: Tensor, layout: Layout, group: Any, factor: float) -> Tensor:
        """The sum [1, N] over ranks of this rank's row of `rows` [world, N], times `factor`."""

    def all_reduce(
        self, x: Tensor, sizes: tuple[int, ...], group: Any, factor: float, buffer: int = 0
    ) -> None:
        """Replace `x` [N] by the sum over ranks, times `factor`: by the same bits on all ranks.

        `sizes` are the elements of each parameter in it, and `buffer` is its number among those
        that are reduced in turn.
        """
        world = group.size()
        if world == 1:
            x.mul_(factor)
            return
        layout = layout_of(sizes, self.unit)
        self.traffic.add(x.numel(), 0, 2 * (1 - 1 / world))
        spread = layout.spread(x.view(1, -1))
        length = spread.numel()
        part = -(-length // (world * self.unit)) * self.unit  # of whole groups
        terms = x.new_zeros(world * part, dtype=torch.float32)
        terms[:length] = spread[0]
        sums = self._all_reduced(terms, layout, group, factor, buffer)
        layout.collect(sums[:length].view(1, -1), x.view(1, -1))

    @abstractmethod
    def _all_reduced(
        self, terms: Tensor, layout: Layout, group: Any, factor: float, buffer: int
    ) -> Tensor:
        """The sum of `terms` fp32 [world · N] over ranks, times `factor`; `terms` may change."""


class Watch(Protocol):
    """Looks at what is sent in some steps."""

    @property
    def looks(self) -> bool:
        """Whether it does in this step."""

    def __call__(self, rows: Tensor, scales: Tensor, group_size: int, mu: Tensor | None) -> None:
        """Look at rows [R, K], the scales [R, K / G] of their groups, and FP8-LM's µ."""


class GroupSums(Sums):
    """In groups that have a scale each; every rank decodes its part of all terms (AGoQ 5)."""

    unit = GROUP_SIZE

    def _scattered(self, rows: Tensor, layout: Layout, group: Any, factor: float) -> Tensor:
        """As `Sums` says. Nothing that was added is rounded again."""
        sent = packed(rows)
        if self.watch and self.watch.looks:
            self.watch(*grouped(rows), GROUP_SIZE, None)
        self.traffic.add(0, sent.numel(), 1 - 1 / group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return add_up(received.unsqueeze(1), torch.empty_like(rows[:1]), factor)

    def _all_reduced(
        self, terms: Tensor, layout: Layout, group: Any, factor: float, buffer: int
    ) -> Tensor:
        world = group.size()
        mine = self._scattered(terms.view(world, -1), layout, group, factor)
        sent = packed(mine)
        self.traffic.add(0, sent.numel(), world - 1)
        received = sent.new_empty(world, sent.shape[1])
        all_gather_single(received, sent, group=group)
        return add_up(received.unsqueeze(0), terms.view(world, -1)).flatten()
