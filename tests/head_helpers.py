"""Helpers of the tests of chunked output heads: spellings of losses, and a model with a head."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from helpers import compiled, relative
from torch import nn

from fp8pass.config import Config

HIDDEN, VOCABULARY = 32, 160


def plain(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def smoothed(logits, targets):
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1, ignore_index=3)


def softcapped_with_z_loss(logits, targets):
    logits = 30 * torch.tanh(logits.float() / 30)
    z_loss = logits.logsumexp(-1).square().mean()
    return plain(logits, targets) + 1e-4 * z_loss


def by_hand(logits, targets):
    log_p = logits.float().log_softmax(-1)
    return -log_p.gather(-1, targets[..., None]).squeeze(-1).mean()


def shifted(logits, targets):
    return plain(logits[:, :-1].float(), targets[:, 1:])


def shifted_afterwards(logits, targets):
    return plain(torch.tanh(logits.float())[..., :-1, :].contiguous(), targets[..., 1:])


def padded_labels(logits, targets):
    return plain(logits.float(), F.pad(targets, (0, 1), value=-100)[..., 1:])


def summed(logits, targets):
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), reduction="sum") / 7


def weighted_tokens(logits, targets):
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    weights = (targets.flatten() % 3).float()
    return (losses * weights).sum() / weights.sum()


def scaled(logits, targets):
    return 1024 * plain(logits.float() * 0.5, targets)


def with_entropy(logits, targets):
    p = logits.float().softmax(-1)
    return plain(logits.float(), targets) + 0.01 * (p * p.clamp_min(1e-9).log()).sum() / 64


LOSSES = (
    plain,
    smoothed,
    softcapped_with_z_loss,
    by_hand,
    shifted,
    shifted_afterwards,
    padded_labels,
    summed,
    weighted_tokens,
    scaled,
    with_entropy,
)


class Model(nn.Module):
    """An embedding, a block, and a head with its loss."""

    def __init__(self, loss=plain, *, bias=False, tied=False, frozen=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype)
        self.block = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.lm_head.requires_grad_(not frozen)
        self.loss = loss

    def forward(self, ids, targets):
        x = self.embedding(ids)
        return self.loss(self.lm_head(x + torch.tanh(self.block(x))), targets)


def batch(tokens=(2, 12), seed=0):
    """Return token ids and targets."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, tokens, generator=generator) for _ in range(2)]


def in_parts(model, chunks, recipe="exact", **options):
    """Compile a model with its head in chunks. Return the compiled model and the spy."""
    dynamic, halves = options.pop("dynamic", False), options.pop("halves", False)
    config = Config.recipe(recipe, **{"compiler": "eager", **options, "head_chunks": chunks})
    return compiled(model, config, halves=halves, dynamic=dynamic)


def run(model, data, chunks, **options):
    """Return the loss and gradients of one step, and the spy."""
    model = copy.deepcopy(model)
    program, spy = in_parts(model, chunks, **options)
    loss = program(*data)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, spy


def assert_same(got, want, head_tolerance=1e-6):
    """Check loss and gradients. Chunks and small GEMMs sum in another order, so bits may differ."""
    assert relative(got[0], want[0]) < 1e-6
    for name, gradient in want[1].items():
        if gradient is None:
            assert got[1][name] is None
        elif "lm_head" in name:
            assert relative(got[1][name], gradient) < head_tolerance, name
        else:
            assert relative(got[1][name], gradient) < 1e-6, name
