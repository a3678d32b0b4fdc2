"""Functions that programs call. Scripts of programs contain copies of them."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1)


def batch_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = F.batch_norm(x.flatten(0, -2), mean, var, weight, bias, training=True)
    return rows.view(x.shape)


def moving_average(x: Tensor, state: Tensor) -> Tensor:
    state.lerp_(x.detach().float().flatten(0, -2).square().mean(0).to(state.dtype), 0.5)
    return x * torch.rsqrt(state + 0.5)


def read_before_written(x: Tensor, state: Tensor) -> Tensor:
    y = x * state.clone()
    state.mul_(0.5)
    return y


def counted(x: Tensor, state: Tensor) -> Tensor:
    state.add_(0.5)
    return x * state


def observed(x: Tensor, state: Tensor) -> Tensor:
    with torch.no_grad():
        state.copy_(torch.maximum(state, x.detach().abs().flatten(0, -2).amax(0)))
    return x


def half_added_to(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[..., : x.shape[-1] // 2] += y[..., x.shape[-1] // 2 :]
    return x


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], device=x.device).to(x.dtype)[:, None] / 7
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    if k.shape[:-1] != v.shape[:-1]:  # PyTorch does not check this, and reads out of bounds
        raise ValueError("keys and values of other lengths")
    if q.ndim > 3:  # `torch.compile` of PyTorch 2.13 gives wrong values
        raise ValueError("attention with five dimensions")
    heads = [x.unflatten(-1, (2, -1)).transpose(-2, -3) for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*heads, is_causal=causal)
    return y.transpose(-2, -3).flatten(-2)


def scored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1]
    rows = torch.arange(scores.shape[-2], device=q.device)
    columns = torch.arange(scores.shape[-1], device=q.device)
    return scores.masked_fill(columns > rows[:, None], -1e4).softmax(-1) @ v


def mixture(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    gates = F.linear(x, router).softmax(-1)
    return torch.einsum("...e,...en->...n", gates, torch.einsum("...d,edn->...en", x, experts))


def experts(x: Tensor, weights: Tensor) -> Tensor:
    tokens = x.flatten(0, -2).unflatten(0, (len(weights), -1))
    return torch.bmm(tokens, weights).flatten(0, 1).view(*x.shape[:-1], -1)


def experts_in_front(x: Tensor, weights: Tensor) -> Tensor:
    tokens = x.flatten(0, -2).unflatten(0, (-1, len(weights))).transpose(0, 1)
    return (weights @ tokens.mT).mT.transpose(0, 1).reshape(*x.shape[:-1], -1)


def all_experts(x: Tensor, weights: Tensor) -> Tensor:
    tokens = x.flatten(0, -2).expand(len(weights), -1, -1)
    return torch.bmm(tokens, weights).mean(0).view(*x.shape[:-1], -1)


def checkpointed(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up)), down)

    return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)


def loss(x: Tensor) -> Tensor:
    logits = x.flatten(0, -2).float()
    return F.cross_entropy(logits, torch.arange(len(logits), device=x.device) % x.shape[-1])


def straight_through(x: Tensor) -> Tensor:
    return x + ((x * 4).round() / 4 - x).detach()


def kept_random(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, device=x.device) > 0.3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 / x.cosh().square()
