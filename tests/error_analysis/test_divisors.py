"""Divisors are never rounded to zero, even in a group with a larger value."""

from __future__ import annotations

import copy

import pytest
import torch
from rules_helpers import ROWS, Between, D, gradients, plan_of, rules_of, saves_only

import fp8pass

# Each group has one large value.
OUTLIERS = torch.ones(ROWS, D).index_fill(1, torch.arange(0, D, 16), 40.0)


def atan(m, h, outliers):
    return torch.atan(h * outliers)


def root(m, h, outliers):
    return torch.sqrt(1e-2 + (h * outliers).square())


@pytest.mark.parametrize("save_format", ["e4m3", "e2m1"])
@pytest.mark.parametrize("function", [atan, root])
def test_gradients_in_groups_with_outliers(function, save_format):
    """In 4 bits, the gradients of these groups may be inexact, but they must be finite."""
    torch.manual_seed(0)
    model, x = Between(function), torch.randn(ROWS, D)
    reference = copy.deepcopy(model)
    want = gradients(reference, reference, x, OUTLIERS)
    compiled = torch.compile(model, backend=fp8pass.backend(saves_only(save_format)))
    for a, b in zip(gradients(model, compiled, x, OUTLIERS), want, strict=True):
        assert 0.5 < float(a.norm() / b.norm()) < 2


def test_the_argument_is_stored_instead_of_the_divisor():
    def function(m, h):
        return torch.atan(h)

    rules = rules_of(function)
    assert {"add"} == {n.name for n in rules.graph.nodes if "divisor" in rules.why_ungrouped(n)}
    stored = {s.name for s in plan_of(function, "e2m1").saved if "e2m1" in s.saved_as}
    assert len(stored) == 2
    assert "add" not in stored


def two_terms(m, h):
    a, b = torch.exp(h), torch.exp(-2 * h)
    return a / (a + b)


def columns(m, h):
    a = torch.exp(h)
    return a / a.sum(0)


@pytest.mark.parametrize(
    ("function", "names"), [(two_terms, {"exp", "exp_1", "add"}), (columns, {"exp"})]
)
def test_terms_of_divisors(function, names):
    """Both terms of a sum may be zero at once, and all elements of a column."""
    rules = rules_of(function)
    divided = {n.name for n in rules.graph.nodes if "divisor" in rules.why_ungrouped(n)}
    assert names <= divided


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6),
        lambda m, h: torch.nn.functional.silu(h),
        lambda m, h: h / (1 + torch.exp(-h)),
        lambda m, h: torch.nn.functional.softplus(h),
    ],
    ids=["norm", "silu", "swish by hand", "softplus"],
)
def test_inputs_of_usual_functions_take_four_bits(function):
    assert any("e2m1" in s.saved_as for s in plan_of(function, "e2m1").saved)
