"""Exponentials that nothing bounds: no rule holds for what they are multiplied with.

Samples have the size of what layers give. What positions sum up, a cumulative decay, is far larger,
and nobody says how large. Its exponential turns an error of a hundredth of it into a factor, and
the elements of a group, which share a scale, differ by orders of magnitude: what is smallest before
the sum may be largest behind it. Where an exponential's argument is bounded from above, as that of
softmax, or its result is in a bounded function, as that of a sigmoid, nothing grows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sympy import Symbol

from fp8pass.error_analysis.expressions import Expressions
from fp8pass.error_analysis.samples import Samples

# Inputs are made so many times as large; products of up to four of them grow by no more than this.
FACTOR = 8.0
GROWTH = FACTOR**4


def grows(expressions: Expressions, samples: Samples, outputs: Sequence[Symbol]) -> bool:
    """Whether results of a region grow exponentially with its inputs."""
    if not expressions.exponentials:
        return False
    inexact = set(expressions.values)
    inputs = {s: x[:1] * (FACTOR if s in inexact else 1) for s, x in samples.inputs.items()}
    values = samples.run(inputs)
    for symbol in outputs:
        now, then = (x[:1].abs().amax() for x in (samples.values[symbol], values[symbol]))
        if bool(torch.isnan(then)) or bool(then > GROWTH * now):
            return True
    return False
