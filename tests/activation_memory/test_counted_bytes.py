"""The saved bytes of a plan agree with the bytes that autograd saves."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.config
from helpers import compiled
from torch import nn
from torch.nn import functional as F


def by_where(layer, x, scores):
    (rows,) = torch.where(scores > 0)
    return torch.zeros_like(x).index_add(0, rows, F.silu(layer(x[rows])))


def by_mask(layer, x, scores):
    return F.silu(layer(x[scores > 0])).sum()


def by_two_masks(layer, x, scores):
    rows = torch.cat([x[scores > 0.5], x[scores < -0.5]])
    return F.silu(layer(rows)).sum()


def by_number(layer, x, scores):
    count = (scores > 0).sum().item()
    torch._check(count <= len(x))
    return F.silu(layer(x[:count])).sum()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.parametrize("function", [by_where, by_mask, by_two_masks, by_number])
def test_sizes_that_depend_on_data(function):
    torch.manual_seed(0)
    layer, x, scores = nn.Linear(64, 64), torch.randn(128, 64), torch.randn(128)
    run, spy = compiled(lambda *inputs: function(layer, *inputs), fullgraph=True)
    saved: dict[int, int] = {}

    def pack(t):
        if not isinstance(t, nn.Parameter) and t is not x:
            saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x, scores)
    really = sum(saved.values())
    assert spy.plan.saved_bytes < 3 * really


class Complex(nn.Module):
    """A complex layer that conjugates its weight."""

    def __init__(self, spelling):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))
        self.spelling = spelling

    def forward(self, x):
        if self.spelling == "product":
            return x * self.weight.conj()
        return x @ (self.weight.mH if self.spelling == "adjoint" else self.weight)


@pytest.mark.parametrize("spelling", ["product", "matrix", "adjoint"])
def test_conjugates_of_parameters_are_views(spelling):
    model = Complex(spelling)
    x = torch.randn(32, 32, dtype=torch.complex64, requires_grad=True)
    run, spy = compiled(model)
    got, want = (torch.autograd.grad(f(x).abs().sum(), (x, model.weight)) for f in (run, model))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert not [s for s in spy.plan.saved if s.bytes and "_conj" in s.op], spy.plan.saved
