"""How much it takes to derive the rule of a region, before it is tried.

Work is linear in operators, but each statistic of a gradient adds a term to all Jacobians behind
it, and each mean over such a term another statistic: many normalizations in a row, as Sinkhorn's
iterations are, take too long. A count rather than a clock decides, so that plans do not depend on
how busy a machine is.
"""

from __future__ import annotations

from collections.abc import Iterable

from sympy import Symbol

from fp8pass.error_analysis.expressions import Expressions, Statistic
from fp8pass.error_analysis.factors import dependent_on_gradients
from fp8pass.graph.symbols import Underivable

# Evaluations of operators on samples, with their derivatives: about 0.2 seconds.
LARGEST_WORK = 30_000
EVALUATION = 8  # what it takes to set up one operator, in passes of autograd through one


def check_work(expressions: Expressions, outputs: Iterable[Symbol]) -> None:
    """Refuse a region whose rule would take too long to derive.

    Raises:
        Underivable: it would.
    """
    dependent = dependent_on_gradients(expressions)
    forward = [d for d in expressions.definitions if d.symbol not in dependent]
    backward = [d for d in expressions.definitions if d.symbol in dependent]
    passes = sum(isinstance(d, Statistic) for d in forward)
    evaluations = len(forward)
    for gradient in expressions.gradients:
        terms: dict[Symbol, set[Symbol]] = {gradient: set()}
        for definition in backward:
            operands = definition.value.free_symbols & terms.keys()
            if not operands:
                continue
            through = set[Symbol]().union(*(terms[s] for s in operands))
            evaluations += 1 + len(through)
            is_statistic = isinstance(definition, Statistic)
            passes += len(through) if is_statistic else 0
            terms[definition.symbol] = {definition.symbol} if is_statistic else through
            if EVALUATION * evaluations > LARGEST_WORK:
                raise _too_large(expressions)
        passes += sum(1 + 2 * len(terms[o]) for o in outputs if o in terms)
    if EVALUATION * evaluations + passes * len(expressions.definitions) > LARGEST_WORK:
        raise _too_large(expressions)


def _too_large(expressions: Expressions) -> Underivable:
    statistics = sum(isinstance(d, Statistic) for d in expressions.definitions)
    return Underivable(
        f"{len(expressions.definitions)} operators with {statistics} reductions, and no GEMM "
        "between, take too long to find a rule for"
    )
