"""Pipelines on two ranks, each stage compiled with the budget that the schedule gives it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import parallel
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import fp8pass
from fp8pass import Config

MICROBATCHES = 4
STAGES_EACH = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2}
DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"


class Stage(nn.Module):
    """A block of a decoder, with what comes before the first one or after the last one."""

    def __init__(self, decoder: parallel.Decoder, index: int) -> None:
        super().__init__()
        last = index == len(decoder.blocks) - 1
        self.before = decoder.embedding if index == 0 else nn.Identity()
        self.block = decoder.blocks[index]
        self.after = nn.Sequential(decoder.norm, decoder.head) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


class Pipeline:
    """One rank of it."""

    def __init__(self, name: str, device: str, base: Config | None) -> None:
        torch.manual_seed(0)
        self.rank, self.device, ranks = dist.get_rank(), device, dist.get_world_size()
        count = ranks * STAGES_EACH[name]
        decoder = parallel.Decoder(count).to(device)
        stages = [
            PipelineStage(Stage(decoder, i), i, count, torch.device(device))
            for i in range(self.rank, count, ranks)
        ]
        kind = get_schedule_class(name)
        of = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(of, MICROBATCHES, loss_fn=parallel.loss_of)
        if base is not None:
            configs = fp8pass.pipeline_parallel.configs(self.schedule, base=base)
            assert len(configs) == count
            for stage in stages:
                stage.submod.compile(backend=fp8pass.backend(configs[stage.stage_index]))
        self.parameters = [p for stage in stages for p in stage.submod.parameters()]

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
    for base in (None, Config.recipe("exact", compiler="eager")):
        pipeline = Pipeline(schedule, device, base)
        losses = pipeline.step()
        found.append([*losses, *(parallel.full(p.grad) for p in pipeline.parameters)])
    for got, want in zip(found[1], found[0], strict=True):
        assert float((got - want).norm()) <= 4e-5 * float(want.norm()) + 1e-12


def trains(device: str, schedule: str) -> None:
    """In the formats that each stage's budget allows, with the optimizer on each rank."""
    pipeline = Pipeline(schedule, device, Config.recipe("agoq", compiler="eager"))
    optimizer = fp8pass.optim.AdamW(pipeline.parameters, lr=3e-3)
    losses = []
    for _ in range(6):
        losses.append(sum(pipeline.step()))
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_rank() == 0 or losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("claim", [exact_equals_eager, trains], ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("schedule", STAGES_EACH)
def test_pipeline(two, schedule, claim):
    two(claim, schedule)


def run_as_a_module(device: str, code: str) -> list[float]:
    """The losses that a script prints."""
    script = ModuleType("example")
    sys.modules[script.__name__] = script  # where Dynamo looks up what a model calls
    printed: list[float] = []
    script.print = lambda step, loss: printed.append(loss)  # type: ignore[attr-defined]
    with (
        mock.patch.object(dist, "init_process_group"),  # there is one
        mock.patch.dict(fp8pass.RECIPES["agoq"], compiler="eager"),  # ten times as fast here
    ):
        exec(compile(code, "example", "exec"), script.__dict__)
    return printed


def test_the_example_of_the_docs_trains(two):
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", DOCS.read_text(), re.DOTALL)
    first, last = two(run_as_a_module, code)
    assert not first
    assert last[-1] < 0.8 * last[0]
