"""Counting operations must not add guards on dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP, compiled
from torch import nn

from fp8pass.config import Config


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [MLP, lambda: nn.Linear(64, 7), lambda: nn.Conv1d(64, 32, 1)],
    ids=["fp8", "high precision", "convolution"],
)
def test_counting_operations_adds_no_guards(make, training):
    program, spy = compiled(make(), Config.recipe("linear", compiler="eager"), dynamic=True)
    for rows in (32, 17, 48):
        x = torch.randn(rows, 64, 64)
        with torch.set_grad_enabled(training):
            y = program(x)
        if training:
            y.sum().backward()
    (plan,) = spy.plans
    assert plan.flops > 0
