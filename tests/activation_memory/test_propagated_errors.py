"""Errors of a saved value in values that the backward recomputes from it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import explain
from fp8pass.dialect.formats import E4M3
from fp8pass.error_analysis import attention

TOKENS, HEADS, HEAD_DIM = 4, 2, 8


class Tiny(nn.Module):
    """Attention over few tokens. q, k and v are the sum of the halves of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2 * HEADS * HEAD_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(x).chunk(2, -1)
        heads = (first + second).unflatten(-1, (HEADS, -1)).transpose(-2, -3)
        return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.long
def test_uses_of_a_recomputed_sum_count():
    """The layer's output is saved. Only the sum of its halves reads it. Attention reads the sum."""
    model = Tiny().bfloat16()
    x = torch.randn(64, TOKENS, 16, dtype=torch.bfloat16)
    (g,) = explain(model, x).graphs
    (saved,) = (s for s in g.plan.saved if s.expected_error)
    expected = attention.estimate_amplification(TOKENS, HEAD_DIM)
    assert saved.expected_error == pytest.approx(expected * E4M3.relative_error)
    bound = attention.bound_amplification(TOKENS, HEAD_DIM)
    text = f"amplifies errors at most 1.0×, and {bound:.1f}× in values recomputed from this tensor"
    assert saved.reason == text
