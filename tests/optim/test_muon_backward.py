"""`step_in_backward` with Muon for the matrices and AdamW for the other parameters."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from optim_helpers import assert_same_state
from torch import nn

import fp8pass
from fp8pass.optim import AdamW, Muon, split_parameters, step_in_backward


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    return nn.Sequential(*layers).bfloat16()


def new_optimizers(model: nn.Module, **options) -> tuple[Muon, AdamW]:
    matrices, others = split_parameters(model, skip="4")
    return Muon(matrices, lr=0.02, **options), AdamW(others, lr=1e-3, **options)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 16, generator=generator).bfloat16() for _ in range(count)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().sum()


@pytest.mark.parametrize("options", [{}, {"offload": ("states", "gradients")}], ids=str)
def test_updates_in_the_backward_equal_steps(options, monkeypatch, path):
    if options and path == "kernel":
        options = {"offload": ("gradients",)}  # Muon has no kernel for states in host memory
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 64)
    model = new_model()
    plain = copy.deepcopy(model)
    attached, stepped = new_optimizers(model, **options), new_optimizers(plain)
    handle = step_in_backward(model, *attached)
    for x in batches(3):
        loss_of(model, x).backward()
        assert all(p.grad is None for p in model.parameters())
        loss_of(plain, x).backward()
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(attached, stepped, strict=True):
        assert_same_state(ours, theirs)
    handle.detach()
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_micro_batches():
    """With FP16 sums, the weights are near the weights after steps with summed gradients."""
    model = new_model().float()
    plain, start = copy.deepcopy(model), copy.deepcopy(model)
    attached, stepped = new_optimizers(model), new_optimizers(plain)
    step_in_backward(model, *attached, accumulate=2, buffer="fp16")
    for i, x in enumerate(batches(5)):
        loss_of(model, x.float()).backward()
        loss_of(plain, x.float()).backward()
        if i in (1, 3, 4):  # the last sum has one gradient
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
    for optimizer in attached:
        optimizer.step()
    for p, q, s in zip(*(m.parameters() for m in (model, plain, start)), strict=True):
        assert (p - q).norm() < 0.3 * (q - s).norm()


def test_both_optimizers_are_needed():
    model = new_model()
    muon, adamw = new_optimizers(model)
    with pytest.raises(fp8pass.ConfigError, match=r"lack parameters of the model: 0\.bias"):
        step_in_backward(model, muon)
    with pytest.raises(
        fp8pass.ConfigError, match=r"takes an fp8pass.optim.AdamW or Muon, got torch"
    ):
        step_in_backward(model, muon, torch.optim.SGD(model.parameters()))
    step_in_backward(model, muon, adamw)
    with pytest.raises(fp8pass.ConfigError, match="already attached"):
        step_in_backward(model, muon, adamw)


def test_a_failed_backward_is_reported_once(caplog):
    model = new_model()
    step_in_backward(model, *new_optimizers(model))

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    x = batches(1)[0].requires_grad_()
    x.register_hook(fail)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="out of memory"):
        loss_of(model, x).backward()
    assert len([r for r in caplog.records if "backward failed" in r.message]) == 1
    loss_of(model, batches(1)[0]).backward()
