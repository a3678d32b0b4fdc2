"""Helpers of the tests of `Guard`: a real training, and guards that get only losses."""

from __future__ import annotations

import torch
from torch import nn

from fp8pass import Guard

LAYERS = 4


def network(seed=0):
    """Return linear layers (modules `0`, `2`, `4`, `6`) with activations between them."""
    torch.manual_seed(seed)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*(part for layer in layers for part in layer))


class Training:
    """A regression with a guard. The number of a step determines its batch.

    With `make_muon`, two optimizers train the model: one the weights, the other one the biases.
    """

    def __init__(self, make_optimizer=torch.optim.AdamW, make_muon=None, **options):
        self.model = network()
        parameters = list(self.model.parameters())
        if make_muon:
            matrices = [p for p in parameters if p.ndim == 2]
            self.optimizers = [make_muon(matrices, lr=1e-3)]
            parameters = [p for p in parameters if p.ndim != 2]
        else:
            self.optimizers = []
        self.optimizer = make_optimizer(parameters, lr=1e-3)
        self.optimizers.append(self.optimizer)
        self.guard = Guard(None, *self.optimizers, model=self.model, **options)
        self.step = 0

    def run(self, steps, factor=1.0):
        """Train; `factor` multiplies the loss."""
        for _ in range(steps):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(self.step))
            loss = factor * (self.model(x) - x.roll(1, dims=1).tanh()).square().mean()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.guard.step(loss)
            self.model.zero_grad()
            self.step += 1
        return self

    def state(self):
        """Return copies of all weights and optimizer states."""
        found = [p.detach().clone() for p in self.model.parameters()]
        for state in (state for x in self.optimizers for state in x.state.values()):
            found += [x.clone() for x in state.values() if isinstance(x, torch.Tensor)]
        return found


def guard_losses(losses, **options):
    """Return a guard of a constant model after steps with these losses."""
    model = nn.Linear(1, 1)
    guard = Guard(None, torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
    for loss in losses:
        guard.step(loss)
    return guard


def event_kinds(guard):
    """Return the kinds of a guard's events, in order."""
    return [event.kind for event in guard.events]
