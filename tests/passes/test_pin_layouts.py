"""Only operands of grouped GEMMs get buffers, with the traced strides."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.codegen.buffers import buffer
from fp8pass.config import Config
from fp8pass.passes import Context
from fp8pass.passes.lowering.pin_layouts import pin_layouts


def pinned(function, *args) -> list[torch.fx.Node]:
    gm = make_fx(function, tracing_mode="fake")(*args)
    pin_layouts(gm, Context(Config()))
    gm.graph.lint()
    return [n for n in gm.graph.nodes if n.target is buffer]


def weight_gradient(x, y):
    offsets = torch.arange(1, 3, dtype=torch.int32) * (x.shape[0] // 2)
    return torch._grouped_mm(x.t(), y, offs=offsets)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(32, 16).bfloat16()


def test_computed_operands_get_a_buffer(rows):
    (held,) = pinned(lambda x, y: weight_gradient(x.sin(), y), rows, rows)
    assert held.args[0].target is torch.ops.aten.sin.default
    assert held.meta["val"].stride() == (16, 1)


def test_transposed_results_keep_their_strides(rows):
    (held,) = pinned(lambda x, y: weight_gradient(x.t().contiguous().t().sin(), y), rows, rows)
    assert held.meta["val"].stride() == (1, 32)


def test_operands_in_memory_are_not_copied(rows):
    """Inputs and products are in memory already."""
    assert not pinned(weight_gradient, rows, rows)
    assert not pinned(lambda x, w, y: weight_gradient(x @ w, y), rows, rows[:16], rows)


def test_other_operators_take_any_layout(rows):
    assert not pinned(lambda x, y: x.sin().t() @ y, rows, rows)


class Experts(nn.Module):
    """Two experts with half of the tokens each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 32, 64).bfloat16() / 6)
        self.down = nn.Parameter(torch.randn(2, 64, 32).bfloat16() / 8)

    def forward(self, x):
        offsets = torch.arange(1, 3, dtype=torch.int32) * (x.shape[0] // 2)
        hidden = torch._grouped_mm(x.sin(), self.up, offs=offsets)
        return torch._grouped_mm(nn.functional.silu(hidden), self.down, offs=offsets)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"gradient_format": "e5m2"}, {"recipe": "exact"}], ids=str)
def test_groups_do_not_follow_one_another_in_rows(options):
    """CUDA's kernels raise an error if groups divide the columns of a row-major operand.

    Experts are in BF16, and their saved tensors are in low-bit formats or exact.
    """
    model = Experts()
    program = torch.compile(model, backend="fp8pass", options=options)
    x = torch.randn(32, 32).bfloat16().requires_grad_()
    _, codes = run_and_get_code(lambda: program(x).sum().backward())
    firsts = re.findall(r"extern_kernels\._grouped_mm\((\w+\([^)]*\), \([^)]*\)|\w+)", codes[-1])
    transposed = [first for first in firsts if first.startswith("reinterpret_tensor")]
    assert len(firsts) == 4
    assert len(transposed) == 2, firsts
