"""Slices of the columns of a GEMM: kernels agree with generated code."""

from __future__ import annotations

import pytest
import torch
from helpers import cosine, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fp8pass import backend as make_backend
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.codegen.program.reader import ALIGNED
from fp8pass.config import Config
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class Parts(nn.Module):
    """A layer that multiplies two slices of the columns of a linear layer.

    Attributes:
        first, second: first column of each slice.
    """

    def __init__(self, width, columns, first, second, activation, bias) -> None:
        super().__init__()
        self.inward = nn.Linear(64, width, bias=bias)
        self.outward = nn.Linear(columns, 64, bias=bias)
        self.columns, self.first, self.second = columns, first, second
        self.activation = ACTIVATIONS[activation]

    def forward(self, x):
        h = self.inward(x)
        a, b = (h[..., i : i + self.columns] for i in (self.first, self.second))
        return self.outward(self.activation(a) * b)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns=st.sampled_from([64, 96, 128, 256]),
    first=st.integers(0, 12),
    second=st.integers(0, 12),
    unit=st.sampled_from([8, 16, 32, 128]),
    more=st.integers(0, 3),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
    shape=st.sampled_from([(48, 64), (2, 24, 64)]),
    recipe=st.sampled_from(["coat", "agoq", "linear"]),
)
def test_gradients_of_slices_of_columns_are_right(
    graphs, monkeypatch, columns, first, second, unit, more, activation, bias, shape, recipe
):
    torch.manual_seed(0)
    first, second = first * unit, second * unit
    width = max(first, second) + columns + more * 16
    width += -width % CONTRACTION_MULTIPLE  # required by FP8
    model = Parts(width, columns, first, second, activation, bias).bfloat16()
    x = torch.randn(shape).bfloat16()
    graphs.clear()
    found = []
    for passes in ("fuse_rows,fuse_norms,fuse_tiles", ""):
        torch._dynamo.reset()
        monkeypatch.setenv("FP8PASS_DISABLE_PASSES", passes)
        program = torch.compile(model, backend=make_backend(Config.recipe(recipe)))
        found.append(step(program, model, (x.clone().requires_grad_(),)))
    want, got = found
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter
    in_place = first % ALIGNED == second % ALIGNED == 0
    if width > columns and recipe != "linear":  # it has one scale for all rows
        assert (_offsets_read(graphs) >= {first, second}) == in_place


def _offsets_read(graphs) -> set[int]:
    """Return the offsets of the BF16 slices that row kernels read."""
    programs = (
        program
        for g in graphs
        for node in g.nodes
        if node.target is rows
        for program in Batch.parse(node.args[1]).programs
    )
    return {
        load.offset for p in programs for load in p.loads if load.operand == "full" and load.width
    }
