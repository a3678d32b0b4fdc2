"""Which values of a region may be huge or infinite in a few places, because of exact inputs.

Values in one group share a scale. A mask adds -1e9 or -inf to some elements, and rounding them to
few bits leaves zeros or NaN of the others in their group, however harmless the mask is where the
value is used. So such a value is kept as it is, or computed again from what it was before the mask.

What parameters add is of the size of other values. What anything else adds may be a mask.
"""

from __future__ import annotations

from collections.abc import Collection

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Expressions
from fp8pass.error_analysis.samples import HUGE, SCALES, Samples
from fp8pass.graph.symbols import Where

MASKED = -1e9  # infinity is found by the same path


def wild_symbols(
    expressions: Expressions, samples: Samples, weights: Collection[Symbol], wild: set[Symbol]
) -> set[Symbol]:
    """The forward symbols that may be huge in places.

    Args:
        expressions: the region in symbols.
        samples: its samples.
        weights: constants that are parameters.
        wild: inputs that may be huge themselves.
    """
    huge = {s: x for s, x in expressions.numbers.items() if not abs(x) < HUGE}
    masked = (_added(expressions) - set(weights) - expressions.numbers.keys()) | wild
    if not masked and not huge:
        return set()
    inputs = {s: x[: len(SCALES)] for s, x in samples.inputs.items()}
    inputs |= {s: torch.full_like(inputs[s], x) for s, x in huge.items()}
    for number, symbol in enumerate(sorted(masked, key=str)):
        rest = inputs[symbol] if symbol in wild else torch.zeros_like(inputs[symbol])
        inputs[symbol] = torch.where(_some_elements(rest, number), MASKED, rest)
    values = samples.run(inputs)
    return {s for s, x in values.items() if not bool((x.abs() < HUGE).all())}


def _added(expressions: Expressions) -> set[Symbol]:
    """Constants that are a summand or a choice somewhere."""
    found: set[Expr] = set()
    for definition in expressions.definitions:
        value = definition.value
        parts = value.args[1:] if isinstance(value, Where) else (value,)
        for part in parts:
            found.update(term.as_coeff_Mul()[1] for term in sympy.Add.make_args(part))
    return found & expressions.constants


def _some_elements(like: Tensor, seed: int) -> Tensor:
    """A quarter of the elements, others for each input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(like.shape, generator=generator) < 0.25
