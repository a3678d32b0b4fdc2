"""Compute the gradient factors of a region as numbers, element by element.

An output of the backward is linear in the gradients g that enter the region. Over the elements that
a statistic reduces, the output's Jacobian is a diagonal plus a few rank-one terms,

    J = diag(a) + Σ_s u_s w_sᵀ        (one term for each statistic s of g)

where the *gradient factors* a, u_s and w_s are functions of forward values. The operators of the
backward compute an output's factors if they run on factors instead of gradients.

Each forward statistic is *cut*: it becomes an input with one value for each row. All other
operators are element-wise, so one pass of autograd gives the derivatives of a factor.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from sympy import Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Definition, Expressions, Pointwise, Statistic
from fp8pass.error_analysis.samples import evaluate
from fp8pass.graph.symbols import Underivable

# A forward statistic's symbol, or (gradient, statistic, statistic) for a mean over factors.
Key: TypeAlias = Hashable

# Factors of a symbol's Jacobian by one gradient: the gradient maps to a, each statistic s to u_s.
Response = dict[Symbol, Tensor]

# The largest cost of a derivation, in passes of autograd through one operator. A derivation of
# this cost takes about 0.2 seconds.
LARGEST_COST = 30_000
EVALUATION = 8  # the cost of setting up one operator, in the same unit

T = TypeVar("T")


@dataclass(frozen=True)
class Jacobian(Generic[T]):
    """diag(diagonal) + Σ column rowᵀ over `pairs`. `order` is the order of the diagonal's norm."""

    diagonal: T | None
    pairs: Collection[tuple[T, T]] = ()
    order: float = torch.inf

    def list_factors(self) -> list[T]:
        diagonal = [] if self.diagonal is None else [self.diagonal]
        return diagonal + [factor for pair in self.pairs for factor in pair]


class Factors:
    """The forward values and the gradient factors of a region.

    Args:
        expressions: the region in symbols.
        inputs: values of the region's constants and forward inputs, all of one shape.
        stored: symbols that the backward reads instead of recomputing them, with their values.
        statistics: the values of all statistics; by default they are computed from `inputs`.

    Attributes:
        values: the forward values by symbol, with autograd's graph.
        cut: the statistics that became inputs, expanded to the shape of the inputs.
        contributions: the term that each element adds to a statistic.
        responses: `responses[g][x]` is the response of the symbol x to the entering gradient g.
        rows: `rows[g][s]` is w_s, for the entering gradient g and the statistic s.
    """

    def __init__(
        self,
        expressions: Expressions,
        inputs: Mapping[Symbol, Tensor],
        stored: Mapping[Symbol, Tensor] | None = None,
        statistics: Mapping[Key, Tensor] | None = None,
    ) -> None:
        self.expressions = expressions
        self.shape = next(iter(inputs.values())).shape if inputs else torch.Size([1])
        self.values: dict[Symbol, Tensor] = {}
        self.cut: dict[Key, Tensor] = {}
        self.contributions: dict[Key, Tensor] = {}
        self.responses: dict[Symbol, dict[Symbol, Response]] = {}
        self.rows: dict[Symbol, dict[Symbol, Tensor]] = {}
        self._stored, self._statistics = stored or {}, statistics
        for symbol in (*expressions.constants, *expressions.values):
            if symbol in inputs:
                self.values[symbol] = _leaf(inputs[symbol], symbol in expressions.values)
        forward, backward = split_at_gradients(expressions)
        for definition in forward:
            self.values[definition.symbol] = self._compute(definition)
        for gradient in expressions.gradients:
            self._respond_to(gradient, backward)

    def jacobians(self, output: Symbol) -> list[Jacobian[Tensor]]:
        """Return the Jacobian of an output for each gradient that the output depends on.

        A forward value that a GEMM multiplies with a gradient is its own factor, in the 2-norm.
        """
        if output in self.values:
            return [Jacobian(self.values[output], order=2)]
        found = []
        for gradient, responses in self.responses.items():
            if response := responses.get(output):
                rows = self.rows[gradient]
                pairs = [(u, rows[s]) for s, u in response.items() if s != gradient]
                found.append(Jacobian(response.get(gradient), pairs))
        return found

    # --- forward --------------------------------------------------------------------------------

    def _compute(self, definition: Definition) -> Tensor:
        symbol = definition.symbol
        if symbol in self._stored:
            return _leaf(self._stored[symbol])
        if isinstance(definition, Pointwise):
            return evaluate(definition.value, self.values).expand(self.shape)
        # The derivative of a variance by its mean is zero, because deviations sum to zero.
        operands = {s: self.values[s] for s in definition.value.free_symbols}
        operands |= {s: x.detach() for s, x in operands.items() if s != definition.operand}
        each = float(definition.weight) * evaluate(definition.value, operands)
        return self._cut(symbol, each, definition.over_rows)

    def _cut(self, key: Key, each: Tensor, over_rows: bool = False) -> Tensor:
        """Replace a statistic by an input. If its value is not given, estimate it from `each`."""
        each = each.expand(self.shape)
        if self._statistics is None:
            mean = each.detach().mean(-2 if over_rows else -1, keepdim=True)
            value = mean * self.expressions.length
        else:
            value = self._statistics[key]
        self.cut[key], self.contributions[key] = _leaf(value.expand(self.shape)), each
        return self.cut[key]

    # --- backward -------------------------------------------------------------------------------

    def _respond_to(self, gradient: Symbol, definitions: Iterable[Definition]) -> None:
        one = torch.ones(self.shape, dtype=torch.float64)
        found = self.responses[gradient] = {gradient: {gradient: one}}
        rows = self.rows[gradient] = {}
        for definition in definitions:
            symbols = sorted(definition.value.free_symbols, key=str)  # a fixed order of sums
            operands = {s: found[s] for s in symbols if s in found}
            if not operands:
                continue
            columns = dict.fromkeys(t for response in operands.values() for t in response)
            response = {
                t: self._run(definition, {s: r[t] for s, r in operands.items() if t in r})
                for t in columns
            }
            if isinstance(definition, Statistic):
                rows[definition.symbol] = self._row(definition, response, gradient)
                response = {definition.symbol: one}
            found[definition.symbol] = response

    def _run(self, definition: Definition, factors: Mapping[Symbol, Tensor]) -> Tensor:
        """Run a definition on factors instead of gradients; missing factors are zero."""
        operands = definition.value.free_symbols
        known = {s: self.values[s] for s in operands if s in self.values}
        zero = torch.zeros((), dtype=torch.float64)
        dependent = {s: factors.get(s, zero) for s in operands if s not in known}
        result = evaluate(definition.value, known | dependent)
        with torch.no_grad():
            twice = evaluate(definition.value, known | {s: -2 * f for s, f in dependent.items()})
        if not torch.allclose(twice, -2 * result.detach(), equal_nan=True):
            finite = bool(result.isfinite().all())
            problem = "is not linear in the gradient" if finite else "overflows on random samples"
            raise Underivable(f"{definition.symbol} {problem}")
        return result.expand(self.shape)

    def _row(self, statistic: Statistic, response: Response, gradient: Symbol) -> Tensor:
        """Return w of a statistic of gradients."""
        weight = float(statistic.weight)
        local = response.get(gradient)
        total = torch.zeros(self.shape, dtype=torch.float64) if local is None else weight * local
        for column, slope in response.items():
            if column == gradient:
                continue
            each = slope / self.expressions.length
            key = gradient, statistic.symbol, column
            mean = self._cut(key, each) if each.requires_grad else slope.mean(-1, True)
            total = total + weight * statistic.length * mean * self.rows[gradient][column]
        return total


def split_at_gradients(expressions: Expressions) -> tuple[list[Definition], list[Definition]]:
    dependent = set(expressions.gradients)
    forward, backward = list[Definition](), list[Definition]()
    for definition in expressions.definitions:
        if dependent.isdisjoint(definition.value.free_symbols):
            forward.append(definition)
        else:
            backward.append(definition)
            dependent.add(definition.symbol)
    return forward, backward


def _leaf(x: Tensor, differentiable: bool = True) -> Tensor:
    return x.detach().clone().requires_grad_(differentiable)


def check_cost(expressions: Expressions, outputs: Iterable[Symbol]) -> None:
    """Raise Underivable for a long chain of normalizations, such as Sinkhorn's iterations.

    The cost is counted, not measured, so that plans do not depend on the machine's load.
    """
    forward, backward = split_at_gradients(expressions)
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
        passes += sum(1 + 2 * len(terms[o]) for o in outputs if o in terms)
    operators = len(expressions.definitions)
    if EVALUATION * evaluations + passes * operators > LARGEST_COST:
        reductions = sum(isinstance(d, Statistic) for d in expressions.definitions)
        raise Underivable(
            f"finding an error rule would take too long: {operators} operators, including "
            f"{reductions} reductions, without a GEMM between them"
        )
