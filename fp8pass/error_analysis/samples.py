"""Compute the values of a region on random samples, or on real data.

Inputs and gradients are normally distributed. Inputs have several scales. Constants (parameters,
buffers, data) have several values, because training changes them: `tanh(w * x)` is steep near zero
for a large w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Definition, Expressions, Pointwise
from fp8pass.graph.symbols import TORCH_FUNCTIONS, Underivable

ON_CPU: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
HUGE = 1e6  # all samples except masks (`ranges.py`) are smaller
SCALES = (1.0, 0.5, 2.0)  # factors of the random inputs
CONSTANTS = (64.0, 1 / 64)  # further values of constants, each with inputs at the first scale
ROWS, SMALLEST_WIDTH, LARGEST_WIDTH = 4, 128, 1024  # the shape of the samples at one scale


@dataclass(frozen=True)
class Moments:
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def rounded(cls, mean: float, std: float) -> Moments:
        """Round the numbers, so that similar layers share one rule.

        `std` changes by up to a fifth. `mean` becomes a multiple of half the rounded `std`.
        """
        if not (math.isfinite(mean) and math.isfinite(std)) or std <= 0:
            return UNIT_VARIANCE
        near = 2 ** (round(2 * math.log2(std)) / 2)
        return cls(round(2 * mean / near) * near / 2, near)


UNIT_VARIANCE = Moments()


class Samples:
    """Sampled values of shape [scales and constants, rows, width].

    A statistic has width 1, or one row if it reduces columns (`over_rows`).

    Attributes:
        inputs: the values of constants, forward inputs and gradients.
        values: the values of all symbols.
    """

    def __init__(self, expressions: Expressions, moments: Mapping[Symbol, Moments]) -> None:
        self.expressions = expressions
        self.width = min(max(expressions.length, SMALLEST_WIDTH), LARGEST_WIDTH)
        self._random = torch.Generator().manual_seed(0)
        size = len(SCALES) + len(CONSTANTS), ROWS, self.width
        constants = sorted(expressions.constants, key=str)
        self.inputs = {s: self._draw_constant(s).expand(size) for s in constants}
        scales = torch.tensor((*SCALES, *(SCALES[0] for _ in CONSTANTS)), **ON_CPU)[:, None, None]
        for symbol in expressions.values:
            given = moments.get(symbol, UNIT_VARIANCE)
            x = scales * (given.mean + given.std * self._draw())
            self.inputs[symbol] = -x.abs() if symbol in expressions.nonpositive else x
        for symbol in expressions.gradients:
            self.inputs[symbol] = self._draw().expand(size)
        self.values = self.run()

    def _draw(self) -> Tensor:
        return torch.randn(ROWS, self.width, generator=self._random, **ON_CPU)

    def _draw_constant(self, symbol: Symbol) -> Tensor:
        if symbol in self.expressions.masks:
            return (self._draw() > 0).to(torch.float64)
        number = self.expressions.numbers.get(symbol)
        if number is not None:
            return torch.tensor(number if abs(number) < HUGE else 1.0, **ON_CPU)
        sign = -1.0 if symbol in self.expressions.nonpositive else 1.0
        sizes = torch.tensor((*(1.0 for _ in SCALES), *CONSTANTS), **ON_CPU)
        return sign * sizes[:, None, None]

    def use(self, data: Mapping[Symbol, Tensor]) -> None:
        """Replace each input by rows of its real tensor. All inputs use the same rows."""
        constants = self.expressions.constants
        length = self.expressions.length if self.expressions.length > 1 else LARGEST_WIDTH
        counts = {x.numel() for s, x in data.items() if s not in constants}
        if len(counts) != 1 or (count := counts.pop()) % length or count < length:
            return  # the inputs broadcast against each other, so their rows would not match
        self.width = length
        rows = min(count // length, LARGEST_WIDTH)
        chosen = torch.linspace(0, count // length - 1, rows, device="cpu").long()
        for symbol in self.inputs:
            x = data.get(symbol, torch.ones(()))
            if symbol in constants:
                x = x.reshape(-1) if x.numel() in (1, length) else x.double().mean()
            elif symbol in data:
                x = x.reshape(-1, length)[chosen.to(x.device)]
            self.inputs[symbol] = x.to(**ON_CPU).broadcast_to(1, rows, length)
        self.values = self.run()

    def run(
        self,
        inputs: Mapping[Symbol, Tensor] | None = None,
        perturbed: Mapping[Symbol, Tensor] | None = None,
        stored: Collection[Symbol] = (),
    ) -> dict[Symbol, Tensor]:
        """Compute all symbols, and multiply each symbol by its factor in `perturbed`.

        The symbols in `stored` are not computed, but read from the attribute `values`.
        """
        inputs, perturbed = self.inputs if inputs is None else inputs, perturbed or {}
        values = {s: x * perturbed[s] if s in perturbed else x for s, x in inputs.items()}
        for definition in self.expressions.definitions:
            symbol = definition.symbol
            if symbol in inputs:
                continue
            result = self.values[symbol] if symbol in stored else _compute(definition, values)
            values[symbol] = result * perturbed[symbol] if symbol in perturbed else result
        return values

    def errors(
        self, noise: Mapping[Symbol, float], stored: Collection[Symbol]
    ) -> dict[Symbol, float]:
        """Return the relative RMS change of each symbol if symbols are rounded.

        `noise` maps the symbols that are rounded to their relative RMS errors.
        """
        perturbed = {s: rounding(self.values[s], size) for s, size in noise.items()}
        changed = self.run(None, perturbed, stored)
        return {s: relative_change(x, changed[s]) for s, x in self.values.items()}


def _compute(definition: Definition, values: Mapping[Symbol, Tensor]) -> Tensor:
    """Compute a symbol. Statistics are estimates, because samples may have fewer elements."""
    result = evaluate(definition.value, values)
    if isinstance(definition, Pointwise):
        return result
    dim = -2 if definition.over_rows else -1
    return float(definition.weight) * definition.length * result.mean(dim=dim, keepdim=True)


def evaluate(expression: Expr, values: Mapping[Symbol, Tensor]) -> Tensor:
    """Evaluate a symbolic expression, with tensors as the values of its symbols."""
    operands = sorted(expression.free_symbols, key=str)
    numbered = {s: Symbol(f"x{i}", **s.assumptions0) for i, s in enumerate(operands)}
    function = _compile(expression.xreplace(numbered), tuple(numbered.values()))
    try:
        return torch.as_tensor(function(*(values[s] for s in operands)), **ON_CPU)
    except OverflowError as error:
        raise Underivable(f"a constant of its formula is too large ({error})") from error


@lru_cache(maxsize=4096)
def _compile(expression: Expr, operands: tuple[Symbol, ...]) -> Callable[..., Any]:
    return sympy.lambdify(operands, expression, modules=[_FUNCTIONS])


def _with_tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Convert numbers to tensors, because sympy may emit calls such as `UnitStep(0)`."""
    return lambda *args: function(*(torch.as_tensor(x, **ON_CPU) for x in args))


_FUNCTIONS = {n: _with_tensors(f) if callable(f) else f for n, f in TORCH_FUNCTIONS.items()}


def rounding(x: Tensor, relative_error: float) -> Tensor:
    """Return factors that round `x` with a relative RMS error of `relative_error`.

    Equal values have equal errors, as in a format, so errors of equal rows add up in a sum over
    tokens. The rounded numbers have equally spaced logarithms, without a largest or smallest
    number.
    """
    step = relative_error * math.sqrt(12)
    position = x.double().abs().clamp_min(torch.finfo(torch.float64).tiny).log() / step
    return 1 + step * (position.round() - position)


def relative_change(before: Tensor, after: Tensor) -> float:
    """Return ‖after - before‖₂ / ‖before‖₂; 0 if `before` is zero."""
    before, after = before.double(), after.double()
    change, size = (after - before).square().mean().sqrt(), before.square().mean().sqrt()
    return float(change / size) if size > 0 else 0.0
