"""`step_in_backward(max_norm=...)` clips sums of gradients by their global norm."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.optim import AdamW, Muon, step_in_backward

EXACT = {"first_moment": "fp32", "second_moment": "fp32"}


class Branches(nn.Module):
    """One branch for each kind of batch, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(32, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.shared(x)))


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    # Gradients of very different norms, so that clipping changes the direction of Adam's steps.
    return [10 ** (i % 3) * torch.randn(8, 32) for i in range(count)]


def adamw(model: nn.Module) -> tuple[AdamW, ...]:
    return (AdamW(model.parameters(), lr=0.01, **EXACT),)


def both(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    muon = Muon(matrices, lr=0.01, momentum_format="fp32")
    return muon, AdamW(others, lr=0.01, **EXACT)


def train(make, accumulate: int, max_norm: float | None, branch=lambda step: 0, **options):
    """Return weights and norms of training with clipping in the backward; in PyTorch without."""
    model = Branches()
    optimizers = make(model)
    attached = step_in_backward(
        model, *optimizers, accumulate=accumulate, max_norm=max_norm, **options
    )
    norms = []
    for step, x in enumerate(batches(4 * accumulate)):
        model(x, branch(step)).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        if (step + 1) % accumulate == 0:
            norms.append(attached.norm.item())
            assert not any(sum_.count for sum_ in attached.accumulated.values())
    return [p.detach() for p in model.parameters()], norms


def train_plainly(make, accumulate: int, max_norm: float, branch=lambda step: 0):
    model = Branches()
    optimizers, norms = make(model), []
    for step, x in enumerate(batches(4 * accumulate)):
        model(x, branch(step)).square().sum().backward()
        if (step + 1) % accumulate == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], norms


def changes(weights: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(weights, Branches().parameters(), strict=True)
    return torch.cat([(x - start).flatten() for x, start in pairs]).detach()


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "buffer", "limit"),
    # Newton–Schulz iterations amplify differences, so Muon's trainings drift apart.
    [(adamw, "fp16", 0.01), (adamw, "e4m3", 0.3), (both, "fp16", 0.3), (both, "e4m3", 0.6)],
)
def test_clipping_equals_clip_grad_norm(make, accumulate, buffer, limit):
    branch = partial(lambda step, count: step % count, count=accumulate)
    found, norms = train(make, accumulate, 5.0, branch, buffer=buffer)
    wanted, wanted_norms = train_plainly(make, accumulate, 5.0, branch)
    assert norms[0] == pytest.approx(wanted_norms[0], rel=0.03 if buffer == "e4m3" else 1e-3)
    assert min(norms) > 5.0
    a, b = changes(found), changes(wanted)
    assert (a - b).norm() < limit * b.norm()
    unclipped, _ = train_plainly(make, accumulate, math.inf, branch)
    if limit == 0.01:  # the test would find missing clipping
        assert (changes(unclipped) - b).norm() > 0.03 * b.norm()


def test_a_small_norm_leaves_gradients_alone():
    found, norms = train(adamw, 2, 1e9, buffer="fp16")
    wanted, _ = train_plainly(adamw, 2, 1e9)
    assert max(norms) < 1e9
    assert (changes(found) - changes(wanted)).norm() < 0.01 * changes(wanted).norm()


def test_the_first_moment_is_the_clipped_gradient():
    model = Branches()
    (optimizer,) = adamw(model)
    attached = step_in_backward(model, optimizer, max_norm=1.0, buffer="fp16")
    model(batches(1)[0], 0).square().sum().backward()
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters() if optimizer.state[p]]
    total = torch.cat([x.flatten() for x in moments]).norm() / 0.1
    assert total.item() == pytest.approx(1.0, rel=1e-3)
    assert attached.norm > 1.0


def test_gradients_that_are_not_finite_reach_the_weights():
    model = Branches()
    step_in_backward(model, *adamw(model), max_norm=1.0)
    x = batches(1)[0]
    x[0, 0] = torch.nan
    model(x, 0).square().sum().backward()
    assert model.shared.weight.isnan().any()


def test_unused_and_frozen_parameters_are_not_updated():
    model = Branches()
    model.branches[0].requires_grad_(False)
    (optimizer,) = adamw(model)
    step_in_backward(model, optimizer, accumulate=2, max_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    for x in batches(2):
        model(x, 1).square().sum().backward()
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False, True, True, False, False]


def test_a_step_without_trained_parameters_does_nothing():
    model = Branches()
    (optimizer,) = adamw(model)
    attached = step_in_backward(model, optimizer, accumulate=2, max_norm=1.0)
    model(batches(1)[0], 0).square().sum().backward()
    model.requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert attached.norm is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_step_completes_fewer_backwards():
    model = Branches()
    (optimizer,) = adamw(model)
    attached = step_in_backward(model, optimizer, accumulate=3, max_norm=1.0)
    before = model.shared.weight.clone()
    first, second, third, fourth = batches(4)
    for x in (first, second):
        model(x, 0).square().sum().backward()
    assert torch.equal(model.shared.weight, before)
    assert attached.norm is None
    optimizer.step()
    assert not torch.equal(model.shared.weight, before)
    norm, before = attached.norm, model.shared.weight.clone()
    for x in (first, third):  # the next three backwards start a new sum
        model(x, 0).square().sum().backward()
    assert torch.equal(model.shared.weight, before)
    model(fourth, 0).square().sum().backward()
    assert not torch.equal(model.shared.weight, before)
    assert attached.norm is not norm


def test_a_failed_backward_drops_sums():
    model = Branches()
    (optimizer,) = adamw(model)
    attached = step_in_backward(model, optimizer, accumulate=2, max_norm=1.0)
    before = [p.clone() for p in model.parameters()]
    (x,) = batches(1)
    model(x, 0).square().sum().backward()
    y = model.shared(x.requires_grad_())
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.square().sum().backward()
    assert not any(sum_.count for sum_ in attached.accumulated.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    model(x.detach(), 0).square().sum().backward()
    assert torch.equal(model.shared.weight, before[0])  # the first of two backwards


@pytest.mark.parametrize("offload", [("gradients",), ("states", "gradients")])
def test_offloaded_sums(offload, monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1)
    found = []
    for where in ((), offload):
        model = Branches()
        optimizer = AdamW(model.parameters(), lr=0.01, offload=where, **EXACT)
        step_in_backward(model, optimizer, accumulate=2, max_norm=1.0)
        for x in batches(4):
            model(x, 0).square().sum().backward()
        found.append([p.detach() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_compiled_models_and_checkpoints():
    model = Branches()
    (optimizer,) = adamw(model)
    step_in_backward(model, optimizer, max_norm=1.0)
    program = torch.compile(model, backend=fp8pass.backend(fp8pass.Config(compiler="eager")))
    before = model.shared.weight.clone()
    program(batches(1)[0], 0).square().sum().backward()
    assert not torch.equal(model.shared.weight, before)
    optimizer.load_state_dict(optimizer.state_dict())
    program(batches(1)[0], 0).square().sum().backward()
    assert optimizer.state[model.shared.weight]["step"] == 2


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_wrong_norms_are_refused(max_norm):
    model = Branches()
    with pytest.raises(fp8pass.ConfigError, match="max_norm must be a positive number"):
        step_in_backward(model, *adamw(model), max_norm=max_norm)
