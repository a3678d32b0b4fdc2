"""The gradient factors of a region as numbers, element by element.

An output of the backward is linear in the gradients g that enter the region. Over the elements that
a statistic reduces, its Jacobian is diagonal plus a few rank-one terms,

    J = diag(a) + Σ_s u_s w_sᵀ        (one term for each statistic s of g)

where a, u_s and w_s are the *gradient factors*, functions of forward values. They follow from
running the backward's own operators on them: an operator that is linear in its operands maps
factors as it maps gradients.

Each statistic of forward values is *cut*: an input of its own, the same for all elements of a row.
All that is left is element-wise, so that one pass of autograd gives the derivatives of a factor by
every forward value and every statistic. The cost is linear in operators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from sympy import Symbol
from torch import Tensor

from fp8pass.error_analysis.expressions import Definition, Expressions, Pointwise, Statistic
from fp8pass.error_analysis.samples import evaluate
from fp8pass.graph.symbols import Underivable

# By what a statistic is known: the forward's by their symbol, means over factors by three.
Key: TypeAlias = Hashable

# How a statistic's value is found from what each element contributes to it; the last argument says
# that rows are added up instead of elements.
Reduce = Callable[[Key, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Reduction:
    """Reduces samples, which are a part of the `length` elements that statistics are of."""

    length: int

    def __call__(self, key: Key, each: Tensor, over_rows: bool) -> Tensor:
        """The statistic, in one number for each row."""
        return each.mean(-2 if over_rows else -1, keepdim=True) * self.length


@dataclass
class Response:
    """How a value responds to a gradient that enters the region: one row of its Jacobian.

    Attributes:
        local: a, the response to the same element; None for none.
        through: u_s by statistic s.
    """

    local: Tensor | None = None
    through: dict[Symbol, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.local is not None or bool(self.through)


class Factors:
    """The forward values and the gradient factors of a region.

    Args:
        expressions: the region in symbols.
        inputs: values of its constants and forward inputs, in one shape.
        reduce: the value of a statistic.
        kept: symbols that the backward reads and does not compute again, with their values.

    Attributes:
        values: the forward values by symbol, with autograd's graph.
        cut: statistics as inputs, in the shape of the inputs.
        contributions: what each element adds to these.
        responses: by the gradient that enters, then by symbol.
        rows: w_s, by the gradient that enters, then by statistic.

    Raises:
        Underivable: it is not linear in gradients.
    """

    def __init__(
        self,
        expressions: Expressions,
        inputs: Mapping[Symbol, Tensor],
        reduce: Reduce,
        kept: Mapping[Symbol, Tensor] | None = None,
    ) -> None:
        self.expressions = expressions
        self.shape = next(iter(inputs.values())).shape if inputs else torch.Size([1])
        self.values: dict[Symbol, Tensor] = {}
        self.cut: dict[Key, Tensor] = {}
        self.contributions: dict[Key, Tensor] = {}
        self.responses: dict[Symbol, dict[Symbol, Response]] = {}
        self.rows: dict[Symbol, dict[Symbol, Tensor]] = {}
        self._reduce, self._kept = reduce, kept or {}
        for symbol in (*expressions.constants, *expressions.values):
            if symbol in inputs:
                self.values[symbol] = _leaf(inputs[symbol], symbol in expressions.values)
        dependent = dependent_on_gradients(expressions)
        for definition in expressions.definitions:
            if definition.symbol not in dependent:
                self.values[definition.symbol] = self._forward(definition)
        backward = [d for d in expressions.definitions if d.symbol in dependent]
        for gradient in expressions.gradients:
            self._respond_to(gradient, backward)

    # --- the forward ----------------------------------------------------------------------------

    def _forward(self, definition: Definition) -> Tensor:
        symbol = definition.symbol
        if symbol in self._kept:
            return _leaf(self._kept[symbol])
        if isinstance(definition, Pointwise):
            return evaluate(definition.value, self.values).expand(self.shape)
        # A variance does not change with its mean, from which deviations sum to zero.
        operands = {s: self.values[s] for s in definition.value.free_symbols}
        operands |= {s: x.detach() for s, x in operands.items() if s != definition.operand}
        each = float(definition.weight) * evaluate(definition.value, operands)
        return self._statistic(symbol, each, definition.over_rows)

    def _statistic(self, key: Key, each: Tensor, over_rows: bool = False) -> Tensor:
        """A statistic as an input of its own."""
        each = each.expand(self.shape)
        leaf = _leaf(self._reduce(key, each.detach(), over_rows).expand(self.shape))
        self.cut[key], self.contributions[key] = leaf, each
        return leaf

    # --- the backward ---------------------------------------------------------------------------

    def _respond_to(self, gradient: Symbol, definitions: Iterable[Definition]) -> None:
        """The chain rule: the response of every symbol to one gradient that enters."""
        one = torch.ones(self.shape, dtype=torch.float64)
        found = self.responses[gradient] = {gradient: Response(one)}
        rows: dict[Symbol, Tensor] = {}
        self.rows[gradient] = rows
        for definition in definitions:
            responding = {s: found[s] for s in definition.value.free_symbols if s in found}
            if not responding:
                continue
            if isinstance(definition, Pointwise):
                response = self._map(definition, responding)
            else:
                rows[definition.symbol] = self._row(definition, responding, gradient)
                response = Response(None, {definition.symbol: one})
            found[definition.symbol] = response

    def _map(self, definition: Definition, operands: Mapping[Symbol, Response]) -> Response:
        """The response of a definition, by running it on those of its operands."""
        local = self._run(definition, {s: r.local for s, r in operands.items()})
        statistics = dict.fromkeys(t for r in operands.values() for t in r.through)
        through = {
            t: self._run(definition, {s: r.through.get(t) for s, r in operands.items()})
            for t in statistics
        }
        return Response(local, {t: u for t, u in through.items() if u is not None})

    def _run(
        self, definition: Definition, factors: Mapping[Symbol, Tensor | None]
    ) -> Tensor | None:
        """A definition on factors of its operands in place of gradients; None are zeros."""
        given = {s: f for s, f in factors.items() if f is not None}
        if not given:
            return None
        operands = definition.value.free_symbols
        known = {s: self.values[s] for s in operands if s in self.values}
        zero = torch.zeros((), dtype=torch.float64)
        dependent = {s: given.get(s, zero) for s in operands if s not in known}
        result = evaluate(definition.value, known | dependent)
        with torch.no_grad():
            twice = evaluate(definition.value, known | {s: -2 * f for s, f in dependent.items()})
        if not torch.allclose(twice, -2 * result.detach(), equal_nan=True):
            overflows = not bool(result.isfinite().all())
            problem = (
                "overflows on random samples" if overflows else "is not linear in the gradient"
            )
            raise Underivable(f"{definition.symbol} {problem}")
        return result.expand(self.shape)

    def _row(
        self, statistic: Statistic, operands: Mapping[Symbol, Response], gradient: Symbol
    ) -> Tensor:
        """w of a statistic of gradients; of statistics that it sums up, by their means."""
        response = self._map(statistic, operands)
        weight = float(statistic.weight)
        local = response.local
        total = torch.zeros(self.shape, dtype=torch.float64) if local is None else weight * local
        for other, slope in response.through.items():
            each = slope / self.expressions.length
            key = gradient, statistic.symbol, other
            mean = self._statistic(key, each) if each.requires_grad else slope.mean(-1, True)
            total = total + weight * statistic.length * mean * self.rows[gradient][other]
        return total

    # --- results --------------------------------------------------------------------------------

    def jacobians(self, output: Symbol) -> list[Jacobian]:
        """The factors of an output: for each gradient that it depends on, or for itself.

        A forward value that a weight gradient uses is its own factor, in the 2-norm. The diagonal
        of a Jacobian counts by its largest element.
        """
        if output in self.values:
            return [Jacobian(self.values[output], order=2)]
        found = []
        for gradient, responses in self.responses.items():
            if response := responses.get(output):
                pairs = [(u, self.rows[gradient][s]) for s, u in response.through.items()]
                found.append(Jacobian(response.local, pairs))
        return found


def dependent_on_gradients(expressions: Expressions) -> set[Symbol]:
    """The gradients that enter a region, and the symbols that depend on them."""
    found = set(expressions.gradients)
    for definition in expressions.definitions:
        if not found.isdisjoint(definition.value.free_symbols):
            found.add(definition.symbol)
    return found


@dataclass(frozen=True)
class Jacobian:
    """diag(diagonal) + Σ column rowᵀ; `order` is the norm that the diagonal is measured in."""

    diagonal: Tensor | None
    pairs: Collection[tuple[Tensor, Tensor]] = ()
    order: float = torch.inf

    def factors(self) -> list[Tensor]:
        """All of its factors."""
        diagonal = [] if self.diagonal is None else [self.diagonal]
        return diagonal + [factor for pair in self.pairs for factor in pair]


def _leaf(x: Tensor, differentiable: bool = True) -> Tensor:
    return x.detach().clone().requires_grad_(differentiable)
