"""Strategies for hypothesis: what a property test of numerics draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.dialect.formats import FORMATS, Format
from fp8pass.dialect.quantization import OPERAND_BLOCKS, Block, group
from fp8pass.testing.programs import BINARY, UNARY, WIDTH, Program

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("fp8pass.testing.strategies needs hypothesis: pip install it.") from error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# How a matrix lies in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, -1)[:, ::2],
}
ROWS = (1, 2, 15, 16, 17, 33)  # around what GEMMs of FP8 take multiples of
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))


def formats() -> st.SearchStrategy[Format]:
    """The formats that users may choose, for GEMMs or for saved values."""
    return st.sampled_from([f for f in FORMATS.values() if f.multiplies or f.saves])


def blocks(columns: int) -> st.SearchStrategy[Block]:
    """By tensor, by row, and in each size of groups that divides so many columns."""
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
    """A matrix of any layout, dtype and magnitude, with zeros and, at times, mixed magnitudes.

    Args:
        draw: given by hypothesis.
        columns: how many, or what draws it.
        dtypes: one of them is drawn.
        finite: whether no element is infinite or NaN.
    """
    count = columns if isinstance(columns, int) else draw(columns)
    rows, dtype = draw(st.sampled_from(ROWS)), draw(st.sampled_from(dtypes))
    limit = {torch.float16: (-7, 4)}.get(dtype, (-38, 38))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    low, high = sorted((draw(st.integers(*limit)), draw(st.integers(*limit))))
    exponents = low + (high - low) * torch.rand(rows, count, generator=generator)
    x = torch.randn(rows, count, generator=generator, dtype=torch.float64) * 10.0**exponents
    x[torch.rand(rows, count, generator=generator) < 0.1] = 0
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if not finite:
        for value in draw(st.lists(st.sampled_from(NOT_FINITE), max_size=3)):
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x)


@st.composite
def edges(
    draw: st.DrawFn, format: Format, columns: int = 64, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A matrix of numbers at the edges of a format, all times one power of two.

    Zeros of both signs; the smallest denormal and what rounds to it or to zero; the smallest normal
    number and its neighbours; ties between two codes; the largest number, and what is beyond it.
    """
    step, normal = 2.0**-format.mantissa, 2.0**format.min_exponent
    least = normal * step
    values = [0.0, least / 2, least, 1.5 * least, normal - least, normal, normal * (1 + step)]
    values += [1.0, 1 + step / 2, 1 + step, 1 + 1.5 * step]
    values += [format.max, format.max * (1 + step / 4), format.max * 2]
    shift = 2.0 ** draw(st.integers(-8, 8) if dtype is not torch.float16 else st.just(0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shape = draw(st.sampled_from(ROWS)), columns
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
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


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
    """A small model [..., width] -> [..., width]: a linear layer and up to `depth` more modules.

    Some of them stand in a residual branch. Weights follow a seed that is drawn.
    """
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=depth))
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [nn.Linear(width, width), *(LAYERS[name](width) for name in names)]
    return nn.Sequential(*(_Residual(x) if draw(st.booleans()) else x for x in layers))


_INSTRUCTION = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), st.integers(0, 9), st.just(0)),
    st.tuples(
        st.just("binary"), st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)
    ),
    st.tuples(st.just("linear"), st.integers(0, 2), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("odd"), st.just(0), st.integers(0, 9), st.just(0)),
)
# How an input of a program lies in memory, from 4·rows·WIDTH numbers.
_INPUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda base, rows: base[:rows],
    "transposed": lambda base, rows: base[:WIDTH].t().repeat(2, 1)[:rows].t().contiguous().t(),
    "expanded": lambda base, rows: base[:1].expand(rows, WIDTH),
    "sliced": lambda base, rows: base[: 2 * rows : 2],
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Tensor]]:
    """A program of up to eight instructions, and inputs; what requires a gradient is drawn, too."""
    code: list[Any] = draw(st.lists(_INSTRUCTION, min_size=1, max_size=8))
    returned = draw(st.lists(st.integers(0, 9), max_size=2, unique=True))
    rows = draw(st.sampled_from([1, 16, 17, 40]))
    torch.manual_seed(draw(st.integers(0, 99)))
    program = Program(code, returned)
    for parameter in program.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    inputs = []
    for _ in range(draw(st.integers(1, 2))):
        layout = draw(st.sampled_from(sorted(_INPUTS)))
        x = _INPUTS[layout](torch.randn(4 * 40, WIDTH), rows).detach()
        inputs.append(x.requires_grad_(draw(st.booleans())))
    return program, inputs
