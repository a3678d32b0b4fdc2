"""Architectures of torch.nn: its modules, and blocks of timm and of diffusion models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64


def images() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 32, 32)}


def sequences() -> dict[str, Any]:
    return {"x": torch.randn(2, 16, WIDTH)}


def noised() -> dict[str, Any]:
    return {"x": torch.randn(2, 4, 16, 16), "t": torch.rand(2), "context": torch.randn(2, 6, WIDTH)}


class Patches(nn.Module):
    """Splits an image into tokens."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, WIDTH, size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2)


class Feedforward(nn.Sequential):
    def __init__(self, width: int = WIDTH, hidden: int = 128) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Attention(nn.Module):
    """Attention, optionally with normalized queries and keys as in large vision transformers."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.normalized = normalized

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.normalized:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Vision(nn.Module):
    """Patches, blocks with norms before them, and a classifier."""

    def __init__(self, *blocks: nn.Module, residual: bool = True) -> None:
        super().__init__()
        self.patches, self.blocks = Patches(), nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)
        self.head = nn.Linear(WIDTH, 10)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = block(norm(x)) + (x if self.residual else 0)
        return self.head(x.mean(1))


class AcrossTokens(nn.Module):
    """A block of MLP-Mixer that mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Feedforward(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class SpatialGate(nn.Module):
    """The block of gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, WIDTH)
        self.norm, self.tokens = nn.LayerNorm(WIDTH), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        return self.down(u * (self.tokens(self.norm(v).transpose(1, 2)).transpose(1, 2) + 1))


class LayerScale(nn.Module):
    """A block times a learned scale for each channel."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.scale = block, nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.scale


class CrossCovariance(nn.Module):
    """The attention of XCiT, between channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 4, 1)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        y = (scores * self.temperature).softmax(-1) @ v
        return self.out(y.permute(0, 3, 1, 2).flatten(2))


class Pooling(nn.Module):
    """The token mixer of PoolFormer."""

    def forward(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1])
        grid = x.transpose(1, 2).unflatten(-1, (side, side))
        pooled = F.avg_pool2d(grid, 3, 1, 1, count_include_pad=False)
        return (pooled - grid).flatten(2).transpose(1, 2)


class Fourier(nn.Module):
    """A global filter network's mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, WIDTH, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(
            torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=x.shape[1], dim=1
        )


class InvertedResidual(nn.Module):
    """EfficientNet's block, with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        self.expand, self.norm = nn.Conv2d(32, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.squeeze, self.excite = nn.Linear(64, 16), nn.Linear(16, 64)
        self.project, self.head = nn.Conv2d(64, 32, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.silu(self.depthwise(F.silu(self.norm(self.expand(x)))))
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3))))).sigmoid()
        return self.head((x + self.project(y * gate[..., None, None])).mean((2, 3)))


class Mixture(nn.Module):
    """Computes each token with the best of four experts and a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Feedforward() for _ in range(4))
        self.shared = Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        best = F.one_hot(gates.argmax(-1), 4) * gates
        routed = sum(best[..., i, None] * e(x) for i, e in enumerate(self.experts))
        return routed + self.shared(x)


class LinearRecurrence(nn.Module):
    """A gated linear recurrence, in parallel: decays as cumulative sums of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay, value, gate = self.project(x).chunk(3, -1)
        total = F.logsigmoid(decay + 4).cumsum(1)
        state = (total.exp() * (value * (-total).exp()).cumsum(1)).tanh()
        return x + self.out(state * F.silu(gate))


def wave(t: Tensor, width: int = WIDTH) -> Tensor:
    """Return the sinusoidal embedding of a time."""
    angles = t[:, None] * torch.exp(torch.arange(width // 2, device=t.device).to(t.dtype) / -8)
    return torch.cat([angles.sin(), angles.cos()], -1)


class DiffusionTransformer(nn.Module):
    """DiT: adaptive norms from the time, gates that scale every branch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 4, 4)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(3))
        self.attention, self.feedforward = Attention(normalized=True), Feedforward()
        self.final = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        a, b, c, d, e, f = self.time(wave(t) + context.mean(1))[:, None].chunk(6, -1)
        h = h + c * self.attention(self.norms[0](h) * (1 + a) + b)
        h = h + f * self.feedforward(self.norms[1](h) * (1 + d) + e)
        return self.final(self.norms[2](h)).unflatten(1, (4, 4)).unflatten(-1, (4, 4, 4))


class ResidualBlock(nn.Module):
    """A U-Net's block: group norms, convolutions, the time added between them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)])
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.time, self.skip = nn.Linear(WIDTH, outside), nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(t))[..., None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](h)))


class CrossAttention(nn.Module):
    """Pixels attend to a text, as in latent diffusion; with GEGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(width), nn.Linear(width, width)
        self.key, self.value = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.out, self.gated = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = x.flatten(2).transpose(1, 2)
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2)
            for y in (self.query(self.norm(h)), self.key(context), self.value(context))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + self.out(y)
        value, gate = self.gated(h).chunk(2, -1)
        return (h + value * F.gelu(gate)).transpose(1, 2).unflatten(-1, x.shape[2:])


class UNet(nn.Module):
    """The denoiser of a latent diffusion model, with one level."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.down, self.middle = ResidualBlock(32, 64), ResidualBlock(64, 64)
        self.attend, self.up = CrossAttention(64), ResidualBlock(96, 32)
        self.shrink = nn.Conv2d(32, 32, 3, 2, 1)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        t, first = self.time(wave(t)), self.enter(x)
        h = self.attend(self.down(self.shrink(first), t), context)
        h = F.interpolate(self.middle(h, t), scale_factor=2.0)
        return self.leave(self.up(torch.cat([h, first], 1), t))


class Autoencoder(nn.Module):
    """A variational autoencoder without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 96), nn.ELU(), nn.Linear(96, 32))
        self.decode = nn.Sequential(nn.Linear(16, 96), nn.Softplus(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        y = self.decode(mean + spread.exp() * 0.1)
        return y, (mean.square() + spread.exp() - spread).mean()


class Radiance(nn.Module):
    """A NeRF: waves of positions, a skip in the middle, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(112, 64)
        self.density, self.color = nn.Linear(64, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        waves = torch.cat(
            [f(x[..., :8] * 2**i) for i in range(3) for f in (torch.sin, torch.cos)], -1
        )
        h = F.relu(self.second(torch.cat([F.relu(self.first(waves)), waves], -1)))
        return F.softplus(self.density(h)), self.color(h).sigmoid()


class Recommender(nn.Module):
    """A DLRM: embeddings, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        dense = self.dense(x)
        features = torch.stack(
            [dense, *(t(i) for t, i in zip(self.tables, ids.t(), strict=True))], 1
        )
        pairs = (features @ features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, pairs], -1)).sigmoid()


class GraphNetwork(nn.Module):
    """Two layers of graph convolution with attention over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32)
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x)
        scores = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
        h = F.elu(scores.masked_fill(~edges, -1e9).softmax(-1) @ h)
        return self.second(h) / edges.sum(-1, keepdim=True)


class Recurrent(nn.Module):
    """An unrolled recurrent cell."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell, self.out = cell(WIDTH, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        found = []
        for i in range(4):
            state = self.cell(x[:, i], state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(found, 1))


class Wrapped(nn.Module):
    """Calls a module with all inputs in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(*inputs.values())


class SelfAttention(nn.Module):
    """nn.MultiheadAttention on one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def layer(kind: type, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Wrapped(kind(WIDTH, 4, 128, dropout=0.0, batch_first=True, **options))


def pairs_of_sequences() -> dict[str, Any]:
    return {"a": torch.randn(2, 8, WIDTH), "b": torch.randn(2, 16, WIDTH)}


def convolutions() -> nn.Module:
    return Wrapped(
        nn.Sequential(
            nn.Conv1d(WIDTH, 64, 5, padding=2), nn.GroupNorm(4, 64), nn.Mish(),
            nn.Conv1d(64, 128, 1), nn.GLU(1), nn.Conv1d(64, 32, 3, padding=2, dilation=2),
        )
    )  # fmt: skip


def transformer() -> nn.Module:
    return Wrapped(nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True))


Make = tuple[Callable[[], nn.Module], Callable[[], Mapping[str, Any]]]

ARCHITECTURES: dict[str, Make] = {
    "nn encoder layer": (layer(nn.TransformerEncoderLayer), sequences),
    "nn encoder layer, norm first": (
        layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"), sequences,
    ),
    "nn decoder layer": (layer(nn.TransformerDecoderLayer), pairs_of_sequences),
    "nn transformer": (transformer, pairs_of_sequences),
    "nn attention": (SelfAttention, sequences),
    "nn lstm cells": (lambda: Recurrent(nn.LSTMCell), sequences),
    "nn gru cells": (lambda: Recurrent(nn.GRUCell), sequences),
    "nn convolutions": (convolutions, lambda: {"x": torch.randn(2, WIDTH, 24)}),
    "nn bilinear": (
        lambda: Wrapped(nn.Bilinear(32, 16, 32)),
        lambda: {"a": torch.randn(16, 32), "b": torch.randn(16, 16)},
    ),
    "timm vit, qk norm": (lambda: Vision(Attention(normalized=True), Feedforward()), images),
    "timm mixer": (lambda: Vision(AcrossTokens(), Feedforward()), images),
    "timm gmlp": (lambda: Vision(SpatialGate(), SpatialGate()), images),
    "timm cait": (lambda: Vision(LayerScale(Attention()), LayerScale(Feedforward())), images),
    "timm xcit": (lambda: Vision(CrossCovariance(), Feedforward()), images),
    "timm poolformer": (lambda: Vision(Pooling(), Feedforward()), images),
    "timm gfnet": (lambda: Vision(Fourier(), Feedforward()), images),
    "timm efficientnet": (InvertedResidual, images),
    "vision mixture": (lambda: Vision(Attention(), Mixture()), images),
    "linear recurrence": (LinearRecurrence, sequences),
    "diffusion transformer": (DiffusionTransformer, noised),
    "diffusion unet": (UNet, noised),
    "autoencoder": (Autoencoder, sequences),
    "radiance field": (Radiance, sequences),
    "recommender": (
        Recommender,
        lambda: {"x": torch.randn(16, 32), "ids": torch.randint(50, (16, 3))},
    ),
    "graph attention": (
        GraphNetwork,
        lambda: {
            # Triton 3.6 aborts for up to 32 nodes (docs/upstream/triton_3_6_slp_abort.md).
            "x": torch.randn(2, 48, WIDTH),
            "edges": (torch.rand(2, 48, 48) > 0.5) | torch.eye(48, dtype=torch.bool),
        },
    ),
}  # fmt: skip
