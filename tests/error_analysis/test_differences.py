"""Differences of nearly equal values, which are small compared with errors of the values."""

from __future__ import annotations

import pytest
import torch
from rules_helpers import ROWS, D, gradient_cosines, plan_of, rules_of
from torch.nn import functional as F


def layer_norm(m, x):
    """The second term is another use of `x`, so that `x` itself is saved."""
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
def test_gradients_are_right_if_values_share_a_large_mean(function, save_format):
    assert min(gradient_cosines(function, save_format, offset=30.0)) > 0.97


def test_a_difference_is_saved():
    """The backward of a norm does not recompute the difference, although `x` is saved, too."""
    saved = plan_of(layer_norm, "e4m3").saved
    operators = [s.op for s in saved if s.saved_as.startswith("e4m3")]
    assert len(operators) == 2
    assert {"aten.sub.Tensor", "aten.mul.Tensor"} & {*operators}


@pytest.mark.parametrize("dims", [(), (None,), ([],), ([0, 1],)])
def test_the_variance_of_all_elements_is_not_a_difference(dims):
    """All spellings of the dimensions count. The mean is one number for all elements."""

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
def test_differences_of_two_scalars(name, save_format):
    """Losses of preferences (DPO), margins, and variances of all elements."""

    def function(m, x):
        number = SCALARS[name](F.silu(x).sum(), x.square().mean())
        return x * 0.01 + number

    assert min(gradient_cosines(function, save_format)) > 0.97


OFFSET = 30.0


def gated(step):
    return F.silu(step) * step


def distances(steps):
    """Return a number for each row."""
    return (steps.square() + 1).log().flatten(1).sum(1, keepdim=True)


DIFFERENCES = {
    "of all pairs": lambda m, h, t: distances(h[:, None] - h[None]),
    "of all pairs in a row": lambda m, h, t: distances(h[:, :, None] - h[:, None, :32]),
    "of pairs, scaled": lambda m, h, t: distances(2 * h[:, None] - 2 * h[None]),
    "of pairs of results": lambda m, h, t: distances(F.softplus(h)[:, None] - F.softplus(h)[None]),
    "from all targets": lambda m, h, t: distances(h[:, :, None] - t[:, None, :32]),
    "from a target": lambda m, h, t: gated(h - t),
    "of a mean square": lambda m, h, t: 99 * F.mse_loss(h, t),
    "of a Huber loss": lambda m, h, t: 99 * F.huber_loss(h, t),
    "of a pairwise distance": lambda m, h, t: F.pairwise_distance(h, t)[:, None],
    "from a parameter": lambda m, h, t: gated(h - OFFSET * m.gain),
    "from a buffer": lambda m, h, t: gated(h - OFFSET * m.ema),
    "from a number": lambda m, h, t: gated(h - OFFSET),
    "of a number": lambda m, h, t: gated(OFFSET - h),
    "plus a negative number": lambda m, h, t: gated(h + -OFFSET),
    "plus a negation": lambda m, h, t: gated(t + -h),
    "plus a negation that is viewed": lambda m, h, t: gated((-h.view(-1, 16)).view_as(h) + t),
    "plus a negative multiple": lambda m, h, t: gated(h * -1 + t),
    "of a negation": lambda m, h, t: gated(-h + t),
    "with alpha": lambda m, h, t: gated(h.add(t / 2, alpha=-2)),
    "reversed": lambda m, h, t: gated(torch.rsub(h, t)),
    "of a stack": lambda m, h, t: gated(torch.stack([h, -t]).sum(0)),
    "from the mean of rows": lambda m, h, t: gated(h - h.mean(0)),
    "from the mean of all": lambda m, h, t: gated(h - h.mean()),
    "of an interpolation": lambda m, h, t: torch.lerp(h, t, torch.sigmoid(m.gain * (h - t))) / 30,
    "of squares": lambda m, h, t: expanded(h, t),
}


def expanded(x, y):
    """Compute distances from squares and a product of matrices."""
    squares = x.square().sum(-1)[:, None] - 2 * x @ y.T + y.square().sum(-1)
    return (squares.relu() + 1).log().sum(-1, keepdim=True)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_gradients_of_differences(name, save_format):
    """The second term is another use of the values, so that they are saved."""
    targets = OFFSET + torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0))

    def function(m, h, t):
        return DIFFERENCES[name](m, h, t) + h / 256

    cosines = gradient_cosines(function, save_format, targets, offset=OFFSET)
    assert min(cosines) > 0.97


HARMLESS = {
    "gate": lambda m, h: h.roll(1, 0) * (1 - torch.sigmoid(h)),
    "sigmoid by hand": lambda m, h: h.roll(1, 0) * (1 - 1 / (1 + torch.exp(-h))),
    "log sigmoid": lambda m, h: F.logsigmoid(h),
    "slope of a tanh": lambda m, h: 1 - torch.tanh(h) ** 2,
    "sum of negations": lambda m, h: F.silu(-h - h.abs()),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_number_and_a_bounded_value_are_not_a_difference(name):
    rules = rules_of(HARMLESS[name])
    inexact = set(rules.graph.nodes) - rules.backward - rules.constants
    assert not [n for n in inexact if n in rules.differences]


class SiluOf211(torch.autograd.Function):
    """SiLU with the backward of PyTorch 2.11."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        sigmoid = 1 / (1 + torch.exp(-x))
        return g * sigmoid * (1 + x * (1 - sigmoid))


@pytest.mark.long
@pytest.mark.parametrize("save_format", ["e2m2", "e4m3"])
def test_a_gate_saves_as_much_with_the_silu_of_another_version(save_format):
    def saved(silu):
        plan = plan_of(lambda m, x: silu(x) * x.roll(1, 0), save_format)
        return sorted((s.saved_as, s.bytes) for s in plan.saved)

    assert saved(SiluOf211.apply) == saved(F.silu)
