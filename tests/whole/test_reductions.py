"""Reductions that read the scales of groups hold a row in registers, as other reductions do."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import run_and_get_code
from torch.utils._sympy.functions import FloorDiv

from fp8pass.compat import reductions

ROW, COLUMN = sympy.symbols("row column", integer=True, nonnegative=True)
ADDRESSES = {
    "rows": (768 * ROW + COLUMN, True),
    "scales of groups": (6 * ROW + FloorDiv(COLUMN, 128), True),
    "one value for each row": (ROW, True),
    "columns": (ROW + 512 * COLUMN, False),
    "every other element": (1536 * ROW + 2 * COLUMN, False),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_addresses_along_a_row(case):
    index, along = ADDRESSES[case]
    access = MemoryDep("x", index, (ROW, COLUMN), (512, 768))
    assert reductions._runs_along(access) == along


class Block(nn.Module):
    """A modulated LayerNorm, as in DiT. No kernel of fp8pass computes its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(768, elementwise_affine=False)
        self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)

    def forward(self, x, scale):
        h = self.norm(x) * (1 + scale[:, None])
        return x + self.down(torch.nn.functional.gelu(self.up(h)))


@pytest.mark.gpu
def test_backwards_of_norms_read_a_row_once():
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(2)).cuda().bfloat16()
    x = torch.randn(64, 256, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scale = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16)

    def forward(x):
        for block in model:
            x = block(x, scale)
        return x

    def step(x):
        compiled(x).sum().backward()

    compiled = torch.compile(forward, backend="fp8pass", options={"compact_saves": "all"})
    _, codes = run_and_get_code(step, x)
    assert "triton_per_fused" in codes[-1]
    assert "native_layer_norm_backward" in codes[-1]
    looped = [line for line in codes[-1].splitlines() if "def triton_red" in line]
    assert not any("native_layer_norm_backward" in line for line in looped)
