"""Differences of values that nearly agree: no error of the values is small beside them."""

from __future__ import annotations

import pytest
import torch
from rules_helpers import gradient_cosines, plan_of
from torch.nn import functional as F


def layer_norm(m, x):
    """Beside another use of `x`, for which `x` itself is kept."""
    return F.layer_norm(x, (x.shape[-1],)) * m.gain + F.silu(x) / 32


def layer_norm_by_hand(m, x):
    off = x + (-x.mean(-1, keepdim=True))
    return off * (off.square().mean(-1, keepdim=True) + 1e-5).rsqrt() + F.silu(x) / 32


def of_neighbours(m, x):
    step = x.diff(dim=0)
    return F.silu(step) * step + x[1:] / 256


FUNCTIONS = [layer_norm, layer_norm_by_hand, of_neighbours]


@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_right_whatever_the_values_have_in_common(function, save_format):
    assert min(gradient_cosines(function, save_format, offset=30.0)) > 0.97


def test_a_difference_is_kept_for_itself():
    """What a norm's backward reads is not computed again from `x`, though that is kept, too."""
    saved = plan_of(layer_norm, "e4m3").saved
    kept = [s.op for s in saved if s.kept_as.startswith("e4m3")]
    assert len(kept) == 2
    assert {"aten.sub.Tensor", "aten.mul.Tensor"} & {*kept}


@pytest.mark.parametrize("dims", [(), (None,), ([],), ([0, 1],)])
def test_the_variance_of_everything_is_no_row(dims):
    """In whichever way a program says so; a mean of one number is subtracted from all of it."""

    def standardized(m, x):
        return F.silu((x - x.mean()) * (torch.ops.aten.var.correction(x, *dims) + 1e-5).rsqrt())

    assert plan_of(standardized, "e4m3").saved


SCALARS = {
    "softplus": lambda a, b: F.softplus(a - b),
    "hinge": lambda a, b: (1 - (a - b)).relu(),
    "variance": lambda a, b: ((b - (a / 9) ** 2).abs() + 1e-3).sqrt(),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
def test_losses_that_compare_two_numbers(name, save_format):
    """As those of preferences do (DPO), margins, and variances of everything."""

    def function(m, x):
        number = SCALARS[name](F.silu(x).sum(), x.square().mean())
        return x * 0.01 + number

    assert min(gradient_cosines(function, save_format)) > 0.97
