"""What an operator's kind and arguments say."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.graph.classify import is_mask

aten = torch.ops.aten


def test_masks_of_attention():
    """By the operator's own names: the place differs between forward and backward."""
    g = fx.Graph()
    q, k, v, mask, dy, lse = (g.placeholder(name) for name in ("q", "k", "v", "mask", "dy", "lse"))
    forward = aten._scaled_dot_product_efficient_attention.default
    y = g.call_function(forward, (q, k, v, None, True))
    assert not any(map(is_mask, (q, k, v, mask)))
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    saved = (y, lse, None, None, 0.0, [True] * 4)
    g.call_function(backward, (dy, q, k, v, mask, *saved))
    assert is_mask(mask)
    assert not any(map(is_mask, (q, k, v, dy, lse)))
    assert not is_mask(g.placeholder("other"))
