"""Memory budgets of pipeline stages: held micro-batches, AGoQ's numbers, and compiled stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import FFN, JointGraph, capture_joint, compiled, cosine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action

from fp8pass import Config, ConfigError
from fp8pass.activation_memory.decision import saved_bytes
from fp8pass.distributed.pipeline_parallel import (
    most_held,
    pipeline_configs,
    planned_schedule,
    read_order,
    schedule_names,
)
from fp8pass.passes.joint.plan_saved_values import plan_saved_values
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.plan import Plan

RANKS = 4


# --- micro-batches that ranks hold ----------------------------------------------------------------


class Numbers(NamedTuple):
    """Arguments of a valid schedule."""

    name: str
    ranks: int
    stages_each: int
    microbatches: int

    def held(self) -> list[int]:
        stages = self.ranks * self.stages_each
        return list(map(most_held, read_order(self.name, stages, self.ranks, self.microbatches)))

    def configs(self, base: Config | None = None) -> list[Config]:
        return pipeline_configs(
            self.name,
            self.ranks * self.stages_each,
            ranks=self.ranks,
            microbatches=self.microbatches,
            base=base,
        )


def schedules(*names: str) -> st.SearchStrategy[Numbers]:
    """Draw schedules of these names, with enough micro-batches for all ranks."""
    stages_each = {
        "1F1B": st.just(1),
        "GPipe": st.just(1),
        "ZBVZeroBubble": st.just(2),
        "DualPipeV": st.just(2),
    }
    return st.sampled_from(names or schedule_names()).flatmap(
        lambda name: st.builds(
            lambda ranks, each, rounds: Numbers(name, ranks, each, ranks * rounds),
            st.integers(1, 8),
            stages_each.get(name, st.integers(1, 5)),
            st.integers(2, 5),
        )
    )


@given(schedules())
def test_a_rank_holds_at_least_one_micro_batch_and_at_most_all(numbers):
    held = numbers.held()
    assert len(held) == numbers.ranks
    assert all(1 <= h <= numbers.stages_each * numbers.microbatches for h in held)


@given(schedules("GPipe", "LoopedBFS"))
def test_breadth_first_schedules_hold_all_micro_batches(numbers):
    assert numbers.held() == [numbers.stages_each * numbers.microbatches] * numbers.ranks


@given(schedules("1F1B"))
def test_1f1b_holds_one_more_for_each_rank_that_follows(numbers):
    assert numbers.held() == list(range(numbers.ranks, 0, -1))


@given(schedules("Interleaved1F1B"))
def test_interleaved_1f1b_holds_two_more_for_each_rank_that_follows(numbers):
    _, ranks, each, microbatches = numbers
    last = (each - 1) * ranks + 1
    want = [min(last + 2 * i, each * microbatches) for i in reversed(range(ranks))]
    assert numbers.held() == want


@given(schedules())
def test_ranks_do_not_hold_fewer_of_more_micro_batches(numbers):
    more = numbers._replace(microbatches=numbers.microbatches + numbers.ranks)
    assert all(a <= b for a, b in zip(numbers.held(), more.held(), strict=True))


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        ("0F0 0B0 0F1 0B1", 1),
        ("0F0 0F1 0B0 0B1", 2),
        ("0F0 1F0 1B0 0B0", 2),
        ("0F0 0I0 0F1 0I1 0W0 0W1", 2),  # tensors for W are held until W runs
        ("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", 3),
    ],
)
def test_backwards_free_micro_batches(steps, held):
    table = {0: [None, *(_Action.from_str(s) for s in steps.split())]}
    order = read_order(SimpleNamespace(pipeline_order=table), None, None, None)
    assert list(map(most_held, order)) == [held]


def test_schedules_classes_and_names_give_equal_configurations():
    schedule = planned_schedule(ScheduleInterleaved1F1B, 8, 4, 8)
    numbers = {"stages": 8, "ranks": 4, "microbatches": 8}
    assert pipeline_configs(schedule) == pipeline_configs(ScheduleInterleaved1F1B, **numbers)
    assert pipeline_configs(schedule) == pipeline_configs("interleaved1f1b", **numbers)


# --- budgets --------------------------------------------------------------------------------------

AGOQ = Numbers("Interleaved1F1B", ranks=RANKS, stages_each=2, microbatches=8)


def test_budgets_follow_equations_21_and_22_of_agoq():
    """11, 9, 7 and 5 micro-batches, in 4, 5, 6 and 8 bits (section 4.2 and Fig. 1)."""
    assert AGOQ.held() == [3 * RANKS - 2 * i + 1 for i in range(1, RANKS + 1)] == [11, 9, 7, 5]
    stages = AGOQ.configs()
    assert [round(4 * c.memory_budget) for c in stages] == 2 * [4, 5, 6, 8]
    assert {c.save_format for c in stages} == {"e2m1"}


@given(schedules(), st.floats(0.1, 1.0))
def test_ranks_have_the_memory_of_the_rank_that_holds_most(numbers, share):
    held = numbers.held()
    for stage, config in enumerate(numbers.configs(Config.recipe("agoq", memory_budget=share))):
        one = held[rank_of(stage, numbers)]
        assert config.memory_budget in (2.0, pytest.approx(share * max(held) / one))
        assert one * config.memory_budget <= share * max(held) * (1 + 1e-12)


@given(schedules(), st.integers(2**20, 2**40))
def test_the_bytes_of_a_rank_include_all_micro_batches(numbers, budget):
    held = numbers.held()
    for stage, config in enumerate(numbers.configs(Config(memory_budget=budget))):
        one = held[rank_of(stage, numbers)]
        assert budget - one < one * config.memory_budget <= budget


def rank_of(stage: int, numbers: Numbers) -> int:
    """Return the rank of a stage. Stages go round the ranks, or back and forth (V)."""
    lap, place = divmod(stage, numbers.ranks)
    goes_back = numbers.name in ("ZBVZeroBubble", "DualPipeV") and lap == 1
    return numbers.ranks - 1 - place if goes_back else place


def test_other_options_do_not_change():
    base = Config.recipe("agoq", skip=("layers.0",), compiler="eager", memory_budget="1GiB")
    stages = pipeline_configs("1F1B", 4, microbatches=8, base=base)
    assert [c.memory_budget for c in stages] == [2**30 // held for held in (4, 3, 2, 1)]
    assert all(c.skip == base.skip and c.compiler == "eager" for c in stages)


@pytest.mark.parametrize(
    ("schedule", "numbers", "message"),
    [
        ("1FB", {}, "Unknown schedule '1FB'. Did you mean '1F1B'"),
        ("1F1B", {}, "stages=None must be a whole number"),
        ("1F1B", {"stages": 4}, "microbatches=None"),
        ("1F1B", {"stages": 4, "microbatches": True}, "microbatches=True"),
        ("1F1B", {"stages": 0, "microbatches": 1}, "stages=0 must be a whole number, at least 1"),
        ("1F1B", {"stages": 4, "microbatches": 3}, "greater than or equal to"),
        ("1F1B", {"stages": 4, "ranks": 2, "microbatches": 8}, "needs one stage on every rank"),
        ("Interleaved1F1B", {"stages": 8, "microbatches": 8}, "ranks=None must be a whole number"),
        (
            ScheduleInterleaved1F1B,
            {"stages": 8, "ranks": 3, "microbatches": 8},
            "same number of stages on every rank, got 8 stages on 3 ranks",
        ),
        (
            "Interleaved1F1B",
            {"stages": 8, "ranks": 4, "microbatches": 9},
            "does not support 8 stages on 4 ranks and 9 microbatches: .* multiple of",
        ),
        ("PipelineScheduleSingle", {"stages": 4, "microbatches": 8}, "abstract"),
        (int, {"stages": 4, "ranks": 4, "microbatches": 8}, "int does not support"),
        (4, {}, "4 is not a pipeline schedule.*, or its name"),
        (planned_schedule(Schedule1F1B, 4, 4, 8), {"stages": 4}, "leave out these"),
        (
            "1F1B",
            {"stages": 4, "microbatches": 8, "base": Config()},
            "is the largest format",
        ),
    ],
)
def test_wrong_arguments_are_refused(schedule, numbers, message):
    with pytest.raises(ConfigError, match=message):
        pipeline_configs(schedule, **numbers)


# --- stages within their budgets ------------------------------------------------------------------


class Block(nn.Module):
    """A residual SwiGLU block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(128), FFN(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


@cache
def planned_bytes(budget: float | int) -> float:
    """Return the bytes that a stage of one block saves of a micro-batch within a budget."""
    config = Config.recipe("agoq", memory_budget=budget)
    joint = block()
    ctx = replace(joint.ctx, config=config)
    plan_saved_values(joint.gm, ctx)
    return saved_bytes(ctx.decisions, ctx.facts)


@cache
def block() -> JointGraph:
    config = Config.recipe("agoq")
    joint = capture_joint(Block(), torch.randn(64, 128).requires_grad_(), config=config)
    quantize_linears(joint.gm, joint.ctx)
    return joint


@given(schedules(), st.sampled_from([1.0, 0.8]))
def test_equal_stages_stay_within_the_share_of_their_rank(numbers, share):
    common = share * max(numbers.held()) * planned_bytes(1.0)
    assert_held_within(common, numbers, Config.recipe("agoq", memory_budget=share))


@given(schedules(), st.sampled_from([0.8, 1.3]))
def test_stages_stay_within_the_bytes_of_their_rank(numbers, scarcity):
    common = int(scarcity * max(numbers.held()) * planned_bytes(1.0))
    assert_held_within(common, numbers, Config.recipe("agoq", memory_budget=common))


def assert_held_within(common: float, numbers: Numbers, base: Config) -> None:
    """Check the bytes of all micro-batches that a rank holds, for stages of one block."""
    held = numbers.held()
    for stage, config in enumerate(numbers.configs(base)):
        saved = planned_bytes(config.memory_budget)
        assert held[rank_of(stage, numbers)] * saved <= common * (1 + 1e-12)


class Stage(NamedTuple):
    eager: nn.Module
    program: Callable[..., Any]
    plan: Plan


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    """The first stage of each of the four ranks in AGoQ's case. All stages are equal."""
    base = Config(save_format="e2m1", compiler="eager")
    found = []
    for config in AGOQ.configs(base)[:RANKS]:
        module = nn.Sequential(Block(), Block())
        program, spy = compiled(module, config)
        program(torch.randn(64, 128).requires_grad_())
        found.append(Stage(module, program, spy.plan))
    return found


@pytest.mark.long
def test_stages_train_like_eager(stages):
    """All micro-batches run forward, then backward from the last stage, as in a schedule."""
    batches = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))
    parameters = [p for stage in stages for p in stage.eager.parameters()]

    def gradients(programs: list[Callable[..., Any]]) -> list[Tensor]:
        for p in parameters:
            p.grad = None
        held = []
        for batch in batches:
            x, edges = batch, []
            for program in programs:
                x = x.detach().requires_grad_()  # received from the previous stage
                edges.append((x, y := program(x)))
                x = y
            held.append(edges)
        for edges in held:
            gradient = edges[-1][1].detach()
            for received, sent in reversed(edges):
                sent.backward(gradient)
                gradient = received.grad
        return [p.grad for p in parameters]

    want = gradients([stage.eager for stage in stages])
    got = gradients([stage.program for stage in stages])
    for a, b in zip(got, want, strict=True):
        assert cosine(a, b) > 0.98


@pytest.mark.long
def test_ranks_hold_no_more_than_the_first(stages):
    held, saved = AGOQ.held(), [stage.plan.saved_bytes for stage in stages]
    assert all(a < b for a, b in itertools.pairwise(saved))
    assert all(h * s <= held[0] * saved[0] for h, s in zip(held, saved, strict=True))


@pytest.mark.long
def test_most_values_have_the_formats_of_the_paper(stages):
    """Most values have 4, 5, 6 and 8 bits. Others use remaining bytes or save missing bytes."""
    most_common = []
    for stage in stages:
        low = [s for s in stage.plan.saved if s.expected_error]
        formats = [s.saved_as.split()[0] for s in low for _ in range(s.bytes)]
        most_common.append(max(set(formats), key=formats.count))
    assert most_common == ["e2m1", "e2m2", "e2m3", "e4m3"]


def test_the_name_of_a_recipe_is_refused():
    with pytest.raises(TypeError, match=r"base must be a fp8pass.Config.*recipe\('agoq'\)"):
        pipeline_configs("1F1B", 4, microbatches=8, base="agoq")
