"""Random programs of linear layers, norms, activations, views and in-place updates."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

UNARY = {
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
BINARY = {
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
    """Runs a list of instructions over a growing list of values, all [rows, WIDTH]."""

    def __init__(self, code: list[tuple], returned: list[int], linears: int) -> None:
        super().__init__()
        self.code, self.returned = code, returned
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(3))
        self.odd = nn.Parameter(torch.randn(WIDTH, 7))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
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


INSTRUCTION = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), st.integers(0, 9), st.just(0)),
    st.tuples(
        st.just("binary"), st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)
    ),
    st.tuples(st.just("linear"), st.integers(0, 2), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("odd"), st.just(0), st.integers(0, 9), st.just(0)),
)
# How an input is laid out in memory, from 4·rows·WIDTH numbers.
LAYOUTS = {
    "contiguous": lambda base, rows: base[:rows],
    "transposed": lambda base, rows: base[:WIDTH].t().repeat(2, 1)[:rows].t().contiguous().t(),
    "expanded": lambda base, rows: base[:1].expand(rows, WIDTH),
    "sliced": lambda base, rows: base[: 2 * rows : 2],
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Tensor]]:
    code = draw(st.lists(INSTRUCTION, min_size=1, max_size=8))
    returned = draw(st.lists(st.integers(0, 9), max_size=2, unique=True))
    rows = draw(st.sampled_from([1, 16, 17, 40]))
    torch.manual_seed(draw(st.integers(0, 99)))
    program = Program(code, returned, 3)
    for parameter in program.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    inputs = []
    for _ in range(draw(st.integers(1, 2))):
        layout = draw(st.sampled_from(sorted(LAYOUTS)))
        x = LAYOUTS[layout](torch.randn(4 * 40, WIDTH), rows).detach()
        inputs.append(x.requires_grad_(draw(st.booleans())))
    return program, inputs
