"""Regions as mathematics: every node a symbol with a sympy definition.

Symbols stand for single elements. Casts, views and broadcasts have the symbol of their operand; a
reduction defines a *statistic*, one number for many elements. Pointwise operators are defined by
their formulas (`graph/pointwise.py`); derivatives, bounds and error estimates follow from these
(`derivation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch import fx

from fp8pass import compat, graph
from fp8pass.error_analysis.regions import Region, Role
from fp8pass.graph.classify import VIEWS, Kind, kind
from fp8pass.graph.nodes import aten, prims
from fp8pass.graph.patterns import filled_with
from fp8pass.graph.pointwise import POINTWISE
from fp8pass.graph.symbols import Operand, Underivable


@dataclass(frozen=True)
class Pointwise:
    """`symbol = value`, an expression of other symbols."""

    symbol: Symbol
    value: Expr


@dataclass(frozen=True)
class Statistic:
    """`symbol = weight · Σ value` over `length` elements.

    `slope` is the derivative of the summand by its element. The mean of a variance counts as
    constant, because deviations from it sum to zero. `over_rows` says that the reduction goes over
    the rows of a matrix, so that its elements are those of a column.
    """

    symbol: Symbol
    operand: Symbol
    value: Expr
    slope: Expr
    weight: Expr
    length: int
    over_rows: bool = False


Definition = Pointwise | Statistic


@dataclass
class Expressions:
    """A region in symbols.

    Attributes:
        symbols: the symbol of every input and member.
        definitions: the definitions of members that compute something, in order.
        constants: symbols of exact values.
        numbers: those of them whose value the graph says.
        masks: those of them that are booleans.
        nonpositive: symbols of inputs that are nowhere positive.
        gradients: symbols of gradients that enter the region.
        values: symbols of forward inputs that may be inexact.
        statistics: symbols with one number for many elements.
    """

    symbols: dict[fx.Node, Symbol] = field(default_factory=dict)
    definitions: list[Definition] = field(default_factory=list)
    constants: set[Symbol] = field(default_factory=set)
    numbers: dict[Symbol, float] = field(default_factory=dict)
    masks: set[Symbol] = field(default_factory=set)
    nonpositive: set[Symbol] = field(default_factory=set)
    gradients: list[Symbol] = field(default_factory=list)
    values: list[Symbol] = field(default_factory=list)
    statistics: set[Symbol] = field(default_factory=set)

    @property
    def length(self) -> int:
        """Elements of the longest reduction along rows, 1 if there is none."""
        lengths = [
            d.length for d in self.definitions if isinstance(d, Statistic) and not d.over_rows
        ]
        return max(lengths, default=1)

    @property
    def exponentials(self) -> set[Expr]:
        """What the definitions have of exponentials, of any base."""
        found = (x for d in self.definitions for x in d.value.atoms(sympy.exp, sympy.Pow))
        return {x for x in found if x.as_base_exp()[1].free_symbols}

    def expanded(self, expression: Expr) -> Expr:
        """`expression` in terms of inputs and statistics, among which roots keep their symbols."""
        for definition in reversed(self.definitions):
            if isinstance(definition, Pointwise) and not self._is_root(definition):
                expression = expression.xreplace({definition.symbol: definition.value})
        return expression

    def _is_root(self, definition: Pointwise) -> bool:
        rational = definition.value.is_rational_function()
        return definition.symbol in self.statistics and not rational


def express(region: Region) -> Expressions:
    """Write a region in symbols.

    Raises:
        Underivable: an operator has no formula, or it divides by something that may vanish.
    """
    found = Expressions()
    for node, role in region.inputs.items():
        symbol = _symbol(node.name, real=True)
        found.symbols[node] = symbol
        if node in region.nonpositive:
            found.nonpositive.add(symbol)
        if role is Role.CONSTANT:
            _add_constant(node, symbol, found)
        else:
            (found.gradients if role is Role.GRADIENT else found.values).append(symbol)
    for node in region.nodes:
        _define(node, found)
    return found


def _add_constant(node: fx.Node, symbol: Symbol, found: Expressions) -> None:
    found.constants.add(symbol)
    filled = filled_with(node)
    if filled is not None:
        found.numbers[symbol] = filled
    elif graph.tensor(node).dtype is torch.bool:
        found.masks.add(symbol)


def _define(node: fx.Node, found: Expressions) -> None:
    if graph.is_getitem(node):
        _define_result(node, found)
    elif node.target in IDENTITIES:
        _define_identity(node, found)
    elif node.target in DERIVABLE_REDUCTIONS:
        _define_reduction(node, found)
    elif node.target is aten.var_mean.correction:
        return  # its results are defined one by one
    elif node.target is aten.var.correction:
        _define_variance(node, node, found)
    else:
        formula = FORMULAS.get(node.target)
        if formula is None:
            raise _unbounded(node)
        operands = [_operand(a, found) for a in node.args]
        value = formula(*operands, **{k: _operand(v, found) for k, v in node.kwargs.items()})
        _add_pointwise(node, sympy.sympify(value), found)


def _define_identity(node: fx.Node, found: Expressions) -> None:
    found.symbols[node] = found.symbols[node.all_input_nodes[0]]


def _add_pointwise(node: fx.Node, value: Expr, found: Expressions) -> None:
    symbol = _symbol_like(node.name, value)
    found.symbols[node] = symbol
    found.definitions.append(Pointwise(symbol, value))
    varying = [s for s in value.free_symbols if s not in found.constants]
    if not varying:
        found.constants.add(symbol)
    elif all(s in found.statistics for s in varying):
        found.statistics.add(symbol)


def _symbol_like(name: str, value: Expr) -> Symbol:
    """A symbol that is known to be positive or not negative if `value` is."""
    if value.is_positive:
        return _symbol(name, positive=True)
    return _symbol(name, nonnegative=True) if value.is_nonnegative else _symbol(name, real=True)


def _symbol(name: str, **assumptions: bool) -> Symbol:
    """A symbol named as nodes are in printed graphs; no sympy function has such a name."""
    return Symbol(f"%{name}", **assumptions)


def _define_reduction(node: fx.Node, found: Expressions) -> None:
    operand = found.symbols[node.args[0]]  # type: ignore[index]
    length = _reduced(node)
    if length == 1:
        found.symbols[node] = operand
        return
    mean = node.target in (aten.mean.dim, aten.mean.default)
    weight = sympy.Rational(1, length) if mean else sympy.Integer(1)
    one = sympy.Integer(1)
    entry = Statistic(operand, operand, operand, one, weight, length, _is_over_rows(node))
    _add_statistic(node, entry, found)


def _is_over_rows(node: fx.Node) -> bool:
    """Whether a reduction leaves the last dimension as it is."""
    ndim = graph.tensor(node.args[0]).ndim  # type: ignore[arg-type]
    dims = node.args[1] if len(node.args) > 1 else None
    return bool(dims) and all(d % ndim != ndim - 1 for d in dims)  # type: ignore[union-attr, operator]


def _unbounded(node: fx.Node) -> Underivable:
    return Underivable(f"no rule bounds errors in the operator {graph.operator_name(node)}")


def _define_result(node: fx.Node, found: Expressions) -> None:
    """A result of var_mean: the variance, or the mean."""
    parent = graph.operator_of(node)
    if parent.target is not aten.var_mean.correction:
        raise _unbounded(parent)
    if node.args[1] == 0:
        _define_variance(node, parent, found)
        return
    operand = found.symbols[parent.args[0]]  # type: ignore[index]
    length, one = _reduced(parent), sympy.Integer(1)
    entry = Statistic(operand, operand, operand, one, sympy.Rational(1, length), length)
    _add_statistic(node, entry, found)


def _define_variance(node: fx.Node, parent: fx.Node, found: Expressions) -> None:
    """The variance that `parent` computes, as a statistic of deviations from a mean."""
    operand = found.symbols[parent.args[0]]  # type: ignore[index]
    length, one = _reduced(parent), sympy.Integer(1)
    mean = _symbol(f"mean_{operand}", real=True)
    if mean not in found.statistics:
        share = sympy.Rational(1, length)
        found.definitions.append(Statistic(mean, operand, operand, one, share, length))
        found.statistics.add(mean)
    correction = parent.kwargs.get("correction", 1)
    weight = sympy.Rational(1, max(length - int(correction or 0), 1))  # type: ignore[arg-type]
    deviation = operand - mean
    entry = Statistic(operand, operand, deviation**2, 2 * deviation, weight, length)
    _add_statistic(node, entry, found)


def _add_statistic(node: fx.Node, entry: Statistic, found: Expressions) -> None:
    symbol = _symbol_like(node.name, entry.value)
    found.symbols[node] = symbol
    found.statistics.add(symbol)
    found.definitions.append(replace(entry, symbol=symbol))


def _reduced(node: fx.Node) -> int:
    """How many elements are reduced to one."""
    before = graph.numel(graph.tensor(node.args[0]))  # type: ignore[arg-type]
    val = node.meta["val"]
    after = graph.numel(val[0] if isinstance(val, (tuple, list)) else val)
    return max(before // max(after, 1), 1)


def _operand(argument: Any, found: Expressions) -> Any:
    if isinstance(argument, fx.Node):
        if compat.is_sym_node(argument):
            raise Underivable("a size that varies is used as a number")
        return Operand(found.symbols[argument])
    return argument


IDENTITIES = VIEWS | {
    prims.convert_element_type.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.alias.default,
}

DERIVABLE_REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
}

FORMULAS = {op: row.formula for op, row in POINTWISE.items() if row.formula is not None}


def has_formula(node: fx.Node) -> bool:
    """False for a pointwise operator without a formula; `express` says so of other operators."""
    return kind(node) is not Kind.POINTWISE or node.target in FORMULAS.keys() | IDENTITIES
