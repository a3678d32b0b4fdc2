"""`average_sums`: sums of micro-batches in 8 bits, averaged over ranks once for each update."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8pass
from fp8pass.optim import AdamW, step_in_backward

MICRO_BATCHES = 4
EXACT = {"first_moment": "fp32", "second_moment": "fp32"}


class Branches(nn.Module):
    """A shared layer, and one branch for each rank."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared = nn.Linear(64, 96)
        self.branches = nn.ModuleList(nn.Linear(96, 32) for _ in range(3))
        self.register_buffer("offset", torch.randn(96))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.shared(x) + self.offset))


def batch(device: str, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(16, 64, generator=generator).to(device)


def new_optimizer(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01, **EXACT)


def train_plainly(device: str, world: int, steps: int, max_norm: float) -> tuple[Any, list[float]]:
    """Train on the batches of all ranks in one process. Return the model and norms."""
    model, norms = Branches().to(device), []
    optimizer = new_optimizer(model)
    for step in range(steps):
        for rank in range(world):
            for i in range(MICRO_BATCHES):
                x = batch(device, rank, step * MICRO_BATCHES + i)
                (model(x, rank).square().sum() / world).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def copies_equal_one_process(device: str, buffer: str, max_norm: float, backend: str) -> None:
    """Ranks start from different weights, and each rank uses another branch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Branches(seed=rank).to(device)
    optimizer = new_optimizer(model)
    attached = step_in_backward(
        model, optimizer, accumulate=MICRO_BATCHES, max_norm=max_norm, buffer=buffer
    )
    replicas = fp8pass.distributed.average_sums(attached)
    program = torch.compile(model, backend=backend) if backend else model
    norms = []
    with mock.patch("fp8pass.optim.sums.BUCKET", 3000):
        for number in range(3 * MICRO_BATCHES):
            program(batch(device, rank, number), rank).square().sum().backward()
            if (number + 1) % MICRO_BATCHES == 0:
                norms.append(attached.norm.item())
    want, want_norms = train_plainly(device, world, 3, max_norm)
    assert norms[0] == pytest.approx(want_norms[0], rel=0.05)
    start = dict(Branches().to(device).named_parameters())
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        same = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(same, p.detach())
        assert all(torch.equal(x, same[0]) for x in same), name
        change, wanted = p - start[name], q - start[name]
        if int(name.split(".")[1] if "branches" in name else 0) >= world:
            assert not change.any(), name  # a branch that no rank uses
            continue
        assert (change - wanted).norm() < 0.4 * wanted.norm(), name
    assert 0.5 < replicas.traffic.ratio < 0.6


@pytest.mark.long
@pytest.mark.parametrize(
    ("buffer", "max_norm", "backend"),
    [("e4m3", 1.0, ""), ("fp16", math.inf, ""), ("e4m3", math.inf, "eager")],
)
def test_copies_equal_one_process(two, buffer, max_norm, backend):
    two(partial(copies_equal_one_process, buffer=buffer, max_norm=max_norm, backend=backend))


def not_finite_reaches_all_ranks(device: str) -> None:
    rank = dist.get_rank()
    model = Branches().to(device)
    attached = step_in_backward(model, new_optimizer(model), max_norm=1.0)
    fp8pass.distributed.average_sums(attached)
    x = batch(device, rank, 0)
    x[0, 0] = torch.nan if rank == 1 else 0.0
    model(x, 0).square().sum().backward()
    assert model.shared.weight.isnan().any()


@pytest.mark.long
def test_a_nan_of_one_rank_reaches_all(two):
    two(not_finite_reaches_all_ranks)


def wrong_uses_are_refused(device: str) -> None:
    model = Branches().to(device)
    attached = step_in_backward(model, new_optimizer(model))
    with pytest.raises(fp8pass.ConfigError, match="pass max_norm to step_in_backward"):
        fp8pass.distributed.average_sums(attached)
    sharded = fully_shard(nn.Linear(8, 8).to(device))
    attached = step_in_backward(sharded, new_optimizer(sharded), max_norm=1.0)
    with pytest.raises(fp8pass.ConfigError, match="supports plain parameters only"):
        fp8pass.distributed.average_sums(attached)


@pytest.mark.long
def test_wrong_uses_are_refused(two):
    two(wrong_uses_are_refused)
