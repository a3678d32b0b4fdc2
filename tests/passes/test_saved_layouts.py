"""Inductor stores results of four dimensions channels-last in graphs with convolutions. Rows of
linear layers must be saved row-major, or each kernel that reads them is slow."""

from __future__ import annotations

import pytest
import torch
from helpers import compiled
from torch import nn

from fp8pass import Config


class Block(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 128), nn.Linear(128, channels)

    def forward(self, x):
        h = self.norm(self.convolution(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(h))).permute(0, 3, 1, 2)


def saved_by(program, x):
    """Return a loss, and the tensors that the forward saves."""
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        loss = program(x).float().square().mean()
    return loss, found


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "agoq", "exact"])
def test_rows_are_saved_row_major_and_images_channels_last(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64)).bfloat16()
    program, _ = compiled(model, Config.recipe(recipe))
    x = torch.randn(2, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    loss, saved = saved_by(program, x)
    shapes = {t.shape for t in saved if t.ndim == 4}
    assert shapes == {(2, 64, 8, 8), (64, 1, 3, 3)}  # images and weights of convolutions
    assert all(t.is_contiguous() for t in saved if t.ndim == 2)
    check_gradients(loss, model, x)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_in_other_layouts(transposed):
    """The rows of the norm are transposed images if the convolution is not channels-last."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64)).bfloat16()
    x = torch.randn(2, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=not transposed):
        program, spy = compiled(model, Config(compiler="eager"))
        loss, saved = saved_by(program, x)
    assert any(s.shape == "2×8×8×64" and s.is_low_bit for s in spy.plan.saved)
    assert all(t.is_contiguous() for t in saved if t.ndim == 2)
    check_gradients(loss, model, x)


@pytest.mark.long
def test_a_dynamic_batch():
    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64)).bfloat16()
    program, _ = compiled(model, Config(compiler="eager"), dynamic=True)
    for batch in (2, 3):
        x = torch.randn(batch, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        model.zero_grad()
        check_gradients(saved_by(program, x)[0], model, x)


def check_gradients(loss, model, x):
    """Check the gradients of a loss of `saved_by`."""
    loss.backward()
    got = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).float().square().mean().backward()
    for mine, own in zip(got, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert (mine - own).norm() <= 0.1 * own.norm() + 1e-6
