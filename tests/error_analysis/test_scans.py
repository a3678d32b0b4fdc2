"""Gradients that are summed over positions, or that a forward value is added to."""

from __future__ import annotations

import math

import pytest
import torch
from rules_helpers import gradient_cosines, plan_of
from torch.nn import functional as F


def gated(m, x):
    """Multiply by decays before and after the sum, as HGRN does."""
    decay = F.logsigmoid(x).cumsum(0)
    return decay.exp() * ((-decay).exp() * x).cumsum(0)


def in_logarithms(m, x):
    """The parallel scan of minGRU ("Were RNNs All We Needed?", appendix B)."""
    decay = -F.softplus(x).cumsum(0)
    return (decay + (-F.softplus(-x) - decay).logcumsumexp(0)).exp()


def by_a_matrix(z):
    return torch.ones(len(z), len(z)).tril() @ z


def one_by_one(z):
    found = [z[0]]
    for row in z[1:]:
        found.append(found[-1] + row)
    return torch.stack(found)


def in_two_levels(z):
    parts = z.view(4, -1, z.shape[1])
    before = F.pad(parts.sum(1).cumsum(0), (0, 0, 1, 0))[:-1, None]
    return (parts.cumsum(1) + before).view_as(z)


def in_doubled_steps(z):
    step = 1
    while step < len(z):
        z = z + F.pad(z, (0, 0, step, 0))[:-step]
        step *= 2
    return z


def in_powers_of_two(m, x):
    decay = by_a_matrix(F.logsigmoid(x)) / math.log(2)
    return decay.exp2() * by_a_matrix(2.0 ** (-decay) * x)


def with_scan(scan):
    """Return `gated` with another implementation of the sum."""

    def function(m, x):
        decay = scan(F.logsigmoid(x))
        return decay.exp() * scan((-decay).exp() * x)

    function.__name__ = scan.__name__
    return function


SPELLINGS = [with_scan(f) for f in (by_a_matrix, one_by_one, in_two_levels, in_doubled_steps)]


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("function", [gated, in_logarithms, in_powers_of_two, *SPELLINGS])
def test_gradients_of_recurrences_are_right(function, save_format):
    assert min(gradient_cosines(function, save_format)) > 0.97


@pytest.mark.parametrize(
    ("function", "reason"),
    [(gated, "summed over positions"), (lambda m, x: x.logcumsumexp(0), "to a gradient")],
)
def test_the_plan_contains_the_reason(function, reason):
    assert any(reason in saved.reason for saved in plan_of(function, "e2m1").saved)
