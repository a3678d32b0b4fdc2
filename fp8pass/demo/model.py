"""The model that the demo trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import compat
from fp8pass.demo.sizes import Size

VOCABULARY = 256


class Attention(nn.Module):
    """Causal attention with rotary embeddings and grouped queries."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A SwiGLU feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A transformer block: attention and SwiGLU, each with a norm before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.attention = Attention(size)
        self.mlp_norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder in the style of Llama. The forward returns the mean loss of a batch."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.lm_head = nn.Linear(size.dim, VOCABULARY, bias=False)
        cos, sin = rope_tables(size.seq, size.dim // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rope_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary embeddings, each fp32 [seq, head_dim]."""
    angles = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to `x` [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def new_model(size: Size, seed: int, device: torch.device) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(size).to(device, dtype_for(device))


def dtype_for(device: torch.device) -> torch.dtype:
    """Return BF16, or FP32 on a CPU without BF16 instructions, where BF16 is 20 times slower."""
    if device.type == "cpu" and not compat.multiplies_bf16_on_cpu():
        return torch.float32
    return torch.bfloat16
