"""Checkpoints that are saved or loaded while a `Guard` has lowered learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.stability.guard.actions import LowerRate


def optimizer_of(rate: float | Tensor, kind: type = torch.optim.SGD) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16)]
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer in layers]
    optimizer = kind(groups)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    return optimizer


def rates_of(state_dict: dict) -> list[float]:
    return [float(group["lr"]) for group in state_dict["param_groups"]]


def in_the_closure(optimizer: torch.optim.Optimizer) -> dict:
    found = {}
    optimizer.step(lambda: found.update(optimizer.state_dict()))
    return found


def in_a_hook_of_the_step(optimizer: torch.optim.Optimizer) -> dict:
    found = {}
    optimizer.register_step_pre_hook(lambda *_: found.update(optimizer.state_dict()))
    optimizer.step()
    return found


def after_a_step_that_failed(optimizer: torch.optim.Optimizer) -> dict:
    def fail() -> None:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        optimizer.step(fail)
    return optimizer.state_dict()


def after_a_step(optimizer: torch.optim.Optimizer) -> dict:
    optimizer.step()
    return optimizer.state_dict()


WAYS = [in_the_closure, in_a_hook_of_the_step, after_a_step_that_failed, after_a_step]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, fp8pass.optim.AdamW])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_a_checkpoint_has_the_rates_of_the_schedule(way, kind, rate):
    optimizer = optimizer_of(rate.clone() if isinstance(rate, Tensor) else rate, kind)
    lower = LowerRate(optimizer)
    lower.factor = 0.1
    assert rates_of(way(optimizer)) == [0.5, 0.5]
    lower.close()
    assert rates_of(optimizer.state_dict()) == [0.5, 0.5]


def test_a_step_after_a_checkpoint_within_it_is_lowered():
    optimizer = optimizer_of(0.5)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    LowerRate(optimizer).factor = 0.1
    in_the_closure(optimizer)
    for p, old in zip(optimizer.param_groups[0]["params"], before, strict=True):
        torch.testing.assert_close(p, old - 0.05)


def test_rates_loaded_after_a_failed_step_do_not_change():
    optimizer = optimizer_of(0.5)
    saved = optimizer_of(0.25).state_dict()
    lower = LowerRate(optimizer)
    lower.factor = 0.1
    after_a_step_that_failed(optimizer)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert rates_of(optimizer.state_dict()) == [0.25, 0.25]
    lower.close()
    assert rates_of(optimizer.state_dict()) == [0.25, 0.25]
