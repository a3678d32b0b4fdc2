"""A small model for the tests of `fit`, and its traced step."""

from __future__ import annotations

import math

import torch
from helpers import MLP
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.tools.fitting.step import compute_own_loss, record_step
from fp8pass.tools.fitting.traced import TracedStep

VOCABULARY = 640
STAY = math.inf
MIB = 1 << 20


class Layered(nn.Module):
    """Equal blocks between an embedding and an output head. Returns the loss."""

    def __init__(self, layers: int = 2, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1).float(), ids.flatten())


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(hidden), MLP((hidden, 2 * hidden, hidden))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def make_on_meta(layers: int = 2, batch: int = 4, seq: int = 64) -> tuple[Layered, Tensor]:
    with torch.device("meta"):
        return Layered(layers).bfloat16(), torch.empty(batch, seq, dtype=torch.long)


def make_on_cpu(layers: int = 2) -> tuple[Layered, Tensor]:
    torch.manual_seed(0)
    return Layered(layers).bfloat16(), torch.randint(VOCABULARY, (4, 64))


def trace_step(model, paths, ids) -> TracedStep:
    return TracedStep(record_step(model, paths, ((ids,), {}), compute_own_loss))


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)
