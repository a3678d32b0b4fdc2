"""Linear layers, and their joint graphs after `quantize_linears`."""

from __future__ import annotations

import torch
from helpers import COAT_EAGER, JointGraph, capture_joint
from torch import nn

from fp8pass.passes.joint.quantize_linears import quantize_linears


def rewritten(model, *args, config=COAT_EAGER, **options) -> JointGraph:
    """Return the joint graph after `quantize_linears`."""
    joint = capture_joint(model, *args, config=config, **options)
    quantize_linears(joint.gm, joint.ctx)
    joint.gm.graph.eliminate_dead_code()
    joint.gm.graph.lint()
    return joint


def reasons(joint: JointGraph) -> dict[str, str]:
    return {y.module: y.reason for y in joint.ctx.plan.linears}


def rows(count=32, features=64, grad=True, dtype=torch.float32):
    return torch.randn(count, features).to(dtype).requires_grad_(grad)


def linear(inputs=64, outputs=128, bias=False, dtype=torch.float32):
    return nn.Sequential(nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
