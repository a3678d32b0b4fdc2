"""Which values of a region must not become zero, because results would be infinite or NaN.

Values in one group share a scale, and those far below the largest are rounded to zero. The backward
of atan divides by 1 + x²: beside an x of 30 this would be 0 in 4 bits for all x below 3, however
little its rounding matters elsewhere. What follows from an inexact x is never zero, so that x may
be stored instead.
"""

from __future__ import annotations

import torch
from sympy import Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Expressions, Pointwise, Statistic
from fp8pass.error_analysis.factors import dependent_on_gradients
from fp8pass.error_analysis.samples import Samples, evaluate

COLUMNS = 64  # samples of each row that are looked at

DIVISOR = "something divides by it, and values that share a scale may be rounded to zero"


def divisors(expressions: Expressions, samples: Samples) -> set[Symbol]:
    """The symbols whose zeros make some result infinite or NaN, at once or by making zeros.

    Several operands of an operator may be zero in the same place. What reduces a row has one of its
    largest values in it, which is not rounded to zero; what reduces a column may have none.
    """
    few = {s: x[..., :COLUMNS] for s, x in samples.values.items()}
    fixed = expressions.constants | dependent_on_gradients(expressions)
    found: set[Symbol] = set()
    for definition in reversed(expressions.definitions):
        divides = definition.symbol in found
        if isinstance(definition, Statistic) and not (divides and definition.over_rows):
            continue
        found |= _divisors_of(definition, few, divides, fixed, expressions.statistics)
    return found


def _divisors_of(
    definition: Pointwise | Statistic,
    values: dict[Symbol, Tensor],
    divides: bool,
    fixed: set[Symbol],
    statistics: set[Symbol],
) -> set[Symbol]:
    """The operands of one definition whose zeros matter: on their own, or all at once."""
    operands = definition.value.free_symbols - fixed
    now = evaluate(definition.value, values)

    def matters(zeros: set[Symbol]) -> bool:
        if not zeros:
            return False
        at_zero = evaluate(definition.value, {**values, **{s: 0 * values[s] for s in zeros}})
        bad = ~at_zero.isfinite()
        if divides:
            bad = bad | ((at_zero == 0) & (now != 0))
        return bool(torch.any(bad & now.isfinite()))

    alone = {s for s in operands if matters({s})}
    together = operands - statistics
    return alone or (together if matters(together) else set())
