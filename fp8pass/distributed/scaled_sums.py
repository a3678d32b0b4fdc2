"""Sums over ranks of FP8 codes, added up in FP8 on the way (FP8-LM 2.1).

    s = max over ranks of amax / 448          one for 4096 numbers, which all ranks code alike
    codes = E4M3(µ g / s)                     added up by NCCL, rounded after each addition
    sum = codes · s / µ

µ leaves room for the sum. It is halved for the next reduction where more than 0.001% of the sums
reached the largest code, and else doubles in 1,000 of them. It begins with 1 / world, of which no
sum overflows, and ends at 1, above which the largest gradient itself would. One sum in a parameter
of less than 100,000 is more than that share: µ of small ones stays near where it begins.

FP8-LM scales tensors. Chunks of 4096 numbers of a parameter have a scale each here, and each
parameter has its µ. None depends on what lies beside it in the buffer (`layout.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from fp8pass import hardware
from fp8pass.compat.collectives import all_gather_single, reduce_scatter_single
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import Quantization
from fp8pass.dialect.quantization import group as group_of
from fp8pass.distributed.collectives import Sums, Traffic, Watch
from fp8pass.distributed.layout import Layout, owners_of
from fp8pass.distributed.wire import fp8, scales_of

CHUNK = 4096
# Of sums that have the largest code: above, µ is halved.
THRESHOLD = 1e-5
GROWTH = 2 ** (1 / 1000)


class AutoScale:
    """µ, equal on all ranks, and how many of the latest sums overflowed; fp32 [P] on a device.

    Attributes:
        mu: what all codes of a parameter are multiplied by.
        overflowed: the share of this rank's sums of it that reached the largest code.
    """

    def __init__(self, world: int, device: torch.device, parameters: int = 1) -> None:
        # Adapted once before it is used.
        self.mu = torch.full((parameters,), 1 / (GROWTH * world), device=device)
        self.overflowed = torch.zeros(parameters, device=device)

    def count_overflows(self, reached: Tensor, owners: Tensor) -> None:
        """Take the shares from chunks [chunks, N] with 1 for a sum that reached the largest code.

        `owners` int64 [chunks] are the numbers of their parameters.
        """
        zeros = torch.zeros_like(self.overflowed)
        counts = zeros.index_add(0, owners, reached.sum(-1))
        elements = zeros.index_add(0, owners, torch.full_like(reached[:, 0], reached.shape[-1]))
        self.overflowed = counts / elements.clamp_min(1)

    def adapt(self, overflowed: Tensor) -> None:
        """Choose the next µ by the largest share over all ranks, without waiting for the device."""
        grown = (self.mu * GROWTH).clamp_max(1.0)
        self.mu = torch.where(overflowed > THRESHOLD, self.mu / 2, grown)


class ScaledSums(Sums):
    """In chunks whose scale all ranks share, so that codes can be added up.

    Attributes:
        scales: µ of each buffer's parameters, by its number and their sizes.
    """

    unit = CHUNK

    def __init__(self, traffic: Traffic, watch: Watch | None = None) -> None:
        super().__init__(traffic, watch)
        self.scales: dict[tuple[int, Layout], AutoScale] = {}

    def _scattered(self, rows: Tensor, layout: Layout, group: Any, factor: float) -> Tensor:
        """As `Sums` says, rounded after each addition."""
        codes, scales = self._sums(rows, layout, group, 0)
        mine = scales[dist.get_rank(group)].unsqueeze(0)
        return _decoded(codes.unsqueeze(0), mine).mul_(factor)

    def _all_reduced(
        self, terms: Tensor, layout: Layout, group: Any, factor: float, buffer: int
    ) -> Tensor:
        codes, scales = self._sums(terms.view(group.size(), -1), layout, group, buffer)
        sums = codes.new_empty(group.size(), codes.numel())
        self.traffic.add(0, codes.nbytes, group.size() - 1)
        pair = sums.view(-1).view(torch.uint8), codes.view(torch.uint8)
        all_gather_single(*pair, group=group)
        return _decoded(sums, scales).mul_(factor).flatten()

    def _sums(self, rows: Tensor, layout: Layout, group: Any, buffer: int) -> tuple[Tensor, Tensor]:
        """Codes of this rank's row of the sum, E4M3 [N], and the scales [world, chunks] of all."""
        if (buffer, layout) not in self.scales:
            # The last one is for chunks of zeros after all parameters.
            new = AutoScale(group.size(), rows.device, len(layout.sizes) + 1)
            self.scales[buffer, layout] = new
        auto = self.scales[buffer, layout]
        owners = owners_of(layout, (len(rows), -(-rows.shape[-1] // CHUNK)), rows.device)
        whole = pad(rows.float(), (0, -rows.shape[-1] % CHUNK)).unflatten(-1, (-1, CHUNK))
        scales = self._shared_scales(whole.abs().amax(-1), owners, auto, group)
        flat = whole.flatten(-2)
        if self.watch and self.watch.looks:
            self.watch(flat, scales, CHUNK, auto.mu.amin().view(1))
        codes = fp8.quantize.default(flat, scales, str(Quantization(E4M3, group_of(CHUNK))))[
            :, : rows.shape[-1]
        ]
        self.traffic.add(0, codes.nbytes, 1 - 1 / group.size())
        mine = added_up(codes.contiguous(), group)
        reached = pad((mine.float().abs() >= E4M3.max).float(), (0, -len(mine) % CHUNK))
        auto.count_overflows(reached.view(-1, CHUNK), owners[dist.get_rank(group)])
        return mine, scales

    def _shared_scales(self, amax: Tensor, owners: Tensor, auto: AutoScale, group: Any) -> Tensor:
        """The scales of all rows' chunks, with µ, from the largest numbers on any rank.

        µ is adapted first: what it follows from comes with these.
        """
        finite = torch.where(amax.isnan(), torch.inf, amax)  # gloo's maximum loses a NaN
        shared = torch.cat((finite.flatten(), auto.overflowed))
        dist.all_reduce(shared, dist.ReduceOp.MAX, group)
        ways = 2 * (1 - 1 / group.size())
        self.traffic.add(0, shared.nbytes, ways)
        auto.adapt(shared[amax.numel() :])
        return scales_of(shared[: amax.numel()].view_as(amax) / auto.mu[owners])


def added_up(codes: Tensor, group: Any) -> Tensor:
    """This rank's part, E4M3 [N], of the sum over ranks of codes, E4M3 [world, N].

    By NCCL on GPUs from Hopper on, which adds up on the way. Elsewhere there are no sums of FP8:
    the rank adds up what it gets in the order of a ring, and rounds as often.
    """
    if codes.is_cuda and hardware.capability_of(codes.device) >= (9, 0):
        mine = torch.empty_like(codes[0])
        reduce_scatter_single(mine, codes, group=group)
        return mine
    received = torch.empty_like(codes)
    dist.all_to_all_single(received.view(torch.uint8), codes.view(torch.uint8), group=group)
    return added_in_turn(received.roll(-1 - dist.get_rank(group), 0))


def added_in_turn(codes: Tensor) -> Tensor:
    """The sum of codes, E4M3 [terms, N], rounded after each addition, cut at the largest code."""
    total = codes[0]
    for term in codes[1:]:
        total = (total.float() + term.float()).clamp(-E4M3.max, E4M3.max).to(total.dtype)
    return total


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 numbers [R, N] of codes [R, N] in chunks that have the scales [R, chunks]."""
    values = pad(codes.float(), (0, -codes.shape[-1] % CHUNK)).unflatten(-1, (-1, CHUNK))
    return (values * scales.float().unsqueeze(-1)).flatten(-2)[:, : codes.shape[-1]]
