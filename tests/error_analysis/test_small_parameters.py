"""Values that are multiplied in the gradients of small parameters have 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8pass
from fp8pass.config import Config


def scalar(h: Tensor, p: Tensor) -> Tensor:
    """ReZero."""
    return p[0] * h


def streams(h: Tensor, p: Tensor) -> Tensor:
    """Hyper-connections: each stream has a weight."""
    return (torch.sigmoid(p)[:, None] * h.unflatten(-1, (4, -1))).flatten(-2)


def contraction(h: Tensor, p: Tensor) -> Tensor:
    """`streams` as a matrix product."""
    return torch.einsum("n,bnd->bd", p, h.unflatten(-1, (4, -1)))


def tokens(h: Tensor, p: Tensor) -> Tensor:
    """Each token has a weight that depends on a small parameter."""
    return torch.sigmoid(p[0] * h.mean(-1, keepdim=True)) * h


def slope(h: Tensor, p: Tensor) -> Tensor:
    """Dynamic tanh."""
    return torch.tanh(p[0] * h)


def vector(h: Tensor, p: Tensor) -> Tensor:
    """LayerScale: each column has a weight."""
    return p * h


class Gated(nn.Module):
    """A gate over the result of an activation function, and a norm before the loss."""

    def __init__(self, gate, size: int) -> None:
        super().__init__()
        self.gate, self.p = gate, nn.Parameter(torch.randn(size))
        self.up = nn.Linear(64, 128, bias=False)
        self.register_buffer("stream", torch.randn(256, 128))
        self.register_buffer("direction", torch.randn(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(F.gelu(self.up(x)), self.p)
        columns = y.shape[-1]
        normed = F.rms_norm(self.stream[:, :columns] + y, (columns,))
        return (normed * self.direction[:, :columns]).mean()


def formats_before_the_sum(model: nn.Module) -> set[str]:
    """Return the low-bit formats of saved values. The sum that the norm reads is left out."""
    x = torch.randn(256, 64, requires_grad=True)
    (compiled,) = fp8pass.explain(model, x, config=Config.recipe("agoq")).graphs
    low_bit = [s for s in compiled.plan.saved if s.expected_error]
    return {s.saved_as for s in low_bit if not s.value.startswith(":add")}


@pytest.mark.long
@pytest.mark.parametrize("gate", [scalar, streams, contraction, tokens, slope])
def test_factors_of_a_small_gradient_have_8_bits(gate):
    assert not {f for f in formats_before_the_sum(Gated(gate, 4)) if f.startswith("e2m")}


@pytest.mark.long
def test_factors_of_the_gradient_of_a_vector_have_5_bits():
    assert any(f.startswith("e2m2") for f in formats_before_the_sum(Gated(vector, 128)))


@pytest.mark.parametrize("gate", [scalar, streams, contraction, tokens, slope])
def test_gradients_of_small_parameters(gate):
    torch.manual_seed(0)
    model, x = Gated(gate, 4), torch.randn(256, 64)
    model(x).backward()
    exact = model.p.grad
    model.zero_grad()
    options = {"recipe": "agoq", "forward_format": "exact", "gradient_format": "exact"}
    compiled = torch.compile(model, backend="fp8pass", options={**options, "compiler": "eager"})
    compiled(x).backward()
    assert (model.p.grad - exact).norm() < 0.1 * exact.norm()
