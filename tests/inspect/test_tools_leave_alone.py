"""Tools run a model and its backward, and leave both as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8pass

TOOLS = [fp8pass.diagnose, fp8pass.bisect, fp8pass.calibrate]


def mean_square(model, batch):
    return model(batch).square().mean()


def trained() -> tuple[nn.Sequential, nn.Module, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    return model, program, torch.randn(32, 32)


@pytest.mark.parametrize("tool", TOOLS)
def test_an_optimizer_in_the_backward_does_not_step(tool):
    model, program, batch = trained()
    fp8pass.optim.attach(model, fp8pass.optim.AdamW(model.parameters(), lr=1e-2))
    mean_square(program, batch).backward()
    before = model[0].weight.clone()
    tool(program, mean_square, batch)
    assert torch.equal(model[0].weight, before)
    mean_square(program, batch).backward()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("tool", TOOLS)
def test_hooks_of_gradients_are_not_called(tool):
    model, program, batch = trained()
    called: list[nn.Parameter] = []
    hook = model[0].weight.register_post_accumulate_grad_hook(called.append)
    tool(program, mean_square, batch)
    assert not called
    mean_square(program, batch).backward()
    assert len(called) == 1
    hook.remove()
    mean_square(program, batch).backward()
    assert len(called) == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_inference_mode_is_refused(tool):
    _, program, batch = trained()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"under torch.inference_mode"):
        tool(program, mean_square, batch)


class Signed(nn.Module):
    """Positions of 256 and more take 16 bits without a sign, which PyTorch cannot count in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        return y @ y.T * (2 * torch.eye(len(x)) - 1)


def test_many_positions():
    model, batch = Signed(), torch.randn(256, 64)
    assert all(layer.fp8 for g in fp8pass.explain(model, batch).graphs for layer in g.plan.linears)
    fp8pass.testing.assert_exact(model, batch)
