"""`Guard` with `torch.amp.GradScaler`: gradients may be scaled when the guard reads them."""

import pytest
import torch
from guard_helpers import network
from torch import nn

from fp8pass import Guard
from fp8pass.optim import AdamW


def make_fused(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def make_scaled(parameters, lr):
    """Return an optimizer that divides gradients by the factor itself."""
    optimizer = AdamW(parameters, lr)
    optimizer.takes_scaled_gradients = True
    return optimizer


def make_foreach(parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, foreach=True)


def make_two(parameters, lr):
    """Return two optimizers. Only the second optimizer leaves gradients scaled."""
    first, *others = parameters
    return [make_foreach([first], lr), make_scaled(others, lr)]


class Scaled:
    """A regression with a guard that reads every step, optionally with a GradScaler."""

    def __init__(self, make_optimizer, scaler=None):
        self.model = network()
        found = make_optimizer(self.model.parameters(), lr=1e-3)
        self.optimizers = found if isinstance(found, list) else [found]
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.guard = Guard(None, *self.optimizers, model=self.model, every=1)
        self.measured = []
        self.guard._signals.read = self.read  # type: ignore[method-assign]

    def read(self, reading, names):
        self.measured.append(torch.tensor(reading.norms[1]))
        return []

    def run(self, steps, *, updates_first=False, clips=False):
        for step in range(steps):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            loss = (self.model(x) - x.roll(1, dims=1).tanh()).square().mean()
            self.scaler.scale(loss).backward()
            if clips:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e3)
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            if updates_first:
                self.scaler.update()
            self.guard.step(loss)
            if not updates_first:
                self.scaler.update()
            self.model.zero_grad()
        return torch.stack(self.measured)


def scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, **options)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("make_optimizer", [AdamW, make_scaled, make_fused, make_foreach, make_two])
@pytest.mark.parametrize("order", [{}, {"updates_first": True}, {"clips": True}], ids=str)
def test_gradients_are_measured_without_the_scale(make_optimizer, order):
    """The scale grows in every second step."""
    want = Scaled(make_optimizer).run(6)
    got = Scaled(make_optimizer, scaler(growth_interval=2)).run(6, **order)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)


def test_missing_gradients_stay_missing_with_a_scale():
    training = Scaled(AdamW, scaler())
    training.model[0].register_forward_hook(lambda module, args, result: result.detach())
    assert (training.run(1)[0, :2] == -1).all()


@pytest.mark.parametrize("make_optimizer", [make_scaled, make_fused])
def test_gradients_of_a_skipped_step_count_as_missing(make_optimizer):
    """Finite gradients of such a step are still scaled, so they are not measured."""
    training = Scaled(make_optimizer, scaler())
    training.model[0].weight.register_hook(lambda gradient: gradient / 0)
    assert (training.run(1) == -1).all()


@pytest.mark.parametrize("make_optimizer", [AdamW, make_fused, make_foreach])
def test_a_skipped_step_raises_no_alarm(make_optimizer):
    """The first scale overflows in FP32, and is halved until it does not."""
    model = network()
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    guard = Guard(None, optimizer, model=model, every=1)
    growing = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=25)
    skipped = 0
    for step in range(120):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = 1e4 * (model(x) - x.roll(1, dims=1).tanh()).square().mean()
        growing.scale(loss).backward()
        growing.step(optimizer)
        guard.step(loss)
        before = growing.get_scale()
        growing.update()
        skipped += growing.get_scale() < before
        optimizer.zero_grad()
    assert skipped > 5
    assert not guard.events


def test_a_closed_guard_does_not_affect_the_optimizer():
    model = network()
    optimizer = make_foreach(model.parameters(), lr=1e-3)
    guard = Guard(None, optimizer, model=model)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    guard.watch(model, optimizer)  # replaces the previous optimizer
    assert len(optimizer._optimizer_step_pre_hooks) == hooks > 0
    guard.close()
    assert not optimizer._optimizer_step_pre_hooks
