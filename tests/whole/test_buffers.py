"""Buffers that the forward writes to: the backward uses the values that the forward read."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import cosine
from torch import Tensor, nn

import fp8pass
from fp8pass import Config


class Buffered(nn.Module):
    """Reads a buffer before or after it writes to it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(64, 64)
        self.gain = nn.Parameter(torch.ones(64))
        self.register_buffer("state", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "moving average":
            self.state.lerp_(h.detach().var(0), 0.5)
            return h / (self.state + 1e-5).sqrt() * self.gain
        if self.kind == "batch renorm":
            mean, std = h.mean(0), h.std(0) + 1e-5
            r = (std.detach() / self.state).clamp(0.5, 2)
            self.state.lerp_(std.detach(), 0.5)
            return (h - mean) / std * r * self.gain
        if self.kind == "counted":
            self.state.add_(1)
            return h * self.state * self.gain
        y = h * self.state.clone() * self.gain
        self.state.mul_(3)
        return y


@pytest.mark.parametrize("recipe", ["exact", "coat", "agoq"])
@pytest.mark.parametrize("kind", ["moving average", "batch renorm", "counted", "read before"])
def test_the_backward_uses_buffers_before_they_are_written(kind, recipe):
    # The length of normalized values is constant, so a loss of it would have a gradient of noise.
    model, x, target = Buffered(kind), torch.randn(32, 64), torch.randn(32, 64)
    want = copy.deepcopy(model)
    config = Config.recipe(recipe, compiler="eager")
    compiled = torch.compile(model, backend=fp8pass.backend(config))
    for _ in range(2):
        for run in (compiled, want):
            (run(x) * target).sum().backward()
    for name in ("layer.weight", "gain"):  # the gradient of a bias before a norm is noise
        p, q = model.get_parameter(name), want.get_parameter(name)
        assert p.grad is not None
        assert q.grad is not None
        assert cosine(p.grad, q.grad) > (0.99999 if recipe == "exact" else 0.98)
    torch.testing.assert_close(model.state, want.state, rtol=0.1, atol=0.1)
