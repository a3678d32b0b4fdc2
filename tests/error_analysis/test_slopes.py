"""Parameters and buffers may make a function steep. They are seldom 1."""

from __future__ import annotations

import pytest
import torch
from rules_helpers import gradient_cosines, plan_of
from torch.nn import functional as F

STEEP = {
    "of a parameter": lambda m, h: torch.tanh(50 * m.gain * h),
    "of a buffer": lambda m, h: torch.sigmoid(50 * m.ema * h) - 0.5,
    "of a temperature": lambda m, h: torch.tanh(h / (m.ema / 50)),
    "of the exponential of a parameter": lambda m, h: torch.tanh((4 * m.gain).exp() * h),
    "soft sign": lambda m, h: h / (m.ema / 50 + h.abs()),
    "ternary": lambda m, h: torch.tanh(80 * m.ema * (h - 0.5)) + torch.tanh(80 * m.ema * (h + 0.5)),
    "swish": lambda m, h: F.silu(50 * m.gain * h) / 50,
    "Gaussian": lambda m, h: h * torch.exp(-(40 * m.ema * h).square()),
    "Cauchy": lambda m, h: h / (1 + (40 * m.gain * h).square()),
}


@pytest.mark.parametrize("save_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("name", STEEP)
def test_steep_slopes_keep_small_values(name, save_format):
    assert min(gradient_cosines(STEEP[name], save_format)) > 0.97


def test_linear_factors_allow_4_bits():
    """A gain multiplies a value and its error alike."""
    saved = plan_of(lambda m, h: F.silu(h) * m.gain * m.ema, "e2m1").saved
    assert any(s.saved_as.startswith("e2m1") for s in saved)
