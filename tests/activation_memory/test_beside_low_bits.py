"""What low bits cannot give: masks and ties are not kept beside what takes less."""

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
def test_two_masks_and_low_bits_are_not_kept_where_the_value_takes_less(dtype, recipe):
    layer = nn.Linear(64, 64, bias=False).to(dtype)
    config = Config.recipe(recipe, compiler="eager")
    program, spy = compiled(lambda x: F.hardswish(layer(x)), config)
    program(torch.randn(32, 64, dtype=dtype))
    assert spy.plan.saved_bytes < spy.plan.stock_bytes


def test_a_mask_of_two_comparisons_is_not_kept_beside_low_bits():
    """A clamp's, of a value that is repeated before it: the value itself takes less."""
    layer, norm = nn.Linear(64, 64, bias=False).bfloat16(), nn.LayerNorm(128).bfloat16()
    program, spy = compiled(
        lambda x: norm(layer(x).repeat_interleave(2, -1).clamp(-1, 0.7)), COAT_EAGER
    )
    program(torch.randn(32, 64).bfloat16())
    assert "bool" not in {s.dtype for s in spy.plan.saved}
    assert spy.plan.saved_bytes <= spy.plan.stock_bytes


def test_what_cannot_share_scales_is_not_kept_beside_low_bits_of_what_it_follows_from():
    """`nan_to_num`, whose result may be huge in places, times its operand."""
    layer = nn.Linear(64, 64, bias=False).bfloat16()

    def function(x):
        y = layer(x)
        return y.nan_to_num() * y

    program, spy = compiled(function, COAT_EAGER)
    program(torch.randn(32, 64).bfloat16())
    assert spy.plan.saved_bytes < spy.plan.stock_bytes


def test_what_follows_from_inputs_that_are_kept_is_not_kept_beside_them():
    """The ties of a maximum, of data times a number that is learned."""
    weight = nn.Parameter(torch.randn(16, 16))
    program, spy = compiled(
        lambda x: (x * (weight @ weight.t()).square().mean()).amax(0), COAT_EAGER
    )
    program(torch.randn(16, 8, 16))
    assert "bool" not in {s.dtype for s in spy.plan.saved}


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_a_checkpointed_region_gets_exactly_what_it_cannot_compute_from_low_bits(recipe):
    """The gradient of a maximum divides by the number of ties, which may vanish."""

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
