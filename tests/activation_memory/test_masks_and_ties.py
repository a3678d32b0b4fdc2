"""Masks and ties cannot be computed from low bits. The exact value is saved if it is smaller."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, compiled, cosine, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fp8pass.config import Config


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_is_saved_instead_of_two_masks_and_low_bits(dtype, recipe):
    layer = nn.Linear(64, 64, bias=False).to(dtype)
    config = Config.recipe(recipe, compiler="eager")
    program, spy = compiled(lambda x: F.hardswish(layer(x)), config)
    program(torch.randn(32, 64, dtype=dtype))
    assert spy.plan.saved_bytes < spy.plan.stock_bytes


def test_value_is_saved_instead_of_a_mask_of_two_comparisons():
    """The mask of a clamp of a repeated value is larger than the value before it is repeated."""
    layer, norm = nn.Linear(64, 64, bias=False).bfloat16(), nn.LayerNorm(128).bfloat16()
    program, spy = compiled(
        lambda x: norm(layer(x).repeat_interleave(2, -1).clamp(-1, 0.7)), COAT_EAGER
    )
    program(torch.randn(32, 64).bfloat16())
    assert "bool" not in {s.dtype for s in spy.plan.saved}
    assert spy.plan.saved_bytes <= spy.plan.stock_bytes


def test_value_is_saved_instead_of_its_result_that_cannot_share_scales():
    """The result of `nan_to_num` may be huge in places. The product needs its operand, too."""
    layer = nn.Linear(64, 64, bias=False).bfloat16()

    def function(x):
        y = layer(x)
        return y.nan_to_num() * y

    program, spy = compiled(function, COAT_EAGER)
    program(torch.randn(32, 64).bfloat16())
    assert spy.plan.saved_bytes < spy.plan.stock_bytes


def test_ties_are_recomputed_from_saved_inputs():
    """The ties of a maximum follow from the data and one learned number."""
    weight = nn.Parameter(torch.randn(16, 16))
    program, spy = compiled(
        lambda x: (x * (weight @ weight.t()).square().mean()).amax(0), COAT_EAGER
    )
    program(torch.randn(16, 8, 16))
    assert "bool" not in {s.dtype for s in spy.plan.saved}


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_checkpointed_region_gets_exact_inputs_for_ties(recipe):
    """The gradient of a maximum divides by the number of ties, which rounding may make zero."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
            self.layers[1].weight.requires_grad_(False)

        def forward(self, x):
            first, second, third = self.layers
            y = first(x)
            y = y - y.amax(-1, keepdim=True)
            return checkpoint(lambda y: third(F.gelu(second(y))), y, use_reentrant=False)

    model, x = Model(), torch.randn(2, 16, 64)
    model.layers[0].weight.requires_grad_(False)
    got = step(compiled(model, Config.recipe(recipe, compiler="eager"))[0], model, (x,))
    want = step(model, model, (x,))
    name = "layers.2.weight"
    assert cosine(got.gradients[name], want.gradients[name]) > 0.99
