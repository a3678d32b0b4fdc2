"""Budgets above the bytes of the smallest formats buy more bits, where they reduce errors most."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FFN, capture_joint
from torch import fx, nn

from fp8pass import graph
from fp8pass.activation_memory.cuts import cheapest_plan
from fp8pass.activation_memory.decision import Decision, Decisions, saved_bytes, stored_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.needs import find_needs
from fp8pass.activation_memory.raise_precision import raise_precision
from fp8pass.config import Config
from fp8pass.dialect.formats import SAVED_FORMATS
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.passes.joint.quantize_linears import quantize_linears


class Gated(nn.Module):
    """A norm, a gate and a ReLU. Their values amplify errors differently; one value needs signs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn, self.out = nn.RMSNorm(64), FFN(64, 256), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.out(x + self.ffn(self.norm(x))))


class Case:
    """The plan of the cuts for one graph, and the formats that it could have instead."""

    def __init__(self, recipe: str) -> None:
        config = Config.recipe(recipe)
        joint = capture_joint(Gated(), torch.randn(64, 64).requires_grad_() * 1, config=config)
        quantize_linears(joint.gm, joint.ctx)
        self.choices = FormatChoices(Rules(joint.gm.graph, config, joint.ctx.facts))
        self.cuts = cheapest_plan(find_needs(self.choices), self.choices)
        self.most = saved_bytes(self.cuts, self.choices.facts)

    def within(self, budget: float) -> Decisions:
        return raise_precision(self.cuts, self.choices, budget)

    def options(self) -> list[list[tuple[fx.Node, Decision]]]:
        """Return the formats of each low-bit value that are at least as large as the plan's."""
        low = [v for v, d in self.cuts.items() if d.low_bit]
        options = ([(v, o) for o in self.choices.options(v)] for v in low)
        return [
            [(v, o) for v, o in of if o.format.bits >= self.cuts[v].format.bits] for of in options
        ]

    def error(self, value: fx.Node, format) -> float:
        expected = self.choices.rules.amplification(value).expected
        elements = graph.numel(graph.tensor(value))
        return expected * elements * (format.relative_error + format.flushed_share)

    def error_of(self, plan: Decisions) -> float:
        return sum(self.error(v, d.format) for v, d in plan.items() if d.low_bit)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("agoq")


def test_no_plan_with_one_step_less_has_a_smaller_error(case):
    options = case.options()
    fixed = case.most - sum(stored_bytes(*of[0]) for of in options)
    every = [
        (
            fixed + sum(stored_bytes(v, o) for v, o in each),
            sum(case.error(v, o.format) for v, o in each),
        )
        for each in itertools.product(*options)
    ]
    assert len(every) >= 64
    step = max(
        stored_bytes(*b) - stored_bytes(*a) for of in options for a, b in itertools.pairwise(of)
    )
    for budget in sorted({bytes_ for bytes_, _ in every}):
        plan = case.within(budget)
        assert saved_bytes(plan, case.choices.facts) <= budget
        reachable = [e for bytes_, e in every if bytes_ <= max(budget - step, case.most)]
        assert case.error_of(plan) <= min(reachable) * (1 + 1e-9)


def test_only_low_bits_are_raised_to_the_largest_allowed_format(case):
    plan = case.within(2.0 * case.most)
    assert plan.keys() == case.cuts.keys()
    changed = {v for v in plan if plan[v] != case.cuts[v]}
    assert changed
    assert all(case.cuts[v].low_bit for v in changed)
    assert {plan[v].format for v in changed} == {SAVED_FORMATS[-1]}
    assert all("the budget allows 8 bits" in plan[v].reason for v in changed)


def test_equal_budgets_and_exact_formats_change_nothing(case):
    assert case.within(case.most) == case.cuts
    for recipe in ("coat", "exact"):
        other = Case(recipe)
        assert other.within(2 * other.most) == other.cuts


def test_errors_fall_as_the_budget_rises(case):
    plans = [case.within(share * case.most) for share in (1.0, 1.1, 1.2, 1.3, 1.4)]
    for fewer, more in itertools.pairwise(plans):
        assert saved_bytes(fewer, case.choices.facts) < saved_bytes(more, case.choices.facts)
        assert case.error_of(fewer) > case.error_of(more)
