"""Sums over ranks whose terms cross the wire in 8 bits (AGoQ 5.1).

Every rank gets its part of all ranks' terms, decodes them, and adds them up in fp32: nothing that
was added is rounded again, as it would be by a reduction in 8 bits on the way. Where all ranks want
all sums, these cross the wire in 8 bits once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fp8pass.distributed.wire import add_up, packed


@dataclass
class Traffic:
    """What a rank has sent to others.

    Attributes:
        elements: numbers that it sent, each once for every rank that got it.
        bytes: what they were sent as.
    """

    elements: int = 0
    bytes: int = 0

    def count(self, rows: Tensor, wire: Tensor, copies: float) -> None:
        """Add rows, and what is sent of them `copies` times."""
        self.add(rows.numel(), wire.numel(), copies)

    def add(self, elements: int, sent: int, copies: float) -> None:
        """Add numbers that are sent `copies` times as so many bytes."""
        self.elements += int(elements * copies)
        self.bytes += int(sent * copies)

    @property
    def ratio(self) -> float:
        """Bytes sent over those of bf16; 1 before anything was sent."""
        return self.bytes / (2 * self.elements) if self.elements else 1.0


def reduce_scatter(output: Tensor, terms: Tensor, group: Any, factor: float, to: Traffic) -> None:
    """Write this rank's part of the sum of `terms` over ranks, times `factor`, to `output`.

    Args:
        output: [N], of any float dtype.
        terms: [world · N]; the part of each rank, one after the other.
        group: the process group.
        factor: what the sum is multiplied by, 1 / world for the mean.
        to: counts what is sent.
    """
    rows = terms.view(group.size(), -1)
    sent = packed(rows)
    to.count(rows, sent, 1 - 1 / group.size())  # a rank keeps its own part
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    add_up(received.unsqueeze(1), output.view(1, -1), factor)


def all_reduce(x: Tensor, group: Any, factor: float, to: Traffic) -> None:
    """Replace `x` [N] by the sum over ranks, times `factor`: by the same bits on all ranks."""
    world = group.size()
    if world == 1:
        x.mul_(factor)
        return
    part = -(-x.numel() // world)
    terms = x.new_zeros(world * part, dtype=torch.float32)
    terms[: x.numel()] = x
    mine = terms.new_empty(1, part)
    reduce_scatter(mine[0], terms, group, factor, to)
    sent = packed(mine)
    to.count(mine, sent, world - 1)
    received = sent.new_empty(world, sent.shape[1])
    dist.all_gather_into_tensor(received, sent, group=group)
    add_up(received.unsqueeze(0), terms.view(world, part))
    x.copy_(terms[: x.numel()])
