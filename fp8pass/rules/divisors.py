"""Which values of a region must not become zero, because results would be infinite or NaN.

Values in one group share a scale, and those far below the largest are rounded to zero. The backward
of atan divides by 1 + x²: beside an x of 30 this would be 0 in 4 bits for all x below 3, however
little its rounding matters elsewhere. What follows from an inexact x is never zero, so that x may
be stored instead.
"""

from __future__ import annotations

from sympy import Symbol
from torch import Tensor

from fp8pass.rules.expressions import Expressions, Pointwise
from fp8pass.rules.samples import Samples, evaluate

COLUMNS = 16  # samples that are looked at

DIVISOR = "something divides by it, and values that share a scale may be rounded to zero"


def divisors(expressions: Expressions, samples: Samples) -> set[Symbol]:
    """The symbols whose zero makes some result infinite or NaN, at once or by making zeros.

    Statistics of several values are no such results: one zero makes none of them zero.
    """
    few = {s: x[:1, :1, :COLUMNS] for s, x in samples.values.items()}
    found: set[Symbol] = set()
    for definition in reversed(expressions.definitions):
        if isinstance(definition, Pointwise):
            found |= _divisors_of(definition, few, definition.symbol in found)
    return found


def _divisors_of(definition: Pointwise, values: dict[Symbol, Tensor], divides: bool) -> set[Symbol]:
    """The operands that must not be zero, for one definition whose own zeros may matter."""
    found = set()
    for operand in definition.value.free_symbols:
        at_zero = evaluate(definition.value, {**values, operand: 0 * values[operand]})
        vanishes = (at_zero == 0) & (values[definition.symbol] != 0)
        bad = (~at_zero.isfinite()).any() or (divides and vanishes.any())
        if bad and values[definition.symbol].isfinite().all():
            found.add(operand)
    return found
