"""Bounds and gradients of a region as numbers, for inputs with given moments.

The *bound* of a source is the formula of `perturbation.py`, relative to the norm of the perturbed
factors, evaluated on samples. The *expected* amplification is the effect of independent
perturbations on average: the region is run on the samples, forward and backward, with and without
them.
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

from fp8pass.graph.symbols import TORCH
from fp8pass.rules.expressions import Expressions, Pointwise
from fp8pass.rules.perturbation import Mean, Norm

# How expressions are evaluated. A mean is over the last dimension, which statistics reduce.
FUNCTIONS = {**TORCH, Mean.__name__: lambda x, _: x.mean(dim=-1, keepdim=True)}

ON_CPU: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever the default is
ROWS, SMALLEST_WIDTH, LARGEST_WIDTH = 8, 128, 1024  # shape of samples
PERTURBATION = 1e-4  # small enough to be linear, far above the rounding errors of fp64


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of an activation."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def rounded(cls, mean: float, std: float) -> Moments:
        """Moments rounded to within a fifth, so that similar layers share a rule."""
        if not (math.isfinite(mean) and math.isfinite(std)) or std <= 0:
            return UNIT_VARIANCE
        near = 2 ** (round(2 * math.log2(std)) / 2)
        return cls(round(2 * mean / near) * near / 2, near)


UNIT_VARIANCE = Moments()


class Samples:
    """Values of a region's symbols for random inputs.

    Inputs are normal with the given moments, gradients normal with unit variance, constants are
    one. There are `ROWS` rows; a statistic has one value for each.
    """

    def __init__(self, expressions: Expressions, moments: Mapping[Symbol, Moments]) -> None:
        self.expressions = expressions
        self.width = min(max(expressions.length, SMALLEST_WIDTH), LARGEST_WIDTH)
        self._random = torch.Generator().manual_seed(0)
        self._compiled = {d.symbol: _compile(d.value) for d in expressions.definitions}
        one = torch.ones(ROWS, self.width, **ON_CPU)
        self._inputs = dict.fromkeys(expressions.constants, one)
        for symbol in (*expressions.values, *expressions.gradients):
            given = moments.get(symbol, UNIT_VARIANCE)
            self._inputs[symbol] = given.mean + given.std * self.normal()
        self.values = self.run()
        self._norms: dict[Expr, Tensor] = {}

    def use(self, data: Mapping[Symbol, Tensor]) -> None:
        """Take the inputs from real tensors instead: the same rows of each, a subset."""
        length = self.expressions.length if self.expressions.length > 1 else LARGEST_WIDTH
        numbers = {x.numel() for s, x in data.items() if s not in self.expressions.constants}
        if len(numbers) != 1 or (count := numbers.pop()) % length or count < length:
            return  # the inputs broadcast against each other: their rows would not match
        self.width = length
        rows_there = count // length
        chosen = torch.linspace(
            0, rows_there - 1, min(rows_there, LARGEST_WIDTH), device="cpu"
        ).long()
        for symbol in self._inputs:
            given = data.get(symbol)
            if given is None or symbol not in self.expressions.constants:
                rows = None if given is None else given.reshape(-1, length)[chosen.to(given.device)]
            else:
                whole = given.numel() in (1, length)
                rows = given.reshape(-1) if whole else given.double().mean()
            x = torch.ones((), **ON_CPU) if rows is None else rows.to(**ON_CPU)
            self._inputs[symbol] = x.broadcast_to(len(chosen), length)
        self.values = self.run()

    def normal(self) -> Tensor:
        """Independent standard normal numbers."""
        size = ROWS, self.width
        return torch.randn(size, generator=self._random, **ON_CPU)

    def noise_like(self, x: Tensor) -> Tensor:
        """Independent standard normal numbers in the shape of `x`."""
        return torch.randn(x.shape, generator=self._random, **ON_CPU)

    def run(
        self,
        perturbed: Mapping[Symbol, Tensor] | None = None,
        stored: Collection[Symbol] = (),
    ) -> dict[Symbol, Tensor]:
        """The values of all symbols, those in `perturbed` multiplied by the factors given there.

        Symbols in `stored` are not recomputed from perturbed values.
        """
        perturbed = perturbed or {}
        values = {s: x * perturbed.get(s, 1.0) for s, x in self._inputs.items()}
        for definition in self.expressions.definitions:
            symbol = definition.symbol
            if symbol in self._inputs:
                continue
            if symbol in stored:
                values[symbol] = self.values[symbol] * perturbed.get(symbol, 1.0)
                continue
            function, operands = self._compiled[symbol]
            result = function(*(values[s] for s in operands))
            if not isinstance(definition, Pointwise):
                dim = 0 if definition.over_rows else -1
                total = result.mean(dim=dim, keepdim=True) * definition.length
                result = float(definition.weight) * total
            values[symbol] = result * perturbed.get(symbol, 1.0)
        return values

    def expected(self, source: Symbol, outputs: list[Symbol]) -> dict[Symbol, float]:
        """Relative RMS change of each output, per unit relative RMS perturbation of `source`."""
        like = self.values[source]
        changed = self.run({source: 1 + PERTURBATION * self.noise_like(like)})
        return {s: relative_change(self.values[s], changed[s]) / PERTURBATION for s in outputs}

    def errors(
        self, noise: Mapping[Symbol, float], stored: Collection[Symbol]
    ) -> dict[Symbol, float]:
        """Relative RMS change of every symbol, for relative rounding errors `noise`."""
        perturbed = {s: rounding(self.values[s], size) for s, size in noise.items()}
        changed = self.run(perturbed, stored)
        return {s: relative_change(x, changed[s]) for s, x in self.values.items()}

    def evaluate(self, bound: Expr) -> float:
        """The mean over rows of an expression of norms, means and statistics."""
        atoms = sorted(bound.atoms(Norm), key=str)
        numbers = {sympy.Dummy(f"norm_{i}"): atom for i, atom in enumerate(atoms)}
        values = {dummy: self._atom(atom) for dummy, atom in numbers.items()}
        reduced = bound.xreplace({atom: dummy for dummy, atom in numbers.items()})
        function, operands = _compile(reduced)
        result = function(*(values[s] if s in values else self.values[s] for s in operands))
        return float(torch.as_tensor(result, dtype=torch.float64).mean())

    def _atom(self, atom: Expr) -> Tensor:
        if atom not in self._norms:
            self._norms[atom] = self._norm(atom)
        return self._norms[atom]

    def _norm(self, atom: Expr) -> Tensor:
        function, operands = _compile(atom.args[0])
        x = torch.as_tensor(function(*(self.values[s] for s in operands)), dtype=torch.float64)
        x = x.broadcast_to(ROWS, self.width)
        length, order = self.expressions.length, atom.args[1]
        if order == 1:
            return x.abs().mean(dim=-1, keepdim=True) * length
        if order == 2:
            return (x.square().mean(dim=-1, keepdim=True) * length).sqrt()
        return x.abs().amax(dim=-1, keepdim=True)


def rounding(x: Tensor, relative_error: float) -> Tensor:
    """Factors that round `x` with a relative RMS error of `relative_error`, as a format would.

    The error is a function of the value, so that equal values have equal errors: in a sum over
    tokens the errors of repeated rows add up, where independent ones would average out. The grid is
    even in the logarithm: unlike a format it has no largest and no smallest number.
    """
    step = relative_error * math.sqrt(12)
    position = x.double().abs().clamp_min(torch.finfo(torch.float64).tiny).log() / step
    return 1 + step * (position.round() - position)


def relative_change(before: Tensor, after: Tensor) -> float:
    """‖after - before‖₂ / ‖before‖₂; 0 if `before` is."""
    before, after = before.double(), after.double()
    change, size = (after - before).square().mean().sqrt(), before.square().mean().sqrt()
    return float(change / size) if size > 0 else 0.0


@lru_cache(maxsize=4096)
def _compile(expression: Expr) -> tuple[Callable[..., Any], tuple[Symbol, ...]]:
    operands = tuple(sorted(expression.free_symbols, key=str))
    return sympy.lambdify(operands, expression, modules=[FUNCTIONS]), operands
