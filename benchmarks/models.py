"""The models that the benchmarks measure, in plain PyTorch.

Llama's decoder layer, GPT-2, and the demo's model with a mixture of experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional as F

from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in fp32."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rope_tables(seq: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary embeddings, [seq, head_dim] each, in bf16."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(seq, device=device)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class DecoderLayer(nn.Module):
    """RMSNorm, RoPE, causal attention, SwiGLU."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            proj(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    """Decoder layers that share one table of rotary embeddings."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads, ffn) for _ in range(layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def init_weights(model: nn.Module, std: float = 0.02) -> None:
    """Set matrices to normal random values with standard deviation `std`. Norms do not change."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=std)


class GPTBlock(nn.Module):
    """LayerNorm, causal attention, LayerNorm, GELU; without biases, as in nanoGPT."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, bias=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 with a tied output head. The forward returns the loss of predicting `targets`."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight
        init_weights(self)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # as in GPT-2
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Experts(nn.Module):
    """Eight SwiGLU networks, two for each token, implemented as in torchtitan.

    Attributes:
        imbalance: balancing loss of Switch Transformers in the last forward; 1 if all experts get
            equally many tokens.
    """

    COUNT, TOP = 8, 2
    imbalance: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.dim, self.COUNT, bias=False)
        self.gate_up = nn.Parameter(torch.empty(self.COUNT, 2 * size.ffn, size.dim))
        self.down = nn.Parameter(torch.empty(self.COUNT, size.dim, size.ffn))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.router(flat).float().softmax(-1)
        weights, chosen = shares.topk(self.TOP)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), self.COUNT).sum(0)
        used = counts / counts.sum()
        self.imbalance = self.COUNT * (used * shares.mean(0)).sum()
        tokens, ends = flat[order // self.TOP].bfloat16(), counts.cumsum(0, dtype=torch.int32)
        gate_up, down = (w.bfloat16().transpose(-2, -1) for w in (self.gate_up, self.down))
        gate, up = torch._grouped_mm(tokens, gate_up, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, down, offs=ends)
        y = y * (weights / weights.sum(-1, keepdim=True)).flatten()[order].unsqueeze(-1)
        return torch.zeros_like(y)[: len(flat)].index_add(0, order // self.TOP, y).view_as(x)


class ParallelExperts(nn.Module):
    """SwiGLU networks, divided among ranks. Tokens are exchanged as in torchtitan.

    Needs `torch._dynamo.config.capture_scalar_outputs` to compile as one graph.
    """

    def __init__(self, hidden: int, ffn: int, count: int, top: int) -> None:
        super().__init__()
        self.ranks, self.top = dist.get_world_size(), top
        self.local = count // self.ranks
        self.router = nn.Linear(hidden, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(self.local, 2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(self.local, hidden, ffn))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat, group = x.flatten(0, 1), dist.group.WORLD
        assert group is not None
        weights, chosen = self.router(flat).float().softmax(-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), self.ranks * self.local).sum(0)
        with torch.no_grad():
            arriving = all_to_all_single(counts, None, None, group)
            sent, kept = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, arriving))
        rows = all_to_all_single_autograd(flat[order // self.top], kept, sent, group)
        expert = torch.arange(self.local, device=x.device).repeat(self.ranks)
        expert = expert.repeat_interleave(arriving, output_size=rows.shape[0])
        by_expert = expert.argsort(stable=True)
        ends = arriving.view(self.ranks, -1).sum(0).cumsum(0, dtype=torch.int32)
        gate_up, down = (w.transpose(-2, -1) for w in (self.gate_up, self.down))
        gate, up = torch._grouped_mm(rows[by_expert], gate_up, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, down, offs=ends)
        y = torch.empty_like(y).index_put((by_expert,), y)
        y = all_to_all_single_autograd(y, sent, kept, group)
        y = y * (weights / weights.sum(-1, keepdim=True)).flatten()[order, None].to(x.dtype)
        return torch.zeros_like(flat).index_add(0, order // self.top, y).view_as(x)


class ExpertLayer(DecoderLayer):
    """A decoder layer with experts on several ranks instead of a single SwiGLU network."""

    def __init__(self, hidden: int, heads: int, ffn: int, count: int, top: int) -> None:
        super().__init__(hidden, heads, ffn)
        del self.gate, self.up, self.down
        self.experts = ParallelExperts(hidden, ffn, count, top)

    def mlp(self, h: Tensor) -> Tensor:
        return self.experts(h)


class MoEDecoder(Decoder):
    """The demo's model with experts in each layer. The forward returns the loss.

    A hundredth of the experts' imbalance contributes to the gradient, but not to the loss.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.experts = [Experts(size) for _ in self.layers]
        for layer, experts in zip(self.layers, self.experts, strict=True):
            layer.mlp = experts

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        imbalance = torch.stack([experts.imbalance for experts in self.experts]).sum()
        return loss + 0.01 * (imbalance - imbalance.detach())


class DiTBlock(nn.Module):
    """Attention and GELU with adaptive LayerNorm, as in DiT."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(F.silu(c)).unsqueeze(1).chunk(6, dim=-1)
        )
        parts = self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attended)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))


class DiT(nn.Module):
    """The blocks of DiT, for [batch, tokens, hidden] and one condition for each image."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x
