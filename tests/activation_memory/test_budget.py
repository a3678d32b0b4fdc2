"""A memory budget limits saved bytes by recomputation. A budget that is too small is an error."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers import (
    FFN,
    MLP,
    JointGraph,
    TrainingStep,
    assert_same_step,
    benchmark_models,
    capture_joint,
    compiled,
    cosine,
    count_planned,
    count_saved,
    gpt2,
    llama,
    step,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fp8pass import backend, explain, graph
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.budget import (
    RECOMPUTE_EXACT,
    RECOMPUTE_INEXACT,
    SAVE_EXACT,
    SAVE_LOW_BIT,
    BudgetProblem,
)
from fp8pass.activation_memory.cuts import cheapest_plan
from fp8pass.activation_memory.decision import saved_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.needs import find_needs
from fp8pass.activation_memory.planner import Planner
from fp8pass.config import Config
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.graph.classify import Kind, kind
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.joint.materialize_plan import materialize_plan
from fp8pass.passes.joint.plan_saved_values import plan_saved_values
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.plan import Plan
from fp8pass.testing.strategies import programs

# --- a decoder within budgets -------------------------------------------------------------------

BUDGETS = (0.6, 0.3)


def decoder(layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    models = benchmark_models()
    cos, sin = models.rope_tables(32, 32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 32, 128, generator=generator).bfloat16().requires_grad_()
    torch.manual_seed(0)
    return models.Stack(layers, 128, 4, 352).bfloat16(), (x, cos, sin)


def train(make, config):
    """Return one step of a new model, and the plan."""
    torch._dynamo.reset()
    model, args = make()
    program, spy = compiled(model, config)
    return step(program, model, args), spy.plan


@cache
def unlimited(recipe: str) -> tuple[TrainingStep, Plan]:
    """Return a step of the decoder without a budget, and the plan."""
    return train(decoder, Config.recipe(recipe, compiler="eager"))


def train_within(budget: float, recipe: str) -> tuple[TrainingStep, Plan]:
    """Return a step of the decoder, and the plan, which must agree with autograd."""
    torch._dynamo.reset()
    model, args = decoder()
    program, spy = compiled(model, Config.recipe(recipe, compiler="eager", memory_budget=budget))
    found = step(program, model, args)
    saved = count_saved(program, args, args[:1])
    assert saved == count_planned(spy.plan)
    sizes = {(t.dtype, t.shape): t.bytes for s in spy.plan.saved for t in s.tensors}
    assert sum(sizes[key] * count for key, count in saved.items()) == spy.plan.saved_bytes
    return found, spy.plan


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("recipe", "budgets"), [("coat", BUDGETS), ("agoq", BUDGETS[1:]), ("linear", BUDGETS[1:])]
)
def test_saved_bytes_stay_within_the_budget(recipe, budgets):
    want, plan = unlimited(recipe)
    most = previous = plan.saved_bytes
    for budget in budgets:
        got, plan = train_within(budget, recipe)
        assert plan.saved_bytes <= budget * most
        assert plan.saved_bytes <= previous
        previous = plan.saved_bytes
        for name, gradient in want.gradients.items():
            assert cosine(got.gradients[name], gradient) > 0.95, (budget, name)
        assert all(torch.equal(a, b) for a, b in zip(got.outputs, want.outputs, strict=True))


@cache
def plan_without_rules() -> Plan:
    """Return the decoder's plan within a budget, without a limit for errors."""
    config = Config.recipe("agoq", compiler="eager", memory_budget=0.6, error_tolerance=math.inf)
    return train(partial(decoder, 3), config)[1]


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["layers.1", "{}"])
def test_keep_exact_values_are_neither_rounded_nor_recomputed_inexactly(pattern):
    config = Config.recipe("agoq", compiler="eager", memory_budget=0.6, error_tolerance=math.inf)
    plan = plan_without_rules()
    low = [s for s in plan.saved if not s.saved_as.startswith("exact")]
    value = next(s.value for s in low if s.module.startswith("layers.1"))
    _, kept = train(partial(decoder, 3), replace(config, keep_exact=(pattern.format(value),)))
    inexact = [s for s in kept.saved if not s.saved_as.startswith("exact")]
    assert inexact
    assert not any(s.value == value for s in inexact)
    assert pattern == "{}" or not any(s.module.startswith(pattern) for s in inexact)


@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS)
def test_recomputation_changes_no_number(budget):
    want, most = unlimited("exact")
    got, plan = train_within(budget, "exact")
    assert plan.saved_bytes <= budget * most.saved_bytes
    assert_same_step(got, want)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "exact"])
def test_a_budget_of_one_changes_nothing(recipe):
    want, plan = unlimited(recipe)
    got, same = train(decoder, Config.recipe(recipe, compiler="eager", memory_budget=1.0))
    assert same == plan
    assert_same_step(got, want)


def recomputed_kinds(model, args, config) -> set[Kind]:
    """Return the kinds of operators that the backward recomputes."""
    joint = capture_joint(model, *args, config=config)
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
        if pass_ is plan_saved_values:
            break
    return {kind(n) for n, d in joint.ctx.decisions.items() if d.recomputed}


@pytest.mark.long
def test_attention_and_gemms_are_recomputed_only_for_a_budget():
    model, args = decoder()
    expensive = {Kind.GEMM, Kind.ATTENTION}
    exact = Config.recipe("exact", compiler="eager")
    assert not recomputed_kinds(model, args, exact) & expensive
    assert recomputed_kinds(model, args, Config.recipe("exact", memory_budget=0.2)) >= expensive


@pytest.mark.long
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_whole_models(make):
    def with_tokens():
        return make().train(), (tokens(),)

    config = Config.recipe("exact", compiler="eager")
    want, plan = train(with_tokens, config)
    # GPT-2's dropout masks must be saved.
    tight = Config.recipe("exact", compiler="eager", memory_budget=0.7)
    got, less = train(with_tokens, tight)
    assert less.saved_bytes <= 0.7 * plan.saved_bytes
    assert_same_step(got, want)


# --- random numbers -----------------------------------------------------------------------------


@pytest.mark.long
def test_random_operators_are_never_recomputed():
    def make():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU()) for _ in range(4)]
        x = torch.randn(64, 64, generator=generator, requires_grad=True)
        return nn.Sequential(*layers).train(), (x,)

    want, _ = train(make, Config.recipe("exact", compiler="eager"))
    for budget in (0.8, 0.6):
        config = Config.recipe("exact", compiler="eager", memory_budget=budget)
        got, _ = train(make, config)
        assert_same_step(got, want)
        assert Kind.RANDOM not in recomputed_kinds(*make(), config)


# --- budgets that cannot be met -----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "exact"])
def test_the_error_names_the_smallest_budget(recipe):
    with pytest.raises(Exception, match="cannot be met") as error:
        train(partial(decoder, 1), Config.recipe(recipe, compiler="eager", memory_budget=2000))
    found = re.search(r"Raise memory_budget to (\d+) bytes", str(error.value))
    least = int(found[1])
    config = Config.recipe(recipe, compiler="eager", memory_budget=least)
    _, plan = train(partial(decoder, 1), config)
    assert 0 < plan.saved_bytes <= least


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "helps"),
    [
        ({}, True),
        ({"save_format": "none"}, True),
        ({"save_format": "e2m1"}, False),
        ({"keep_exact": "*"}, False),
    ],
)
def test_the_error_advises_smaller_formats_only_if_they_help(options, helps):
    with pytest.raises(Exception, match="cannot be met") as error:
        train(partial(decoder, 1), Config(compiler="eager", memory_budget=2000, **options))
    assert ("smaller formats with save_format='e2m1'" in str(error.value)) == helps


def test_inductor_raises_the_same_error():
    program = torch.compile(MLP(), backend="fp8pass", options={"memory_budget": "1B"})
    with pytest.raises(
        Exception,
        match=r"of 1 B cannot be met.* at least [\d.]+ KiB \(the largest tensor is "
        r"up:[\w.]+( for FP8)?:0, .*to \d+",
    ):
        program(torch.randn(32, 64) * 1)


@pytest.mark.parametrize("index", [None, 1])
def test_the_error_names_an_input_as_the_model_does(index):
    class Wave(nn.Module):
        def forward(self, hidden, states):
            x = hidden if index is None else states[index]
            return x.sin() * x.exp()

    config = Config.recipe("exact", compiler="eager", memory_budget="1B")
    inputs = [torch.randn(32, 64, requires_grad=True) * 1 for _ in range(3)]
    name = "hidden" if index is None else f"states.{index}"
    with pytest.raises(Exception, match=rf"the largest tensor is {name}, 8 KiB\)"):
        torch.compile(Wave(), backend=backend(config))(inputs[0], inputs[1:])


def test_a_budget_without_a_unit_is_probably_in_gib():
    program = torch.compile(MLP(), backend="fp8pass", options={"memory_budget": 24})
    with pytest.raises(Exception, match=r"For 24 GiB write memory_budget='24GiB'\."):
        program(torch.randn(32, 64) * 1)


def test_a_share_of_a_few_bytes_is_ignored():
    """The graph after a graph break saves a few bytes that cannot be recomputed."""
    torch._dynamo.reset()
    config = Config(compiler="eager", memory_budget=0.5)
    run, spy = compiled(lambda x, scale: (x.exp() * scale).sum(), config)
    run(torch.randn(128, requires_grad=True), torch.rand(128)).backward()
    assert 0 < spy.plan.saved_bytes < 4096


class Broken(nn.Module):
    """Layers, a graph break, and a loss. The graph of the loss cannot recompute the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(MLP(), nn.Linear(32, 512))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.body(x)
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits, labels)


@pytest.mark.long
def test_a_graph_without_layers_may_exceed_its_share():
    model, config = Broken(), Config(compiler="eager", memory_budget=0.6)
    args = torch.randn(128, 64), torch.randint(512, (128,))
    layers, loss = explain(model, *args, config=config).graphs
    _, same = explain(model, *args, config=Config(compiler="eager")).graphs
    assert layers.plan.saved_bytes < loss.plan.saved_bytes <= same.plan.saved_bytes
    graph = "a graph without linear layers"
    said = f"{graph} exceeds memory_budget=0.6: it saves 100% of 257 KiB"
    assert loss.plan.note == said
    assert said in " ".join(str(explain(model, *args, config=config)).split())
    with pytest.raises(Exception, match="cannot be met"):
        explain(model, *args, config=Config(compiler="eager", memory_budget="100KiB"))


@pytest.mark.long
def test_the_error_names_a_share_if_the_budget_is_one():
    with pytest.raises(Exception, match=r"Raise memory_budget to 0\.\d+ or more"):
        train(partial(decoder, 1), Config(compiler="eager", memory_budget=1e-6))


# --- memory against time ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "exact"])
def test_time_falls_as_memory_rises(recipe):
    model, args = decoder(1)
    (report,) = explain(model, *args, config=Config.recipe(recipe), frontier=True).graphs
    points = report.plan.frontier
    assert 4 <= len(points) <= 8
    bytes_ = [p.bytes for p in points]
    assert bytes_ == sorted(bytes_)
    for less, more in itertools.pairwise(points):
        assert less.bytes < more.bytes
        assert less.seconds > more.seconds
    assert points[-1].seconds == 0  # without a budget nothing is added
    assert report.plan.point.bytes == report.plan.saved_bytes


# --- the mixed-integer program against brute force ----------------------------------------------


def choices_of(joint: JointGraph) -> FormatChoices:
    return FormatChoices(Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts))


CHAINS = {
    "pointwise": lambda x: (x * 1.5).sin().exp(),
    "two uses": lambda x: (x * 1.5).sin() * (x * 1.5).sigmoid(),
    "reduction": lambda x: x * (x * 2).amax(-1, keepdim=True),
    "product": lambda x: (x @ x.t()).tanh(),
    "gate": lambda x: torch.relu(x[:, :32]) * x[:, 32:],
}


def plans(program: BudgetProblem) -> Iterator[tuple[float, float]]:
    """Yield bytes and cost of every feasible choice of at most one way per value."""
    states = (None, SAVE_EXACT, SAVE_LOW_BIT, RECOMPUTE_EXACT, RECOMPUTE_INEXACT)
    for chosen in itertools.product(states, repeat=len(program.values)):
        state = dict(zip(program.values, chosen, strict=True))
        at = [program.columns[key] for key in state.items() if key[1] is not None]
        if all(program.upper[at]) and is_feasible(program, state):
            yield program.bytes[at].sum(), program.seconds[at].sum()


def is_feasible(program: BudgetProblem, state: dict[fx.Node, int | None]) -> bool:
    for value, how in state.items():
        if value in program.needs.exact and how not in (SAVE_EXACT, RECOMPUTE_EXACT):
            return False
        if value in program.needs.all and how is None:
            return False
        operands = [state[n] for n in value.all_input_nodes]
        if how == RECOMPUTE_EXACT and not all(s in (SAVE_EXACT, RECOMPUTE_EXACT) for s in operands):
            return False
        if how == RECOMPUTE_INEXACT and None in operands:
            return False
    return True


def without_limit_of_the_peak(needs, choices) -> BudgetProblem:
    memory = BackwardMemory(needs.relevant_values(), choices)
    return BudgetProblem(needs, choices, memory, allowance=math.inf)


@pytest.mark.parametrize("recipe", ["coat", "exact"])
@pytest.mark.parametrize("name", list(CHAINS))
def test_no_plan_is_faster(name, recipe):
    x = torch.randn(64, 64).requires_grad_() * 1
    joint = capture_joint(CHAINS[name], x, config=Config.recipe(recipe))
    choices = choices_of(joint)
    program = without_limit_of_the_peak(find_needs(choices), choices)
    assert 2 <= len(program.values) <= 7
    every = list(plans(program))
    assert program.least() == min(bytes_ for bytes_, _ in every)
    for budget in sorted({bytes_ for bytes_, _ in every}):
        plan = program.within(budget)
        best = min(cost for bytes_, cost in every if bytes_ <= budget)
        assert saved_bytes(plan, choices.facts) <= budget
        assert cost_of(program, plan) <= best * 1.031 + 1e-15
    assert program.within(program.least() * 0.9) is None


def cost_of(program: BudgetProblem, plan) -> float:
    """Return the cost of a plan; both ways to recompute a value cost the same."""
    total = 0.0
    for value, decision in plan.items():
        if decision.recomputed:
            total += program.seconds[program.columns[value, RECOMPUTE_EXACT]]
        elif decision.low_bit:
            total += program.seconds[program.columns[value, SAVE_LOW_BIT]]
    return total


def test_the_budget_of_the_cuts_takes_no_longer_than_the_cuts():
    joint = capture_joint(FFN(64, 128), torch.randn(64, 64) * 1)
    choices = choices_of(joint)
    needs = find_needs(choices)
    program = without_limit_of_the_peak(needs, choices)
    cuts = cheapest_plan(needs, choices)
    plan = program.within(saved_bytes(cuts, choices.facts))
    assert cost_of(program, plan) <= cost_of(program, cuts) * 1.031


# --- random programs ----------------------------------------------------------------------------


@pytest.mark.long
@given(programs(), st.floats(0.2, 1.0, exclude_min=True))
def test_random_programs_compute_the_same_bits_or_are_refused(case, budget):
    program, inputs = case
    config = Config.recipe("exact", compiler="eager")
    want, _ = train_case(program, inputs, config)
    try:
        got, _ = train_case(
            program, inputs, Config.recipe("exact", compiler="eager", memory_budget=budget)
        )
    except Exception as error:
        assert "cannot be met" in str(error)  # noqa: PT017
        return
    assert_same_step(got, want)


def train_case(program, inputs, config):
    torch._dynamo.reset()
    twin = copy.deepcopy(program)
    run, spy = compiled(twin, config)
    return step(run, twin, inputs), spy.plans


@pytest.mark.long
def test_the_backward_reads_only_planned_values():
    """A budget's plan has a decision about every value that the backward reads."""
    model, args = decoder()
    joint = capture_joint(model, *args, config=Config(memory_budget=0.4))
    plan_saved_values(joint.gm, joint.ctx)
    planned = {n.name for n, d in joint.ctx.decisions.items() if not d.recomputed}
    materialize_plan(joint.gm, joint.ctx)
    assert {s.name for s in joint.ctx.plan.saved} <= planned


def test_a_graph_that_saves_nothing_has_no_frontier():
    class AddOne(nn.Module):
        def forward(self, x):
            return x + 1

    x = torch.randn(4, 64, requires_grad=True)
    (report,) = explain(AddOne(), x * 1, frontier=True).graphs
    assert report.plan.frontier == []


# --- the peak of the backward -------------------------------------------------------------------


@pytest.fixture(scope="module")
def planner() -> Planner:
    """A planner of four decoder layers."""
    (joint,) = [capture_joint(*deep_decoder(), config=Config.recipe("agoq"))]
    quantize_linears(joint.gm, joint.ctx)
    choices = choices_of(joint)
    needs = find_needs(choices)
    return Planner(cheapest_plan(needs, choices), needs, choices)


def deep_decoder() -> tuple[Any, ...]:
    models = benchmark_models()
    model = models.Stack(4, 256, 4, 704).bfloat16()
    x = torch.randn(4, 512, 256, dtype=torch.bfloat16).requires_grad_() * 1
    return model, x, *models.rope_tables(512, 64, torch.device("cpu"))


@pytest.mark.long
def test_the_estimated_peak_falls_with_the_budget(planner, monkeypatch):
    """The peak falls until recomputed values take as many bytes as the saved values."""
    # A slow machine would return a worse plan when the time is up.
    monkeypatch.setattr("fp8pass.activation_memory.budget.TIME_LIMIT_S", 300.0)
    shares = (1.0, 0.5)
    peaks = [planner.point(planner.within(s * planner.most)).peak_bytes for s in shares]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]


@pytest.mark.long
def test_the_peak_counts_saved_values_and_gradients(planner):
    """At the end of the backward all weight gradients are alive."""
    memory = planner.memory
    cuts = planner.problem.within(planner.most)
    weights = sum(graph.nbytes(n) for n in memory.choices.facts.parameters)
    assert memory.peak({}) == max(memory.gradients)
    assert weights * 0.8 < memory.gradients[-1] + weights / 4
    assert max(planner.most, memory.peak({})) < memory.peak(cuts) < planner.most + memory.peak({})


@pytest.mark.long
def test_saved_values_are_alive_until_their_last_use(planner):
    """Saved values of the last block are freed first, and values of the first block last."""
    memory = planner.memory
    blocks = {
        graph.module_path(v).split(".")[1]: memory.alive_saved(v, 1, 0)[0][0]
        for v in memory.lifetimes
        if v.target is torch.ops.fp8pass.scaled_mm.default and "gate" in graph.module_path(v)
    }
    everywhere = list(range(len(memory.times)))
    assert blocks["0"][0] == blocks["3"][0] == 0
    assert blocks["0"][-1] >= len(everywhere) - 2
    assert blocks["3"][-1] <= 2


@pytest.mark.long
def test_a_checkpoint_over_several_sums_can_have_a_budget():
    """The checkpoint recomputes its sums at any budget."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def blocks(self, x):
            for layer in self.layers[:4]:
                x = x + torch.tanh(layer(x))
            return x

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.blocks, x, use_reentrant=False)
            return self.layers[5](torch.sigmoid(self.layers[4](x)))

    model, x = Checkpointed(), torch.randn(64, 64) * 1
    program, spy = compiled(model, Config(memory_budget=0.9, compiler="eager"))
    step(program, model, (x,))
    assert len(spy.plans) == 1
