"""A pipeline of two stages on two ranks, each compiled with a format of its own."""

from __future__ import annotations

import parallel
import pytest
import torch
from fp8pass.distributed.stages import stage_format
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fp8pass
from fp8pass import Config

MICROBATCHES = 4
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Stage(nn.Module):
    """A block of a decoder, with what comes before the first one or after the last one."""

    def __init__(self, decoder: parallel.Decoder, rank: int) -> None:
        super().__init__()
        self.before = decoder.embedding if rank == 0 else nn.Identity()
        self.block = decoder.blocks[rank]
        self.after = nn.Identity() if rank == 0 else nn.Sequential(decoder.norm, decoder.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


class Pipeline:
    """One rank of it."""

    def __init__(self, schedule: str, device: str, config: Config | None) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.stage = Stage(parallel.Decoder().to(device), self.rank)
        if config is not None:
            self.stage.compile(backend=fp8pass.backend(config))
        self.device = device
        place = PipelineStage(self.stage, self.rank, dist.get_world_size(), torch.device(device))
        self.schedule = SCHEDULES[schedule](place, MICROBATCHES, loss_fn=parallel.loss_of)

    def step(self) -> list[Tensor]:
        """The losses of all micro-batches, on the last rank."""
        ids = torch.cat(
            [parallel.batch(self.device, i, of_rank=False) for i in range(MICROBATCHES)]
        )
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(ids)
        else:
            self.schedule.step(target=ids, losses=losses)
        return [loss.detach().cpu() for loss in losses]


def exact_equals_eager(device: str, schedule: str) -> None:
    found = []
    for config in (None, Config.recipe("exact", compiler="eager")):
        pipeline = Pipeline(schedule, device, config)
        losses = pipeline.step()
        found.append([*losses, *(parallel.full(p.grad) for p in pipeline.stage.parameters())])
    for got, want in zip(found[1], found[0], strict=True):
        assert float((got - want).norm()) <= 4e-5 * float(want.norm()) + 1e-12


def trains(device: str, schedule: str) -> None:
    """With the format that AGoQ gives to each stage, and the optimizer on each rank."""
    stages = dist.get_world_size()
    config = Config(save_format=stage_format(stages, dist.get_rank() + 1), compiler="eager")
    pipeline = Pipeline(schedule, device, config)
    optimizer = fp8pass.optim.AdamW(pipeline.stage.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        losses.append(sum(pipeline.step()))
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_rank() == 0 or losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("claim", [exact_equals_eager, trains], ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline(two, schedule, claim):
    two(claim, schedule)
