"""Programs of linear layers, norms, activations, views and in-place updates, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "exp": lambda x: torch.exp(-x.abs()),
    "square": lambda x: x * x,
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1),
    "sin": torch.sin,
    "half": lambda x: x.bfloat16().float(),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "centered": lambda x: x - x.mean(0, keepdim=True),
    "max": lambda x: x - x.amax(-1, keepdim=True),
    "sorted": lambda x: x.cumsum(-1),
    "dropout": lambda x: F.dropout(x, 0.4),
    "roll": lambda x: torch.cat([x[:, 8:], x[:, :8]], -1),
    "strided": lambda x: x.view(-1, 2, x.shape[-1] // 2).transpose(1, 2).reshape(x.shape),
    "expanded": lambda x: x + x[:1].expand_as(x),
    "in_place": lambda x: x.clone().mul_(2).add_(1),
    "masked": lambda x: torch.where(x > 0.1, x, -x),
    "detached": lambda x: x + x.detach().sigmoid(),
    "dead": lambda x: (x.exp(), x)[1],
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "gate": lambda x, y: F.silu(x) * y,
    "div": lambda x, y: x / (1 + y.abs()),
    "max": torch.maximum,
    "angle": lambda x, y: torch.atan2(x.detach(), y.detach()) * 2 * y,
    "product": lambda x, y: x @ (y.t() @ y),  # no parameter involved
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None])[
        0, 0
    ],
}
WIDTH = 32


class Program(nn.Module):
    """Runs a list of instructions over a growing list of values, all [rows, WIDTH].

    Args:
        code: instructions: kind, name, and numbers of the values that are read.
        returned: numbers of the values that are returned, with a sum and a mean of the last one.
    """

    def __init__(self, code: list[tuple[str, Any, int, int]], returned: list[int]) -> None:
        super().__init__()
        self.code, self.returned = code, returned
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(3))
        self.odd = nn.Parameter(torch.randn(WIDTH, 7))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """The returned values of inputs [rows, WIDTH]."""
        values = list(inputs)
        for kind, name, a, b in self.code:
            x, y = values[a % len(values)], values[b % len(values)]
            if kind == "unary":
                values.append(UNARY[name](x))
            elif kind == "binary":
                values.append(BINARY[name](x, y))
            elif kind == "linear":
                values.append(self.linears[name](x))
            else:  # sizes that FP8 cannot do
                values.append(x @ self.odd @ self.odd.t())
        results = [values[i % len(values)] for i in self.returned]
        return [*results, values[-1].sum(0), values[-1].mean()]
