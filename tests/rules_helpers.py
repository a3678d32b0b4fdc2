"""A function between two linear layers: its error rules, its plan, and its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from helpers import capture_joint, cosine
from torch import Tensor, nn

import fp8pass
from fp8pass import Config
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.plan import Plan

D, ROWS = 128, 64


class Between(nn.Module):
    """`function(module, h, *inputs)` between two linear layers. The module has a buffer `ema`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.ones(D))
        self.register_buffer("ema", torch.ones(D))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x), *others))


def saves_only(save_format: str) -> Config:
    """Return a configuration with exact GEMMs, so that all errors come from saved tensors."""
    return Config(
        forward_format="exact",
        gradient_format="exact",
        save_format=save_format,
        compiler="eager",
    )


def rules_of(function: Callable[..., Tensor], *others: Tensor) -> Rules:
    torch._dynamo.reset()
    joint = capture_joint(Between(function), torch.randn(ROWS, D), *others)
    return Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts)


def plan_of(function: Callable[..., Tensor], save_format: str, *others: Tensor) -> Plan:
    torch.manual_seed(0)
    model, x = Between(function), torch.randn(ROWS, D)
    (compiled,) = fp8pass.explain(model, x, *others, config=saves_only(save_format)).graphs
    return compiled.plan


def gradients(model: nn.Module, run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of the first input and of all parameters."""
    x = inputs[0].clone().requires_grad_()
    run(x, *inputs[1:]).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def gradient_cosines(
    function: Callable[..., Tensor],
    save_format: str,
    *others: Tensor,
    offset: float = 0.0,
    **options: Any,
) -> list[float]:
    """Return the cosine of each gradient with eager PyTorch. Check that lengths agree within 10%.

    `offset` is added to the outputs of the first layer.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Between(function), torch.randn(ROWS, D)
    with torch.no_grad():
        model.first.bias += offset
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend=fp8pass.backend(saves_only(save_format)), **options)
    want = gradients(reference, reference, x, *others)
    got = gradients(model, compiled, x, *others)
    for a, b in zip(got, want, strict=True):
        assert 0.9 < float(a.norm() / b.norm()) < 1.1
    return [cosine(a, b) for a, b in zip(got, want, strict=True)]
