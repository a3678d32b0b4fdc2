"""What tests of `Guard` share: trainings with one, real ones and such that only have losses."""

from __future__ import annotations

import torch
from torch import nn

from fp8pass import Guard

LAYERS = 4


def network(seed=0):
    """Linear layers and activations, whose modules are `0`, `2`, `4`, `6`."""
    torch.manual_seed(seed)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*(part for layer in layers for part in layer))


class Training:
    """Regression with a guard; each step's batch depends on its number alone."""

    def __init__(self, make_optimizer=torch.optim.AdamW, **options):
        self.model = network()
        self.optimizer = make_optimizer(self.model.parameters(), lr=1e-3)
        self.guard = Guard(None, self.optimizer, model=self.model, **options)
        self.step = 0

    def run(self, steps, factor=1.0):
        """Train; `factor` multiplies the loss."""
        for _ in range(steps):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(self.step))
            loss = factor * (self.model(x) - x.roll(1, dims=1).tanh()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.guard.step(loss)
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def state(self):
        """Copies of all weights and optimizer states."""
        found = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            state = self.optimizer.state[p]
            found += [x.clone() for x in state.values() if isinstance(x, torch.Tensor)]
        return found


def fed(losses, **options):
    """A guard that has seen losses, of a model that does not change."""
    model = nn.Linear(1, 1)
    guard = Guard(None, torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
    for loss in losses:
        guard.step(loss)
    return guard


def kinds(guard):
    """The kinds of events, in order."""
    return [event.kind for event in guard.events]
