"""Reductions that read the scales of groups hold a row in registers, as other reductions do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import nn
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from fp8pass import compat
from fp8pass.compat import reductions

ROW, COLUMN = sympy.symbols("row column", integer=True, nonnegative=True)
ADDRESSES = {
    "rows": (768 * ROW + COLUMN, True),
    "scales of groups": (6 * ROW + FloorDiv(COLUMN, 128), True),
    "one value for each row": (ROW, True),
    "a random seed": (3, True),
    "columns": (ROW + 512 * COLUMN, False),
    "every other element": (1536 * ROW + 2 * COLUMN, False),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_addresses_along_a_row(case):
    index, along = ADDRESSES[case]
    access = MemoryDep("x", index, (ROW, COLUMN), (512, 768))
    assert reductions._runs_along(access) == along


class Features:
    """A kernel that reduces short rows along which all operators read."""

    reduction_numel = 768

    def scheduler_nodes(self):
        return []


@pytest.mark.parametrize(("answer", "cooperative", "wanted"), [(1, 0, 1), (0, 0, 1), (0, 1, 0)])
def test_choices_of_users_are_asked_first(answer, cooperative, wanted, monkeypatch):
    class Users(InductorChoices):
        def __init__(self, answer):
            self.answer = answer

        def should_use_persistent_reduction(self, features, cooperative_reduction):
            return bool(self.answer)

    sizes = SimpleNamespace(statically_known_leq=lambda a, b: a <= b)
    with V.set_choices_handler(Users(answer)), reductions.hold_dequantized_rows():
        assert V.choices.answer == answer
        with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
            found = V.choices.should_use_persistent_reduction(Features(), bool(cooperative))
    assert found == bool(wanted)


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
def test_backwards_of_norms_read_a_row_once(monkeypatch):
    """Names of kernels with many operators do not contain the operators, so kernels are counted."""
    scale = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model = nn.ModuleList(Block() for _ in range(2)).cuda().bfloat16()

    def forward(x):
        for block in model:
            x = block(x, scale)
        return x

    def count() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="fp8pass", options={"compact_saves": "all"})
        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
        return sum("def triton_per" in line for line in codes[-1].splitlines())

    held = count()
    monkeypatch.setattr(compat, "hold_dequantized_rows", nullcontext)
    assert held > count()
