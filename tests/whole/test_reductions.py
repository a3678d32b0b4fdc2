"""Reductions that read the scales of groups hold a row in registers, as other reductions do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

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
