"""The formula of every pointwise operator computes what PyTorch computes.

`tests/codegen/test_tiles.py` tests the Triton.
"""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from torch import Tensor, fx

from fp8pass import compat
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.pointwise import POINTWISE, POWERS, TRITON_TEMPLATES, triton_template
from fp8pass.graph.symbols import TORCH_FUNCTIONS, Operand, Underivable, elementwise

aten = torch.ops.aten
OPERATORS = sorted(POINTWISE, key=str)
DERIVABLE = [op for op in OPERATORS if POINTWISE[op].formula]
LOGICAL = {aten.logical_and.default, aten.logical_or.default, aten.logical_not.default}
CONSTANTS = {aten.pow.Tensor_Scalar: 3.0}


def arguments_of(op, x: list) -> list:
    """Return an operand of `x` for each tensor argument, and a constant for each number."""
    schema = [a for a in compat.schema_of(op).arguments if not a.has_default_value()]
    remaining = iter(x)
    return [next(remaining) if str(a.type) == "Tensor" else CONSTANTS.get(op, 0.25) for a in schema]


def samples(op, *, positive: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3)]
    if positive:
        found = [x.abs() + 0.1 for x in found]
    if op is aten.where.self:
        found[0] = found[0] > 0.5
    if op in LOGICAL:
        found = [x > 0.5 for x in found]
    return found


def formula_of(op, *, positive: bool) -> tuple[list[sympy.Symbol], sympy.Expr]:
    """Return the symbols and the formula of an operator."""
    symbols = [sympy.Symbol(name, real=True, positive=positive or None) for name in "abc"]
    operands = [Operand(symbol) for symbol in symbols]
    return symbols, POINTWISE[op].formula(*arguments_of(op, operands))


def needs_positive(op) -> bool:
    """Whether a formula raises Underivable for operands that may vanish or be negative."""
    try:
        formula_of(op, positive=False)
    except Underivable:
        return True
    return False


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_is_classified_pointwise(op):
    node = fx.Graph().call_function(op)
    node.meta["val"] = torch.empty(1)
    assert kind(node) is Kind.POINTWISE


@pytest.mark.parametrize("op", DERIVABLE, ids=str)
def test_formula_is_what_pytorch_computes(op):
    positive = needs_positive(op)
    symbols, formula = formula_of(op, positive=positive)
    tensors = samples(op, positive=positive)
    want = op(*arguments_of(op, tensors)).double()
    got = sympy.lambdify(symbols, formula, modules=[TORCH_FUNCTIONS])(
        *(x.double() for x in tensors)
    )
    torch.testing.assert_close(got, want)


def test_unsupported_arguments_are_refused():
    x = Operand(sympy.Symbol("x"))
    assert elementwise(lambda a, b: a + b)(x, x, alpha=3) == 4 * x.symbol
    with pytest.raises(Underivable, match="value"):
        POINTWISE[aten.addcmul.default].formula(x, x, x, value=2)


def test_kernels_compute_calls_with_all_arguments():
    assert triton_template("aten.clamp_min.default", ("x", 0.5)) == "largest({0}, {1})"
    assert triton_template("aten.add.Tensor", ("x",)) is None
    assert triton_template("aten.add.Scalar", ("x", 2, 3)) is None
    assert triton_template("aten.add.Scalar", ("x", math.nan)) is None
    assert triton_template("aten.pow.Tensor_Scalar", ("x", 2)) == POWERS[2.0]
    assert triton_template("aten.pow.Tensor_Scalar", ("x", 2.5)) is None
    assert triton_template("aten.gelu.default", ("x",)) is None
    assert TRITON_TEMPLATES.keys() <= {str(op) for op in POINTWISE}
