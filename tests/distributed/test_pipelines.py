"""Pipelines on two ranks. Each stage is compiled with its budget for the schedule."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import parallel
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import fp8pass
from fp8pass import Config

MICROBATCHES = 4
STAGES_EACH = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2}
DOCS = Path(__file__).parents[2] / "docs" / "pipelines.md"


class Stage(nn.Module):
    """A block of a decoder. The first stage has the embedding, the last the output head."""

    def __init__(self, decoder: parallel.Decoder, index: int) -> None:
        super().__init__()
        last = index == len(decoder.blocks) - 1
        self.before = decoder.embedding if index == 0 else nn.Identity()
        self.block = decoder.blocks[index]
        self.after = nn.Sequential(decoder.norm, decoder.head) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


class Pipeline:
    """One rank of a pipeline."""

    def __init__(
        self, name: str, device: str, base: Config | None, *, shards: bool = False, **options: bool
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.device, ranks = dist.get_rank(), device, dist.get_world_size()
        count = ranks * STAGES_EACH.get(name, 2)
        decoder = parallel.Decoder(count).to(device)
        parts = {i: Stage(decoder, i) for i in range(self.rank, count, ranks)}
        if shards:
            mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=("pipeline", "shards"))
            for part in parts.values():
                fully_shard(part, mesh=mesh["shards"])
        stages = [PipelineStage(x, i, count, torch.device(device)) for i, x in parts.items()]
        kind = get_schedule_class(name)
        of = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.new_schedule = partial(kind, of, MICROBATCHES, loss_fn=parallel.loss_of)
        self.schedule = self.new_schedule(**options)
        if base is not None:
            configs = fp8pass.distributed.pipeline_configs(self.schedule, base=base)
            assert len(configs) == count
            for stage in stages:
                stage.submod.compile(backend=fp8pass.backend(configs[stage.stage_index]))
        self.model = nn.ModuleList(stage.submod for stage in stages)
        self.parameters = [p for stage in stages for p in stage.submod.parameters()]

    def step(self) -> list[Tensor]:
        """Run a step, and return the losses of all micro-batches on the last rank."""
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
    """Train in the formats that the budgets allow, with an optimizer on each rank."""
    pipeline = Pipeline(schedule, device, Config.recipe("agoq", compiler="eager"))
    optimizer = fp8pass.optim.AdamW(pipeline.parameters, lr=3e-3)
    losses = []
    for _ in range(6):
        losses.append(sum(pipeline.step()))
        optimizer.step()
        optimizer.zero_grad()
    assert dist.get_rank() == 0 or losses[-1] < 0.95 * losses[0]


def moments_after_two_steps(
    device: str, schedule: str, attaches: int, *, replaces: bool = False, **options: bool
) -> list[Tensor]:
    """Return first moments, which are proportional to gradients.

    `attaches` is `accumulate`. If `replaces` is set, a new schedule runs the second step.
    """
    pipeline = Pipeline(schedule, device, None, **options)
    exact = {"first_moment": "fp32", "second_moment": "fp32"}
    optimizer = fp8pass.optim.AdamW(pipeline.parameters, lr=1e-3, **exact)
    if attaches:
        fp8pass.optim.step_in_backward(
            pipeline.model, optimizer, accumulate=attaches, buffer="fp16"
        )
    for _ in range(2):
        pipeline.step()
        if not attaches:
            optimizer.step()
            optimizer.zero_grad()
        if replaces:
            replaced, pipeline.schedule = pipeline.schedule, pipeline.new_schedule()
            assert replaced._loss_fn is not None  # the old schedule is still alive
    return [parallel.full(optimizer.state[p]["exp_avg"]) for p in pipeline.parameters]


def attached_equals_a_step(device: str, schedule: str, **options: bool) -> None:
    """Schedules divide gradients by the number of micro-batches unless `scale_grads=False`."""
    # FSDP2 reduces the sum over all micro-batches.
    count = 1 if options.get("shards") else MICROBATCHES
    want, got = (moments_after_two_steps(device, schedule, x, **options) for x in (0, count))
    for a, b in zip(got, want, strict=True):
        assert float(b.norm()) > 0
        assert float((a - b).norm()) <= 2e-3 * float(b.norm())


def backwards_in_two_parts_are_refused(device: str) -> None:
    pipeline = Pipeline("InterleavedZeroBubble", device, None)
    optimizer = fp8pass.optim.AdamW(pipeline.parameters)
    refused = pytest.raises(
        fp8pass.ConfigError, match="does not call the hooks that step_in_backward needs"
    )
    with refused:
        fp8pass.optim.step_in_backward(pipeline.model, optimizer, accumulate=MICROBATCHES)
    with mock.patch("fp8pass.compat.find_schedule", return_value=None):
        fp8pass.optim.step_in_backward(pipeline.model, optimizer, accumulate=MICROBATCHES)
    optimizer.step()
    later = pipeline.new_schedule()
    with refused:
        optimizer.step()
    del later


def clipping_is_refused(device: str) -> None:
    """Each rank has the gradients of its own stages only."""
    pipeline = Pipeline(next(iter(STAGES_EACH)), device, None)
    optimizer = fp8pass.optim.AdamW(pipeline.parameters)
    with pytest.raises(fp8pass.ConfigError, match="cannot clip gradients in a pipeline"):
        fp8pass.optim.step_in_backward(pipeline.model, optimizer, max_norm=1.0)


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("claim", [exact_equals_eager, trains], ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("schedule", STAGES_EACH)
def test_pipelines_train(two, schedule, claim):
    two(claim, schedule)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"scale_grads": False}, {"shards": True}, {"scale_grads": False, "replaces": True}],
    ids=str,
)
@pytest.mark.parametrize("schedule", STAGES_EACH)
def test_updates_in_the_backward_of_a_pipeline_equal_a_step(two, schedule, options):
    two(partial(attached_equals_a_step, **options), schedule)


@pytest.mark.long
def test_updates_in_backwards_of_two_parts_are_refused(two):
    two(backwards_in_two_parts_are_refused)


@pytest.mark.long
def test_clipping_in_the_backward_of_a_pipeline_is_refused(two):
    two(clipping_is_refused)


def run_as_a_module(device: str, code: str) -> list[float]:
    """Run a script, and return the losses that it prints."""
    script = ModuleType("example")
    sys.modules[script.__name__] = script  # Dynamo looks up functions here
    printed: list[float] = []
    script.print = lambda step, loss: printed.append(loss)  # type: ignore[attr-defined]
    with (
        mock.patch.object(dist, "init_process_group"),  # a group exists
        mock.patch.dict(fp8pass.RECIPES["agoq"], compiler="eager"),  # ten times as fast
    ):
        exec(compile(code, "example", "exec"), script.__dict__)
    return printed


@pytest.mark.long
def test_the_example_of_the_docs_trains(two):
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", DOCS.read_text(), re.DOTALL)
    first, last = two(run_as_a_module, code)
    assert not first
    assert last[-1] < 0.8 * last[0]
