"""Helpers of the tests of `Monitor`: monitored models, training, and batches."""

from __future__ import annotations

import torch
from helpers import COAT_EAGER, MLP
from torch import nn

import fp8pass

BATCHES = torch.randn(4, 32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


def batches(count=3, rows=32, features=64):
    """Return random inputs of an `MLP`, different in each call."""
    return torch.randn(count, rows, features, dtype=torch.bfloat16)


def monitored(model, monitor, config=COAT_EAGER, **options):
    """Compile `model` with a monitor."""
    return torch.compile(model, backend=fp8pass.backend(config, monitor=monitor), **options)


def train(run, model, batches, monitor=None):
    """Train with plain SGD, and return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    return [p.detach().clone() for p in model.parameters()]


class Broken(nn.Module):
    """A model with a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP((64, 64, 64)), MLP((64, 64, 64))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)
