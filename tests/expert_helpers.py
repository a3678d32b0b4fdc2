"""Helpers of the tests of batched experts: spellings of their GEMMs, and models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import (
    COAT_EAGER,
    JointGraph,
    capture_joint,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.config import Config
from fp8pass.graph.classify import BATCHED_GEMMS
from fp8pass.passes.joint.quantize_experts import quantize_experts
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.plan import Linear

ALL = ("forward", "dgrad", "wgrad")
E, T, K, N = 4, 24, 32, 48


@dataclass(frozen=True)
class Spelling:
    """A way to write the GEMMs of experts: a function of a weight and tokens, and their shapes."""

    function: Callable[..., Tensor]
    weight: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: int = E * T


SPELLINGS = {
    "bmm": Spelling(lambda w, x: torch.bmm(x, w), (E, K, N), (E, T, K)),
    "matmul": Spelling(lambda w, x: x @ w, (E, K, N), (E, T, K)),
    "transposed": Spelling(lambda w, x: x @ w.mT, (E, N, K), (E, T, K)),
    "in front": Spelling(lambda w, x: w @ x, (E, N, K), (E, K, T)),
    "in front, transposed": Spelling(lambda w, x: (w.mT @ x.mT).mT, (E, K, N), (E, T, K)),
    "einsum": Spelling(lambda w, x: torch.einsum("etk,ekn->etn", x, w), (E, K, N), (E, T, K)),
    "einsum, transposed": Spelling(
        lambda w, x: torch.einsum("etk,enk->etn", x, w), (E, N, K), (E, T, K)
    ),
    "tokens first": Spelling(
        lambda w, x: torch.einsum("tek,ekn->ten", x, w), (E, K, N), (T, E, K)
    ),
    "capacity": Spelling(
        lambda w, x: torch.einsum("beck,ekn->becn", x, w), (E, K, N), (2, E, T, K), 2 * E * T
    ),
    "cast": Spelling(lambda w, x: torch.bmm(x.half(), w.half()).float(), (E, K, N), (E, T, K)),
    "expanded": Spelling(lambda w, x: torch.bmm(x.expand(E, -1, -1), w), (E, K, N), (T, K)),
    "repeated": Spelling(
        lambda w, x: torch.bmm(x.repeat(E, 1).view(E, -1, K), w), (E, K, N), (T, K)
    ),
    "gradient expanded": Spelling(lambda w, x: torch.bmm(x, w).sum(0), (E, K, N), (E, T, K)),
    "odd number of tokens": Spelling(
        lambda w, x: torch.bmm(x, w), (E, K, N), (E, 7, K), 7 * E
    ),
    "groups of a matrix": Spelling(
        lambda w, x: torch.bmm(x, w.view(E, N, K).mT), (E * N, K), (E, T, K)
    ),
}  # fmt: skip


class Batched(nn.Module):
    """Experts in one spelling, with an operator before them."""

    def __init__(self, spelling: Spelling, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = spelling.function
        self.weight = nn.Parameter((torch.randn(spelling.weight) / K**0.5).to(dtype))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(self.weight, x.sin(), *others)


class Experts(nn.Module):
    """SwiGLU experts of Llama 4, without chunks: each expert computes all tokens."""

    def __init__(self, experts: int = 4, hidden: int = 32, ffn: int = 64) -> None:
        super().__init__()
        torch.manual_seed(experts)
        for name, sizes in {
            "gate": (hidden, ffn),
            "up": (hidden, ffn),
            "down": (ffn, hidden),
        }.items():
            weight = torch.randn(experts, *sizes) / sizes[0] ** 0.5
            setattr(self, name, nn.Parameter(weight.bfloat16()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def rewritten(model: nn.Module, *args: Tensor, config: Config = COAT_EAGER) -> JointGraph:
    """Return the joint graph after the passes that quantize layers."""
    joint = capture_joint(model, *args, config=config)
    quantize_linears(joint.gm, joint.ctx)
    quantize_experts(joint.gm, joint.ctx)
    joint.gm.graph.eliminate_dead_code()
    joint.gm.graph.lint()
    return joint


def only_layer(
    function: Callable[..., Tensor], weight: tuple[int, ...], *args: Tensor, **options: Any
) -> Linear:
    """Return the only layer of `function(weight, *args)`.

    Check that batched GEMMs are replaced exactly if the layer is in FP8.
    """
    model = Batched(Spelling(function, weight, ()), options.pop("dtype", torch.bfloat16))
    joint = rewritten(model, *args, **options)
    (layer,) = joint.ctx.plan.linears
    assert bool(layer.fp8) == (not layer.reason)
    left = any(n.target in BATCHED_GEMMS for n in joint.gm.graph.nodes)
    assert left == bool(layer.reason)
    return layer
