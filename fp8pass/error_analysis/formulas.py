"""Bounds of small regions as formulas, for people to read (AGoQ 4.1, 8.1).

What `amplification.py` computes in numbers, in symbols: the Jacobian of a region's output,

    J = diag(a) + Σ_s u_s w_sᵀ        (one term for each statistic s of a gradient)

perturbed to first order. Both J and its perturbation come from the same chain rule, `respond`.
Formulas grow with every operator that they go through, numbers do not: no decision waits for these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy
from sympy import Expr, Symbol

from fp8pass.error_analysis.expressions import Expressions, Pointwise, Statistic

ZERO = sympy.Integer(0)


class Mean(sympy.Function):
    """`Mean(e, n)`: the mean of an element-wise expression over the n elements of a statistic."""

    nargs = 2
    is_real = True


class Norm(sympy.Function):
    """`Norm(e, p)`: the p-norm of an element-wise expression over the elements of a statistic."""

    nargs = 2
    is_real = True
    is_nonnegative = True


@dataclass
class Response:
    """The derivative of a symbol: by the same element of the source, and by whole statistics.

    Attributes:
        local: the element-wise part.
        through: the slope by each statistic that changes.
    """

    local: Expr = ZERO
    through: dict[Expr, Expr] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.local != 0 or bool(self.through)

    def add(self, other: Response, factor: Expr) -> None:
        """Add `factor` times another response."""
        self.local += factor * other.local
        for statistic, slope in other.through.items():
            self.through[statistic] = self.through.get(statistic, ZERO) + factor * slope


@dataclass
class Responses:
    """The responses of all symbols of a region to one source.

    Attributes:
        of: the response of each symbol that changes.
        covectors: the derivative of each statistic by the source's elements.
    """

    of: dict[Symbol, Response] = field(default_factory=dict)
    covectors: dict[Expr, Expr] = field(default_factory=dict)

    def to(self, expression: Expr) -> Response:
        """The response of an expression of symbols and of means over expressions."""
        means = {sympy.Dummy(f"mean_{i}"): m for i, m in enumerate(_outermost_means(expression))}
        flat = expression.xreplace({m: dummy for dummy, m in means.items()})
        total = Response()
        for symbol in sorted(flat.free_symbols, key=str):
            response = self._of_mean(means[symbol]) if symbol in means else self.of.get(symbol)
            if response:
                total.add(response, derivative(flat, symbol).xreplace(means))
        return total

    def _of_mean(self, whole: Mean) -> Response:
        inner, length = whole.args
        response = self.to(inner)
        covector = response.local / length
        for statistic, slope in response.through.items():
            covector += mean(slope, length) * self.covectors[statistic]
        if covector == 0:
            return Response()
        self.covectors[whole] = covector
        return Response(ZERO, {whole: sympy.Integer(1)})


def _outermost_means(expression: Expr) -> list[Mean]:
    if isinstance(expression, Mean):
        return [expression]
    found = [m for argument in expression.args for m in _outermost_means(argument)]
    return sorted(set(found), key=str)


def derivative(expression: Expr, symbol: Symbol) -> Expr:
    """∂expression/∂symbol."""
    return sympy.diff(expression, symbol)


def respond(
    expressions: Expressions, source: Symbol, seed: Expr, kept: frozenset[Symbol]
) -> Responses:
    """The chain rule: the response of every symbol to a change `seed` of `source`.

    Symbols in `kept` are stored, so that they respond to nothing but their own perturbation.
    """
    found = Responses({source: Response(seed)})
    for definition in expressions.definitions:
        symbol = definition.symbol
        if symbol in kept or symbol == source:
            continue
        if isinstance(definition, Pointwise):
            response = _respond_pointwise(definition, found)
        else:
            response = _respond_statistic(definition, found)
        if response:
            found.of[symbol] = response
    return found


def _respond_pointwise(definition: Pointwise, found: Responses) -> Response:
    total = Response()
    value = definition.value
    for symbol in sorted(value.free_symbols, key=str):
        response = found.of.get(symbol)
        if response:
            slope = derivative(value, symbol)
            if _reappears_in_its_derivative(value):
                slope = slope.subs(value, definition.symbol)
            total.add(response, slope)
    return total


def _reappears_in_its_derivative(value: Expr) -> bool:
    """Whether the derivative can be computed from the result, as a backward does that caches it.

    exp' = exp, s' = s (1 - s), (a^-½)' = -½ (a^-½)³.
    """
    if isinstance(value, sympy.Pow):
        return bool(value.exp.is_negative) or not value.exp.is_integer
    return isinstance(value, sympy.Function)


def _respond_statistic(definition: Statistic, found: Responses) -> Response:
    response = found.of.get(definition.operand)
    if not response:
        return Response()
    covector = definition.weight * definition.slope * response.local
    for statistic, slope in response.through.items():
        share = definition.weight * definition.length
        share *= mean(definition.slope * slope, definition.length)
        covector += share * found.covectors[statistic]
    if covector == 0:
        return Response()
    found.covectors[definition.symbol] = covector
    return Response(ZERO, {definition.symbol: sympy.Integer(1)})


def mean(expression: Expr, length: int) -> Expr:
    """The mean of an expression; a number is its own mean."""
    return expression if expression.is_number else Mean(expression, length)


@dataclass(frozen=True)
class GradientFactors:
    """The gradient factors of one output: J = diag(diagonal) + Σ columns[s] rows[s]ᵀ.

    `order` is the norm that `diagonal` is measured in. The diagonal of a Jacobian counts by its
    largest element. A forward value that a weight gradient uses is its own factor, in the 2-norm.
    """

    diagonal: Expr
    columns: tuple[Expr, ...] = ()
    rows: tuple[Expr, ...] = ()
    order: Expr | int = sympy.oo


def gradient_factors(expressions: Expressions, output: Symbol) -> list[GradientFactors]:
    """The factors of a backward output, for each gradient that enters the region."""
    found = []
    for gradient in expressions.gradients:
        responses = respond(expressions, gradient, sympy.Integer(1), frozenset())
        response = responses.of.get(output)
        if response:
            statistics = list(response.through)
            columns = tuple(response.through[s] for s in statistics)
            rows = tuple(responses.covectors[s] for s in statistics)
            found.append(GradientFactors(response.local, columns, rows))
    return found


def bound(factors: GradientFactors, responses: Responses, calculus: Norms) -> Expr:
    """‖ΔJ‖₂ per unit of ‖δ‖_∞ of the source of `responses`."""
    total = calculus.perturbation(factors.diagonal, responses, factors.order)
    for column, row in zip(factors.columns, factors.rows, strict=True):
        total += calculus.perturbation(column, responses, 2) * calculus.norm(row, 2)
        total += calculus.norm(column, 2) * calculus.perturbation(row, responses, 2)
    return total


@dataclass
class Norms:
    """Norms over elements, with common factors taken out.

    Statistics and numbers are taken out as they are, constants by their largest element.
    """

    expressions: Expressions
    _known: dict[tuple[Expr, Expr | int], Expr] = field(default_factory=dict)

    def perturbation(self, factor: Expr, responses: Responses, order: Expr | int) -> Expr:
        """The `order`-norm of Δfactor per unit of ‖δ‖_∞: AGoQ's Eq. 8 and Eq. 12."""
        response = responses.to(factor)
        total = self.norm(response.local, order)
        for statistic, slope in response.through.items():
            total += self.norm(slope, order) * self.norm(responses.covectors[statistic], 1)
        return total

    def norm(self, expression: Expr, order: Expr | int) -> Expr:
        """‖expression‖ of order 1, 2 or ∞."""
        key = expression, order
        if key not in self._known:
            self._known[key] = self._norm(expression, order)
        return self._known[key]

    def _norm(self, expression: Expr, order: Expr | int) -> Expr:
        expression = self.expressions.expanded(expression)
        if expression == 0:
            return ZERO
        if expression.is_Add:
            expression = sympy.factor_terms(expression)
        outside, inside = sympy.Integer(1), sympy.Integer(1)
        for factor in sympy.Mul.make_args(expression):
            symbols = factor.free_symbols
            if factor.func is Mean or symbols <= self.expressions.statistics:
                outside *= sympy.Abs(factor)
            elif symbols <= self.expressions.constants:
                outside *= Norm(factor, sympy.oo)
            else:
                inside *= factor
        return outside * self._of_elements(inside, order)

    def _of_elements(self, inside: Expr, order: Expr | int) -> Expr:
        length = self.expressions.length
        if inside == 1:
            return sympy.Integer(1) if order == sympy.oo else length ** sympy.Rational(1, order)
        if order == 1 and inside.is_Pow and inside.exp == 2:
            return Norm(inside.base, 2) ** 2
        return Norm(inside, order)


class Formulas:
    """The bounds of one region.

    Attributes:
        expressions: the region in symbols.
        factors: the gradient factors of each output; a forward value is its own factor.
    """

    def __init__(self, expressions: Expressions, outputs: Iterable[Symbol]) -> None:
        self.expressions = expressions
        self._norms = Norms(expressions)
        self.factors = {output: self._factors(output) for output in outputs}

    def _factors(self, output: Symbol) -> list[GradientFactors]:
        found = gradient_factors(self.expressions, output)
        return found or [GradientFactors(output, order=sympy.Integer(2))]

    def bounds(self, source: Symbol, kept: frozenset[Symbol]) -> dict[Symbol, Expr]:
        """‖Δ‖ of each output's factors per unit relative perturbation of `source`.

        Symbols in `kept` are stored: the backward reads them and does not recompute them.
        """
        responses = respond(self.expressions, source, source, kept)
        return {
            output: sum((bound(f, responses, self._norms) for f in factors), ZERO)
            for output, factors in self.factors.items()
        }
