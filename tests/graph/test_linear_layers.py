"""The linear layers of a graph: those whose weight is computed are layers, too, with a reason."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, compiled
from torch import nn
from torch.nn.utils import parametrizations, prune


def pruned(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return layer


class Gathered(nn.Linear):
    """A weight that is put together from two."""

    def forward(self, x):
        halves = self.weight.chunk(2)
        return x @ torch.cat([halves[1], halves[0]]).t()


COMPUTED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
    "pruned": lambda: pruned(nn.Linear(64, 64)),
    "gathered": lambda: Gathered(64, 64, bias=False),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_layers_with_a_reason(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), COMPUTED[name]())
    program, spy = compiled(model, COAT_EAGER)
    program(torch.randn(32, 64)).sum().backward()
    plain, computed = spy.plan.linears
    assert plain.fp8
    assert not plain.reason
    assert not computed.fp8
    assert "its weight is computed by aten." in computed.reason
    assert not computed.chosen
    assert (computed.module, computed.in_features, computed.out_features) == ("2", 64, 64)


def test_products_of_activations_are_no_layers():
    """Nor are those with buffers, or with what learned queries become."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(16, 64))
            self.project = nn.Linear(64, 64)
            self.register_buffer("table", torch.randn(64, 64))

        def forward(self, x):
            scores = self.project(self.queries) @ x.t()
            return scores.softmax(-1) @ x + (x[:16] * 2) @ (x.t() @ x) * (self.table[0] + 1)

    program, spy = compiled(Attention(), COAT_EAGER)
    program(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert [y.module for y in spy.plan.linears] == ["project"]
