"""Hypothesis strategies for property tests of numerics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.dialect.formats import FORMATS, Format
from fp8pass.dialect.quantization import OPERAND_BLOCKS, Block, group

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "fp8pass.testing.strategies needs hypothesis: pip install hypothesis"
    ) from error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, -1)[:, ::2],
}
ROW_COUNTS = (1, 2, 15, 16, 17, 33)  # FP8 GEMMs need multiples of 16
NOT_FINITE_NUMBERS = (float("inf"), -float("inf"), float("nan"))


def formats() -> st.SearchStrategy[Format]:
    """Draw a format that users may choose, for GEMMs or for saved tensors."""
    return st.sampled_from([f for f in FORMATS.values() if f.multiplies or f.saves])


def blocks(columns: int) -> st.SearchStrategy[Block]:
    """Draw which elements share a scale: the tensor, a row, or a group that divides `columns`."""
    sizes = [size for size in (16, 32, 64, 128) if columns % size == 0]
    return st.sampled_from([*OPERAND_BLOCKS.values(), *map(group, sizes)])


@st.composite
def matrices(
    draw: st.DrawFn,
    columns: int | st.SearchStrategy[int] = st.integers(1, 70),  # noqa: B008
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    finite: bool = True,
) -> Tensor:
    """Draw a matrix [R, C] of random numbers and zeros, in any layout.

    All numbers have about the same magnitude, or magnitudes differ widely.

    Args:
        draw: passed by hypothesis.
        columns: number of columns, or a strategy that draws this number.
        dtypes: dtypes to choose from.
        finite: whether to exclude infinities and NaN.
    """
    count = columns if isinstance(columns, int) else draw(columns)
    rows, dtype = draw(st.sampled_from(ROW_COUNTS)), draw(st.sampled_from(dtypes))
    limit = {torch.float16: (-7, 4)}.get(dtype, (-38, 38))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    low, high = sorted((draw(st.integers(*limit)), draw(st.integers(*limit))))
    exponents = low + (high - low) * torch.rand(rows, count, generator=generator)
    x = torch.randn(rows, count, generator=generator, dtype=torch.float64) * 10.0**exponents
    x[torch.rand(rows, count, generator=generator) < 0.1] = 0
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if not finite:
        for value in draw(st.lists(st.sampled_from(NOT_FINITE_NUMBERS), max_size=3)):
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x)


@st.composite
def edges(
    draw: st.DrawFn, format: Format, columns: int = 64, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw a matrix [R, `columns`] of a format's edge cases, multiplied by one power of two.

    The numbers are zeros of both signs; the smallest denormal, and numbers that round to the
    smallest denormal or to zero; the smallest normal number and its neighbors; ties; the largest
    number, and larger numbers.
    """
    step, normal = 2.0**-format.mantissa, 2.0**format.min_exponent
    least = normal * step
    values = [0.0, least / 2, least, 1.5 * least, normal - least, normal, normal * (1 + step)]
    values += [1.0, 1 + step / 2, 1 + step, 1 + 1.5 * step]
    values += [format.max, format.max * (1 + step / 4), format.max * 2]
    shift = 2.0 ** draw(st.integers(-8, 8) if dtype is not torch.float16 else st.just(0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = draw(st.sampled_from(ROW_COUNTS)), columns
    chosen = torch.randint(len(values), shape, generator=generator)
    signs = torch.randint(2, shape, generator=generator) * 2 - 1
    return (torch.tensor(values, dtype=torch.float64)[chosen] * signs * shift).to(dtype)


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "without bias": lambda width: nn.Linear(width, width, bias=False),
    "gated": _Gated,
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "relu": lambda width: nn.ReLU(),
    "silu": lambda width: nn.SiLU(),
    "gelu": lambda width: nn.GELU(),
    "tanh": lambda width: nn.Tanh(),
    "softmax": lambda width: nn.Softmax(-1),
}


@st.composite
def modules(draw: st.DrawFn, width: int = 64, depth: int = 4) -> nn.Module:
    """Draw a small model [..., width] -> [..., width]: a linear layer and up to `depth` modules.

    Some modules are in a residual branch. The seed of the weights is also drawn.
    """
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=depth))
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [nn.Linear(width, width), *(LAYERS[name](width) for name in names)]
    return nn.Sequential(*(_Residual(x) if draw(st.booleans()) else x for x in layers))


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
    "product": lambda x, y: x @ (y.t() @ y),  # without a parameter
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], y[None])[
        0, 0
    ],
}
WIDTH = 32


class RandomProgram(nn.Module):
    """Runs instructions over a growing list of values, each [rows, WIDTH].

    `code` has a kind, a name, and the indices of two operands for each instruction. The program
    returns the values at `returned`, and of the last value the sum over rows and the mean.
    """

    def __init__(self, code: list[tuple[str, Any, int, int]], returned: list[int]) -> None:
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
            else:  # sizes that FP8 does not support
                values.append(x @ self.odd @ self.odd.t())
        results = [values[i % len(values)] for i in self.returned]
        return [*results, values[-1].sum(0), values[-1].mean()]


_INSTRUCTION = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), st.integers(0, 9), st.just(0)),
    st.tuples(
        st.just("binary"), st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)
    ),
    st.tuples(st.just("linear"), st.integers(0, 2), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("odd"), st.just(0), st.integers(0, 9), st.just(0)),
)
# Functions that make an input with `rows` rows, in each layout, from a larger matrix `base`.
_INPUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda base, rows: base[:rows],
    "transposed": lambda base, rows: base[:WIDTH].t().repeat(2, 1)[:rows].t().contiguous().t(),
    "expanded": lambda base, rows: base[:1].expand(rows, WIDTH),
    "sliced": lambda base, rows: base[: 2 * rows : 2],
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[RandomProgram, list[Tensor]]:
    """Draw a program of up to eight instructions, and its inputs.

    Some parameters and inputs require gradients.
    """
    code: list[Any] = draw(st.lists(_INSTRUCTION, min_size=1, max_size=8))
    returned = draw(st.lists(st.integers(0, 9), max_size=2, unique=True))
    rows = draw(st.sampled_from([1, 16, 17, 40]))
    torch.manual_seed(draw(st.integers(0, 99)))
    program = RandomProgram(code, returned)
    for parameter in program.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    inputs = []
    for _ in range(draw(st.integers(1, 2))):
        layout = draw(st.sampled_from(sorted(_INPUTS)))
        x = _INPUTS[layout](torch.randn(4 * 40, WIDTH), rows).detach()
        inputs.append(x.requires_grad_(draw(st.booleans())))
    return program, inputs
