"""Attention masks and saved attention outputs are recognized by the names of the arguments."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fp8pass.graph.classify import attention_output, is_attention_mask

aten = torch.ops.aten


def test_attention_masks():
    """The position of the mask differs between forward and backward, its name does not."""
    g = fx.Graph()
    q, k, v, mask, dy, lse = (g.placeholder(name) for name in ("q", "k", "v", "mask", "dy", "lse"))
    forward = aten._scaled_dot_product_efficient_attention.default
    y = g.call_function(forward, (q, k, v, None, True))
    assert not any(map(is_attention_mask, (q, k, v, mask)))
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    saved = (y, lse, None, None, 0.0, [True] * 4)
    g.call_function(backward, (dy, q, k, v, mask, *saved))
    assert is_attention_mask(mask)
    assert not any(map(is_attention_mask, (q, k, v, dy, lse)))
    assert not is_attention_mask(g.placeholder("other"))


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ],
)
def test_attention_backwards_read_their_output(name):
    g = fx.Graph()
    backward = getattr(aten, f"{name}_backward").default
    names = [argument.name for argument in backward._schema.arguments]
    operands = (0.0 if name == "dropout_p" else g.placeholder(name) for name in names)
    node = g.call_function(backward, tuple(operands))
    assert str(attention_output(node)) == "out"


def test_other_layouts_and_operators_have_no_attention_output():
    g = fx.Graph()
    x = g.placeholder("x")
    varlen = aten._flash_attention_backward.default
    assert attention_output(g.call_function(varlen, (x,) * len(varlen._schema.arguments))) is None
    assert attention_output(g.call_function(aten.mm.default, (x, x))) is None
    assert attention_output(x) is None
