"""Summarize the error rules of a graph for `fp8pass.explain`, with bounds as formulas.

A formula states the bound that `amplification.py` computes as a number. Formulas grow exponentially
with the number of operators, so no decision depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import sympy
from sympy import Expr, Symbol

from fp8pass import compat, graph
from fp8pass.error_analysis.derivation import Derivation, InputFacts
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.expressions import Expressions, Pointwise
from fp8pass.error_analysis.factors import Jacobian
from fp8pass.error_analysis.regions import Region
from fp8pass.graph.names import short_operator_name
from fp8pass.graph.symbols import Underivable
from fp8pass.plan import RuleSummary

# Larger regions have no formula. A normalization has about 10 operators.
LARGEST_FORMULA = 40

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)

Coefficients = dict[Expr, Expr]


class Mean(sympy.Function):
    """`Mean(e, n)`: the mean of an element-wise expression over the n elements of a statistic."""

    nargs = 2
    is_real = True


class Norm(sympy.Function):
    """`Norm(e, p)`: the p-norm of an element-wise expression over the elements of a statistic."""

    nargs = 2
    is_real = True
    is_nonnegative = True


class ChainRule:
    """The total derivatives of a region's symbols if `source` changes by `seed`.

    The backward reads the symbols in `stored`, so they do not change.

    Attributes:
        coefficients: the total derivative of each symbol that depends on the source.
        rows: the derivative of each statistic by the elements of the source.
    """

    def __init__(
        self,
        expressions: Expressions,
        source: Symbol,
        seed: Expr,
        stored: frozenset[Symbol] = frozenset(),
    ) -> None:
        self.source = source
        self.coefficients: dict[Symbol, Coefficients] = {source: {source: seed}}
        self.rows: dict[Expr, Expr] = {}
        for definition in expressions.definitions:
            symbol = definition.symbol
            if symbol in stored or symbol == source:
                continue
            if isinstance(definition, Pointwise):
                found = self.differentiate(definition.value, symbol)
            else:
                operand = self.coefficients.get(definition.operand, {})
                slope = sympy.diff(definition.value, definition.operand)
                length = definition.length
                found = self._reduce(symbol, operand, length, slope, definition.weight * length)
            if found:
                self.coefficients[symbol] = found

    def differentiate(self, expression: Expr, result: Symbol | None = None) -> Coefficients:
        """Return the total derivative of an expression.

        Some functions reappear in their derivative, such as exp' = exp. The symbol `result` then
        replaces `expression` in the derivative.
        """
        found = sorted(expression.atoms(Mean), key=str)
        means = {sympy.Dummy(f"mean_{i}"): mean for i, mean in enumerate(found)}
        flat = expression.xreplace({m: dummy for dummy, m in means.items()})
        total: Coefficients = {}
        for symbol in sorted(flat.free_symbols, key=str):
            inner = self.coefficients.get(symbol, {})
            if mean := means.get(symbol):
                operand, length = mean.args
                inner = self._reduce(mean, self.differentiate(operand), length)
            if not inner:
                continue
            slope = sympy.diff(flat, symbol).xreplace(means)
            if result is not None and _reappears_in_its_derivative(expression):
                slope = slope.subs(expression, result)
            for differential, coefficient in inner.items():
                total[differential] = total.get(differential, ZERO) + slope * coefficient
        return {differential: c for differential, c in total.items() if c != 0}

    def _reduce(
        self,
        statistic: Expr,
        operand: Coefficients,
        length: Expr,
        slope: Expr = ONE,
        scale: Expr = ONE,
    ) -> Coefficients:
        """Return the derivative of `scale * mean(f(x))`, where `slope` is f's derivative."""
        row = ZERO
        for differential, coefficient in operand.items():
            if differential == self.source:
                row += scale / length * slope * coefficient
            else:
                row += scale * _mean(slope * coefficient, length) * self.rows[differential]
        if row == 0:
            return {}
        self.rows[statistic] = row
        return {statistic: ONE}


def _reappears_in_its_derivative(value: Expr) -> bool:
    """Whether the derivative of `value` contains `value`, which a backward may read.

    Examples: exp' = exp, s' = s (1 - s), (a^-½)' = -½ (a^-½)³.
    """
    if isinstance(value, sympy.Pow):
        return bool(value.exp.is_negative) or not value.exp.is_integer
    return isinstance(value, sympy.Function)


def _mean(expression: Expr, length: Expr) -> Expr:
    return expression if expression.is_number else Mean(expression, length)


class Formulas:
    """The bounds of one region, as formulas. An output of the forward is its own factor."""

    def __init__(self, expressions: Expressions, outputs: Iterable[Symbol]) -> None:
        self.expressions = expressions
        self._norm = cache(self._compute_norm)
        chains = [ChainRule(expressions, gradient, ONE) for gradient in expressions.gradients]
        self.factors = {output: _list_jacobians(output, chains) for output in outputs}

    def bounds(self, source: Symbol, stored: frozenset[Symbol]) -> dict[Symbol, Expr]:
        """Bound the change of each output's factors for a relative error of 1 in `source`."""
        chain = ChainRule(self.expressions, source, source, stored)
        return {
            output: sum((self._bound(j, chain) for j in jacobians), ZERO)
            for output, jacobians in self.factors.items()
        }

    def _bound(self, jacobian: Jacobian[Expr], chain: ChainRule) -> Expr:
        total = self._perturbation(jacobian.diagonal, chain, jacobian.order)
        for column, row in jacobian.pairs:
            total += self._perturbation(column, chain, 2) * self._norm(row, 2)
            total += self._norm(column, 2) * self._perturbation(row, chain, 2)
        return total

    def _perturbation(self, factor: Expr, chain: ChainRule, order: float) -> Expr:
        """Return the `order`-norm of Δfactor per unit of ‖δ‖_∞ (Eq. 8 and 12 of the AGoQ paper)."""
        total = ZERO
        for differential, coefficient in chain.differentiate(factor).items():
            through = differential != chain.source
            size = self._norm(chain.rows[differential], 1) if through else ONE
            total += self._norm(coefficient, order) * size
        return total

    def _compute_norm(self, expression: Expr, order: float) -> Expr:
        expression = self.expressions.expand(expression)
        if expression.is_Add:
            expression = sympy.factor_terms(expression)
        outside, inside = ONE, ONE
        for factor in sympy.Mul.make_args(expression):
            symbols = factor.free_symbols
            if factor.func is Mean or symbols <= self.expressions.statistics:
                outside *= sympy.Abs(factor)
            elif symbols <= self.expressions.constants:
                outside *= Norm(factor, sympy.oo)
            else:
                inside *= factor
        if inside == 1:
            return outside * self.expressions.length ** sympy.Rational(1 / order)
        if order == 1 and inside.is_Pow and inside.exp == 2:
            return outside * Norm(inside.base, 2) ** 2
        return outside * Norm(inside, order)


def _list_jacobians(output: Symbol, chains: Iterable[ChainRule]) -> list[Jacobian[Expr]]:
    found = []
    for chain in chains:
        if coefficients := chain.coefficients.get(output):
            pairs = [(c, chain.rows[s]) for s, c in coefficients.items() if s != chain.source]
            found.append(Jacobian(coefficients.get(chain.source, ZERO), pairs))
    return found or [Jacobian(output, order=2)]


def summarize_rules(rules: Rules) -> list[RuleSummary]:
    known: dict[object, tuple[Region, RuleSummary]] = {}  # the first of equal regions
    summaries = []
    with compat.real_tensors():
        for region in rules.regions:
            if not region.backward or not region.values:
                continue
            facts = rules.input_facts(region)
            key = facts.key(region)
            if key not in known:
                known[key] = region, _summarize(region, facts, rules.reason_of(region))
            summaries.append(_rename(*known[key], region))
    return summaries


def _rename(equal: Region, summary: RuleSummary, region: Region) -> RuleSummary:
    pairs = zip((*equal.inputs, *equal.nodes), (*region.inputs, *region.nodes), strict=True)
    names = {a.name: b.name for a, b in pairs}
    bound = re.sub(r"%(\w+)", lambda found: "%" + names.get(found[1], found[1]), summary.bound)
    forward = [n for n in region.nodes if n not in region.backward]
    return replace(
        summary,
        module=graph.module_path(graph.skip_views_and_casts((forward or region.nodes)[0])),
        inputs=tuple(f"{n.name} ({short_operator_name(n)})" for n in region.values),
        operators=tuple(dict.fromkeys(map(short_operator_name, forward))),
        bound=bound,
    )


def _summarize(region: Region, facts: InputFacts, reason: str) -> RuleSummary:
    nothing = RuleSummary("", (), (), 0.0, 0.0, "", reason)
    if reason:
        return nothing
    try:
        derivation = Derivation(region, facts)
        one, two = derivation.cases()
    except Underivable as error:
        return replace(nothing, reason=str(error))
    if not one:
        return replace(nothing, reason="no gradient leaves this part of the graph")
    worst = max(one, key=lambda s: one[s])
    bound = _write_bound(derivation, worst)
    return replace(nothing, case_1=one[worst], case_2=max(two.values()), bound=bound)


def _write_bound(derivation: Derivation, output: Symbol) -> str:
    """Write the bound of an output in Case 1; '' if it would be too long to read."""
    expressions = derivation.expressions
    if len(expressions.definitions) > LARGEST_FORMULA:
        return ""
    formulas = Formulas(expressions, [output])
    inputs = frozenset(expressions.values)
    terms = [formulas.bounds(source, inputs)[output] for source in sorted(inputs, key=str)]
    return str(sum(terms, ZERO))
