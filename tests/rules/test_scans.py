"""Gradients that are summed over positions, and forward values that are added to a gradient."""

from __future__ import annotations

import pytest
from rules_helpers import gradient_cosines, plan_of
from torch.nn import functional as F


def gated(m, x):
    """HGRN and its like, whose decays are multiplied with before the sum and after."""
    decay = F.logsigmoid(x).cumsum(0)
    return decay.exp() * ((-decay).exp() * x).cumsum(0)


def in_logarithms(m, x):
    """The parallel scan of minGRU ("Were RNNs All We Needed?", appendix B)."""
    decay = -F.softplus(x).cumsum(0)
    return (decay + (-F.softplus(-x) - decay).logcumsumexp(0)).exp()


@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("function", [gated, in_logarithms])
def test_gradients_of_recurrences_are_right(function, save_format):
    assert min(gradient_cosines(function, save_format)) > 0.97


@pytest.mark.parametrize(
    ("function", "reason"),
    [(gated, "summed over positions"), (lambda m, x: x.logcumsumexp(0), "adds it to a gradient")],
)
def test_the_plan_says_why(function, reason):
    assert any(reason in saved.reason for saved in plan_of(function, "e2m1").saved)
