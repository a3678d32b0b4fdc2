"""Programs: simplification, serialization, and reading a residual stream."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernel_helpers import assert_same, by_row, cross_entropy, norm, operands, swiglu
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.codegen.program.reference import compute_program
from fp8pass.codegen.program.simplify import simplify


def spelled_out_silu() -> Program:
    """Return x / (1 + exp(-x)), the sigmoid of its derivative, and a power of 1."""
    steps, store = by_row("y")
    return Program(
        (Load("x", "full"),),
        (
            Step("n", "aten.neg.default", ("x",)),
            Step("e", "aten.exp.default", ("n",)),
            Step("d", "aten.add.Tensor", ("e", 1)),
            Step("a", "aten.div.Tensor", ("x", "d")),
            Step("b", "aten.pow.Tensor_Scalar", ("a", 1.0)),
            Step("p", "aten.sigmoid.default", ("x",)),
            Step("y", "aten.mul.Tensor", ("b", "p")),
            *steps,
        ),
        (store,),
    )


def test_formulas_are_computed_once():
    targets = [step.target for step in simplify(spelled_out_silu(), 96).steps]
    assert targets[:3] == ["aten.sigmoid.default", "aten.mul.Tensor", "aten.mul.Tensor"]
    assert targets[3:] == ["row_amax", "scale"]


def test_denominators_of_a_softmax_are_computed_with_the_maximum():
    """Not if the exponentials are relative to the maximum of another matrix."""
    assert "row_exp_sum" in [step.target for step in simplify(cross_entropy(), 96).steps]
    other = replace(cross_entropy().steps[0], args=("label",))
    unusual = replace(cross_entropy(), steps=(other, *cross_entropy().steps[1:]))
    assert "row_exp_sum" not in [step.target for step in simplify(unusual, 96).steps]


def test_only_one_sum_of_exponentials_belongs_to_a_maximum():
    steps = cross_entropy().steps
    second = replace(steps[3], name="again")
    stores = tuple(Store(name, ("row",), dtype="float32") for name in ("total", "again"))
    program = Program((Load("x", "full"),), (*steps[:4], second), stores)
    targets = [step.target for step in simplify(program, 96).steps]
    assert (targets.count("row_exp_sum"), targets.count("row_sum")) == (1, 1)


def test_rounded_values_are_not_left_out():
    """The exponentials are stored in BF16, so the sum is of rounded values."""
    steps = cross_entropy().steps[:4]
    stores = Store("power", ("full",), dtype="bfloat16"), Store("total", ("row",), dtype="float32")
    program = Program((Load("x", "full"),), steps, stores)
    assert [step.target for step in simplify(program, 96).steps][-1] == "row_sum"


def test_sums_of_one_hot_rows_are_their_elements():
    """Not if the weights vary along a row. Labels may be out of range."""
    sums = [s for s in simplify(cross_entropy(), 96).steps if s.target == "row_sum"]
    assert len(sums) == 1  # of the loss
    loads = Load("label", "row"), Load("weight", "column"), Load("x", "full")
    by_class = simplify(replace(cross_entropy(), loads=loads), 96)
    assert [s.target for s in by_class.steps].count("row_sum") == 2


@pytest.mark.parametrize("make", [spelled_out_silu, lambda: norm(96, 32), lambda: swiglu(32)])
def test_simplified_programs_are_equivalent(make):
    program = make()
    inputs = operands(program, 11, 96, "cpu")
    inputs[0][3], inputs[-1][4, :3] = -200.0, torch.tensor([math.nan, math.inf, -math.inf])
    wanted = compute_program(program, inputs)
    for got, want in zip(compute_program(simplify(program, 96), inputs), wanted, strict=True):
        assert_same(got, want, exact=False)


def test_stored_values_keep_their_names():
    """Two equal values that are stored remain two values."""
    squares = [Step(name, "aten.mul.Tensor", ("x", "x")) for name in ("a", "b", "c")]
    stores = tuple(Store(name, ("full",), dtype="float32") for name in ("a", "b"))
    program = Program((Load("x", "full"),), tuple(squares), stores)
    assert [step.name for step in simplify(program, 96).steps] == ["a", "b"]


def test_rounded_values_are_not_merged_with_unrounded_ones():
    """A sum in bf16, and its rounding error."""
    program = Program(
        (Load("x", "full"), Load("y", "full")),
        (
            Step("a", "aten.add.Tensor", ("x", "y")),
            Step("c", "aten.add.Tensor", ("x", "y")),
            Step("d", "aten.sub.Tensor", ("c", "x")),
        ),
        (Store("a", ("full",), dtype="bfloat16"), Store("d", ("full",), dtype="float32")),
    )
    inputs = [torch.full((1, 16), x) for x in (256.0, 0.5)]
    assert compute_program(simplify(program, 96), inputs)[1][0, 0] == 0.5


def test_programs_survive_serialization():
    program = norm(640, 128).canonical()
    assert Program.parse(program.dumps()) == program
    assert program.canonical() == program


def test_a_kernel_computes_one_sum_of_a_residual_stream():
    """Other sums are read from memory; otherwise n layers would read n²/2 branches."""

    def stream(x, *branches):
        sums = []
        for branch in branches:
            x = x + branch
            sums.append(x.exp())
        return x, *sums

    tensors = [torch.randn(16, 64, dtype=torch.bfloat16) for _ in range(4)]
    g = make_fx(stream, tracing_mode="fake")(*tensors).graph
    first, second, _ = (n for n in g.nodes if n.target is torch.ops.aten.add.Tensor)
    reader = Reader(second, by_row=True)
    reader.read(second)
    assert set(reader.loads) == {first, second.args[1]}
