"""Express regions in symbols: each node has a sympy symbol, which is defined by other symbols.

A symbol stands for a single element. Casts, views and broadcasts have the symbol of their operand.
A reduction defines a *statistic*, one number for many elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch import fx

from fp8pass import compat, graph
from fp8pass.error_analysis.differences import COPIES, TOTALS
from fp8pass.error_analysis.regions import FORMULAS, Region, Role
from fp8pass.graph.nodes import aten
from fp8pass.graph.patterns import filled_with
from fp8pass.graph.symbols import Operand, Underivable


@dataclass(frozen=True)
class Pointwise:
    """The definition `symbol = value`, where the value is an expression of other symbols."""

    symbol: Symbol
    value: Expr


@dataclass(frozen=True)
class Statistic:
    """The definition `symbol = weight · Σ value`, a sum over `length` elements.

    In the `value` of a variance, the mean counts as a constant.
    """

    symbol: Symbol
    operand: Symbol  # the symbol of an element
    value: Expr  # the summand
    weight: Expr  # the factor of the sum
    length: int
    over_rows: bool = False  # whether the elements are a column of a matrix


Definition = Pointwise | Statistic


@dataclass
class Expressions:
    symbols: dict[fx.Node, Symbol] = field(default_factory=dict)
    # Definitions in graph order, for the members that are not copies of other members.
    definitions: list[Definition] = field(default_factory=list)
    constants: set[Symbol] = field(default_factory=set)  # symbols of exact values
    # The values of constants that are filled with one number, e.g. by `full`.
    numbers: dict[Symbol, float] = field(default_factory=dict)
    masks: set[Symbol] = field(default_factory=set)  # constants that are booleans
    # Symbols of inputs without positive elements.
    nonpositive: set[Symbol] = field(default_factory=set)
    gradients: list[Symbol] = field(default_factory=list)
    # Symbols of forward inputs that may be inexact.
    values: list[Symbol] = field(default_factory=list)
    statistics: set[Symbol] = field(default_factory=set)

    @property
    def length(self) -> int:
        statistics = (d for d in self.definitions if isinstance(d, Statistic))
        return max((d.length for d in statistics if not d.over_rows), default=1)

    @property
    def has_exponentials(self) -> bool:
        powers = (x for d in self.definitions for x in d.value.atoms(sympy.exp, sympy.Pow))
        return any(x.as_base_exp()[1].free_symbols for x in powers)

    def expand(self, expression: Expr) -> Expr:
        """Rewrite `expression` in terms of inputs, statistics, and roots of statistics only."""
        for definition in reversed(self.definitions):
            if isinstance(definition, Pointwise) and not self._is_root(definition):
                expression = expression.xreplace({definition.symbol: definition.value})
        return expression

    def _is_root(self, definition: Pointwise) -> bool:
        rational = definition.value.is_rational_function()
        return definition.symbol in self.statistics and not rational


def express(region: Region) -> Expressions:
    """Express a region in symbols.

    Raises:
        Underivable: an operator has no formula, or divides by a value that may vanish.
    """
    found = Expressions()
    for node, role in region.inputs.items():
        symbol = _symbol(node.name, real=True)
        found.symbols[node] = symbol
        if node in region.nonpositive:
            found.nonpositive.add(symbol)
        if role is not Role.CONSTANT:
            (found.gradients if role is Role.GRADIENT else found.values).append(symbol)
            continue
        found.constants.add(symbol)
        if (filled := filled_with(node)) is not None:
            found.numbers[symbol] = filled
        elif graph.tensor(node).dtype is torch.bool:
            found.masks.add(symbol)
    for node in region.nodes:
        _define(node, found)
    return found


def _define(node: fx.Node, found: Expressions) -> None:
    operator = graph.operator_of(node)
    if operator.target is aten.var_mean.correction:
        if operator is not node:  # its getitems are defined instead
            (_define_total if node.args[1] else _define_variance)(node, operator, found)
    elif graph.is_getitem(node):
        raise _unbounded(operator)
    elif node.target in COPIES:
        found.symbols[node] = found.symbols[node.all_input_nodes[0]]
    elif node.target in TOTALS:
        _define_total(node, node, found)
    elif node.target is aten.var.correction:
        _define_variance(node, node, found)
    elif node.target in FORMULAS:
        operands = [_operand(a, found) for a in node.args]
        keywords = {k: _operand(v, found) for k, v in node.kwargs.items()}
        _add_pointwise(node, sympy.sympify(FORMULAS[node.target](*operands, **keywords)), found)
    else:
        raise _unbounded(node)


def _unbounded(node: fx.Node) -> Underivable:
    return Underivable(f"no rule bounds errors in the operator {graph.operator_name(node)}")


def _operand(argument: Any, found: Expressions) -> Any:
    if not isinstance(argument, fx.Node):
        return argument
    if compat.is_sym_node(argument):
        raise Underivable("a symbolic size is used as a number")
    return Operand(found.symbols[argument])


def _add_pointwise(node: fx.Node, value: Expr, found: Expressions) -> None:
    symbol = _symbol_like(node.name, value)
    found.symbols[node] = symbol
    found.definitions.append(Pointwise(symbol, value))
    varying = value.free_symbols - found.constants
    if not varying:
        found.constants.add(symbol)
    elif varying <= found.statistics:
        found.statistics.add(symbol)


def _symbol_like(name: str, value: Expr) -> Symbol:
    """Return a symbol that sympy assumes to have the sign of `value`."""
    if value.is_positive:
        return _symbol(name, positive=True)
    return _symbol(name, nonnegative=True) if value.is_nonnegative else _symbol(name, real=True)


def _symbol(name: str, **assumptions: bool) -> Symbol:
    """Return a symbol named `%name`, like the printed node: sympy has functions such as `exp`."""
    return Symbol(f"%{name}", **assumptions)


def _define_total(node: fx.Node, parent: fx.Node, found: Expressions) -> None:
    """Define a sum or mean. `parent` is `node`, or the `var_mean` that `node` is a getitem of."""
    operand, length = _find_reduced(parent, found)
    if length == 1 and node is parent:
        found.symbols[node] = operand
        return
    is_sum = parent.target in (aten.sum.dim_IntList, aten.sum.default)
    weight = sympy.Rational(1, 1 if is_sum else length)
    symbol = found.symbols[node] = _symbol_like(node.name, operand)
    over_rows = node is parent and _is_over_rows(node)
    _add_statistic(Statistic(symbol, operand, operand, weight, length, over_rows), found)


def _is_over_rows(node: fx.Node) -> bool:
    ndim = graph.tensor(node.args[0]).ndim  # type: ignore[arg-type]
    dims = node.args[1] if len(node.args) > 1 else None
    return bool(dims) and all(d % ndim != ndim - 1 for d in dims)  # type: ignore[union-attr, operator]


def _define_variance(node: fx.Node, parent: fx.Node, found: Expressions) -> None:
    """Define the variance that `parent` computes. Its mean becomes a separate statistic."""
    operand, length = _find_reduced(parent, found)
    mean = _symbol(f"mean_{operand}", real=True)
    if mean not in found.statistics:
        share = sympy.Rational(1, length)
        _add_statistic(Statistic(mean, operand, operand, share, length), found)
    correction = parent.kwargs.get("correction", 1)
    weight = sympy.Rational(1, max(length - int(correction or 0), 1))  # type: ignore[arg-type]
    value = (operand - mean) ** 2
    symbol = found.symbols[node] = _symbol_like(node.name, value)
    _add_statistic(Statistic(symbol, operand, value, weight, length), found)


def _add_statistic(statistic: Statistic, found: Expressions) -> None:
    found.statistics.add(statistic.symbol)
    found.definitions.append(statistic)


def _find_reduced(node: fx.Node, found: Expressions) -> tuple[Symbol, int]:
    """Return the symbol that a node reduces, and the number of elements that it reduces to one."""
    before = graph.numel(graph.tensor(node.args[0]))  # type: ignore[arg-type]
    val = node.meta["val"]
    after = graph.numel(val[0] if isinstance(val, (tuple, list)) else val)
    return found.symbols[node.args[0]], max(before // max(after, 1), 1)  # type: ignore[index]
