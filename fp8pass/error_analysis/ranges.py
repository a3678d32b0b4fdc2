"""Find outliers, unbounded exponentials and divisors, which low-bit formats cannot store.

- *Outliers*: a mask adds -1e9 or -inf to some elements. Such an element determines the scale of its
  group, so the other elements of the group become zero or NaN.
- *Exponentials*: a sum of decays may be 1000. An error of 1% multiplies its exponential by e^10.
  Results of softmax and sigmoid are bounded, so they do not count.
- *Divisors*: the backward of atan divides by 1 + x². If a group contains x = 30, then 4 bits round
  this divisor to 0 for all x below 3. A divisor recomputed from x is never 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Definition, Expressions, Statistic
from fp8pass.error_analysis.factors import split_at_gradients
from fp8pass.error_analysis.samples import HUGE, SCALES, Samples, evaluate
from fp8pass.graph.symbols import Where

MASK = -1e9  # also stands for infinite masks
DIVISOR = "used as a divisor, and its small values may be rounded to zero"

# A product of up to four inputs that are FACTOR times as large grows by at most GROWTH.
FACTOR = 8.0
GROWTH = FACTOR**4

SEARCHED_COLUMNS = 64  # elements of each row that are searched for divisors


def find_outliers(
    expressions: Expressions, samples: Samples, weights: Collection[Symbol], outliers: set[Symbol]
) -> set[Symbol]:
    """Return the forward symbols that may have outliers: huge or infinite elements.

    A constant addend may be a mask, unless it is in `weights` (parameters). `outliers` are the
    inputs that may have outliers.
    """
    huge = {s: x for s, x in expressions.numbers.items() if not abs(x) < HUGE}
    masked = (_list_addends(expressions) - set(weights) - expressions.numbers.keys()) | outliers
    if not masked and not huge:
        return set()
    inputs = {s: x[: len(SCALES)] for s, x in samples.inputs.items()}
    inputs |= {s: torch.full_like(inputs[s], x) for s, x in huge.items()}
    for seed, symbol in enumerate(sorted(masked, key=str)):
        rest = inputs[symbol] if symbol in outliers else torch.zeros_like(inputs[symbol])
        random = torch.Generator().manual_seed(seed)
        is_masked = torch.rand(rest.shape, generator=random) < 0.25
        inputs[symbol] = torch.where(is_masked, MASK, rest)
    values = samples.run(inputs)
    return {s for s, x in values.items() if not bool((x.abs() < HUGE).all())}


def _list_addends(expressions: Expressions) -> set[Symbol]:
    """Return the constants that are a term of a sum or a value of a `Where`."""
    found: set[Expr] = set()
    for definition in expressions.definitions:
        value = definition.value
        for part in value.args[1:] if isinstance(value, Where) else (value,):
            found.update(term.as_coeff_Mul()[1] for term in sympy.Add.make_args(part))
    return found & expressions.constants


def grows_exponentially(
    expressions: Expressions, samples: Samples, outputs: Sequence[Symbol]
) -> bool:
    if not expressions.has_exponentials:
        return False
    inexact = set(expressions.values)
    inputs = {s: x[:1] * (FACTOR if s in inexact else 1) for s, x in samples.inputs.items()}
    values = samples.run(inputs)
    for symbol in outputs:
        before, after = (x[:1].abs().amax() for x in (samples.values[symbol], values[symbol]))
        if bool(torch.isnan(after)) or bool(after > GROWTH * before):
            return True
    return False


def find_divisors(expressions: Expressions, samples: Samples) -> set[Symbol]:
    """Return the symbols that make a result infinite or NaN if they are rounded to zero.

    A sum over a row contains the largest element of a group, so it is not rounded to zero. A sum
    over a column may be rounded to zero.
    """
    few = {s: x[..., :SEARCHED_COLUMNS] for s, x in samples.values.items()}
    _, backward = split_at_gradients(expressions)
    fixed = expressions.constants.union(expressions.gradients, (d.symbol for d in backward))
    found: set[Symbol] = set()
    for definition in reversed(expressions.definitions):
        is_divisor = definition.symbol in found
        if isinstance(definition, Statistic) and not (is_divisor and definition.over_rows):
            continue
        operands = definition.value.free_symbols - fixed
        alone = {s for s in operands if _fails_at_zero(definition, few, {s}, is_divisor)}
        together = operands - expressions.statistics
        if not alone and together and _fails_at_zero(definition, few, together, is_divisor):
            alone = together
        found |= alone
    return found


def _fails_at_zero(
    definition: Definition, values: dict[Symbol, Tensor], zeros: set[Symbol], is_divisor: bool
) -> bool:
    """Whether a result becomes infinite, NaN or (for a divisor) 0 if all of `zeros` are 0."""
    before = evaluate(definition.value, values)
    after = evaluate(definition.value, {**values, **{s: 0 * values[s] for s in zeros}})
    bad = ~after.isfinite()
    if is_divisor:
        bad = bad | ((after == 0) & (before != 0))
    return bool(torch.any(bad & before.isfinite()))
