"""Evaluation of formulas on samples."""

from __future__ import annotations

import pytest
import sympy
import torch
from sympy import Symbol

from fp8pass.error_analysis.samples import evaluate
from fp8pass.graph.symbols import Magnitude, Sigmoid, Sign, UnitStep, Where

FUNCTIONS = [UnitStep, Sign, Magnitude, Sigmoid, sympy.exp, sympy.log, sympy.tanh, sympy.erf]
X = Symbol("x", positive=True)


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_functions_of_constants(function):
    """Sympy leaves `UnitStep(2)` as a call; PyTorch's functions take no numbers."""
    two = torch.full((3,), 2.0, dtype=torch.float64)
    want = evaluate(function(X), {X: two})
    assert torch.equal(evaluate(function(sympy.Integer(2)) + 0 * X, {X: two}).expand(3), want)


def test_choices_between_constants():
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(evaluate(Where(X, 2, 3), {X: x}), 2 * x)
