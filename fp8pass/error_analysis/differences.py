"""Find differences: sums whose terms may nearly cancel, e.g. `x - y`, but not `x**2 + y**2`.

Cancellation amplifies errors. Samples do not show it, because samples of two values are
independent. So the backward never computes a difference from terms in low-bit formats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.error_analysis.signs import KnownSign
from fp8pass.graph.classify import VIEWS, Kind, kind
from fp8pass.graph.nodes import aten
from fp8pass.graph.patterns import filled_with

VARIANCES = (aten.var_mean.correction, aten.var.correction)

ADDITIONS = (aten.add.Tensor, aten.add.Scalar)
SUBTRACTIONS = (aten.sub.Tensor, aten.sub.Scalar)
REVERSED = (aten.rsub.Tensor, aten.rsub.Scalar)
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
TOTALS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
STACKS = (aten.cat.default, aten.stack.default)
COPIES = VIEWS | graph.CASTS | {aten.clone.default}
ARITHMETIC = (
    *(*COPIES, *ADDITIONS, *SUBTRACTIONS, *REVERSED, *PRODUCTS, *QUOTIENTS),
    *(aten.neg.default, aten.pow.Tensor_Scalar),
)

# The results of these operators have a known magnitude, so samples do show how much terms cancel,
# e.g. in `1 - sigmoid(x)`.
BOUNDED = (
    *(aten.sigmoid.default, aten.tanh.default, aten.erf.default, aten.exp.default),
    *(aten.expm1.default, aten.sin.default, aten.cos.default),
)

Term = tuple[Any, float]  # a node or a number, and its factor


class Differences:
    """The nodes of a graph that are differences.

    Args:
        constants: the exact nodes. The caller may add nodes to this collection later.
        signs: the signs of nodes, if known (`signs.py`).
    """

    def __init__(self, constants: Collection[fx.Node], signs: Mapping[fx.Node, KnownSign]) -> None:
        self._constants, self._signs = constants, signs

    def __contains__(self, node: fx.Node) -> bool:
        """Whether `node` is a sum with terms that may nearly cancel.

        The variance of each row is a difference. The deviations in batch normalization are not:
        AOTAutograd subtracts the mean again in the backward, which would then need the exact input.
        """
        if node.target in VARIANCES:
            return _is_for_each_row(node)
        if node.target in TOTALS:
            return self._adds_up_negations(node)
        terms = _terms(node)
        if terms is None or self._have_one_sign(terms):
            return False
        if len({self._is_negative(*term) for term in terms}) < 2:
            return False
        reduced = [r for x, _ in terms if (r := _reduction(x)) is not None]
        if any(r.target in VARIANCES and not _is_for_each_row(r) for r in reduced):
            return False
        has_number = any(_is_number(x) for x, _ in terms)
        return not (has_number and all(_is_number(x) or self._is_bounded(x) for x, _ in terms))

    def is_of_equals(self, node: fx.Node) -> bool:
        """Whether a node is a difference of two inexact values that are not statistics.

        A region has one symbol for all elements of x, so the formula of `x[:, None] - x[None]`
        would be zero.
        """
        terms = _terms(node)
        if terms is None or node not in self:
            return False
        inexact = [x for x, _ in terms if isinstance(x, fx.Node) and x not in self._constants]
        return len(inexact) == 2 and all(_reduction(x) is None for x in inexact)

    def _is_bounded(self, node: fx.Node) -> bool:
        if node.target in BOUNDED or self._is_sigmoid(node):
            return True
        return node.target in ARITHMETIC and all(
            _is_number(x) or self._is_bounded(x) for x in node.all_input_nodes
        )

    def _is_sigmoid(self, node: fx.Node) -> bool:
        """Match `1 / (1 + exp(-x))`, the sigmoid in SiLU's backward in PyTorch 2.11."""
        if node.target is not aten.reciprocal.default:
            return False
        terms = _terms(node.all_input_nodes[0])
        if terms is None or not self._have_one_sign(terms):
            return False
        return any(_number(x) == 1.0 and scale == 1.0 for x, scale in terms)

    def _have_one_sign(self, terms: list[Term]) -> bool:
        common = KnownSign.ZERO
        for x, scale in terms:
            number = _number(x)
            known = self._signs.get(x, KnownSign.UNKNOWN)
            common &= (known if number is None else KnownSign.of(number)) * KnownSign.of(scale)
        return bool(common)

    def _is_negative(self, x: Any, scale: float) -> bool:
        number = _number(x)
        if number is not None:
            return number * scale < 0
        return (scale < 0) != self._is_negated(x)

    def _is_negated(self, node: fx.Node) -> bool:
        """Whether a value is negated by an odd number of negations and negative factors.

        A negative factor of a constant does not count, because the constant may be a mask.
        """
        negated = False
        while True:
            if node.target is aten.neg.default:
                negated = not negated
            elif (factor := _factor(node)) is not None and node not in self._constants:
                negated ^= factor < 0
            elif node.target not in COPIES:
                return negated
            node = node.args[0]  # type: ignore[assignment]

    def _adds_up_negations(self, total: fx.Node) -> bool:
        """Whether a sum adds up values and negated values, e.g. `stack([x, -y]).sum(0)`."""
        stacked: Any = skip_copies(total.all_input_nodes[0])
        if stacked.target not in STACKS:
            return False
        return len({self._is_negated(x) for x in stacked.args[0]}) == 2


def _terms(node: fx.Node) -> list[Term] | None:
    """Return the terms of a sum, e.g. [(x, 1), (y, -1)] for x - y; None for other operators."""
    if len(node.args) < 2:
        return None
    first, second = node.args[:2]
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    scale = float(alpha) if isinstance(alpha, (int, float)) else 1.0
    if node.target in ADDITIONS:
        return [(first, 1.0), (second, scale)]
    if node.target in SUBTRACTIONS:
        return [(first, 1.0), (second, -scale)]
    return [(second, 1.0), (first, -scale)] if node.target in REVERSED else None


def _number(x: Any) -> float | None:
    """Return the value of a number, or of a tensor filled with one number."""
    if isinstance(x, fx.Node):
        return filled_with(x)
    return float(x) if isinstance(x, (int, float)) else None


def _is_number(x: Any) -> bool:
    """Whether a term is a number, a symbolic size, or a tensor of integers or booleans."""
    if _number(x) is not None or not isinstance(x, fx.Node):
        return True
    val = graph.value(x)
    return val is None or not (val.is_floating_point() or val.is_complex())


def _factor(node: fx.Node) -> float | None:
    if node.target not in (*PRODUCTS, *QUOTIENTS) or not isinstance(node.args[0], fx.Node):
        return None
    return _number(node.args[1])


def _is_negation_or_copy(node: fx.Node) -> bool:
    return node.target in COPIES or node.target is aten.neg.default


def skip_copies(node: fx.Node) -> fx.Node:
    """Return the node that `node` is a copy of. A copy of a constant has no input node."""
    while node.target in COPIES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _reduction(x: Any) -> fx.Node | None:
    """Return the reduction whose result is `x`, skipping factors and signs."""
    while isinstance(x, fx.Node) and kind(x) is not Kind.REDUCTION:
        x = x.args[0] if _is_negation_or_copy(x) or _factor(x) is not None else None
    return graph.operator_of(x) if isinstance(x, fx.Node) else None


def _is_for_each_row(variance: fx.Node) -> bool:
    """Whether a variance keeps dimension 0. Without `dim`, it reduces all dimensions."""
    rank = graph.tensor(variance.all_input_nodes[0]).ndim
    dims = variance.args[1] if len(variance.args) > 1 else variance.kwargs.get("dim")
    return isinstance(dims, (list, tuple)) and bool(dims) and all(int(d) % rank for d in dims)


def find_expanded_distances(g: fx.Graph) -> set[fx.Node]:
    """Return x and y of squared distances that are computed as x² + y² - 2 x y, with a GEMM.

    The gradient of x is 2 x Σ g - 2 g y. Its terms nearly cancel. The terms may be far apart in the
    backward, so the search starts in the forward.
    """
    nothing = frozenset[fx.Node]()
    # For each node, `values` has the values that the node copies. `squares` has each x for which
    # the node contains a term x², and `products` each x for which it contains a term x y.
    values = dict[fx.Node, frozenset[fx.Node]]()
    squares, products, found = dict(values), dict(values), set[fx.Node]()
    for node in g.nodes:
        square, product, value = (
            nothing.union(*(of.get(x, nothing) for x in node.all_input_nodes))
            for of in (squares, products, values)
        )
        is_product = kind(node) is Kind.GEMM
        if _is_square(node):
            square = value
        elif not (is_product or _is_scaled_copy(node) or _terms(node) or node.target in TOTALS):
            square = product = nothing
        squares[node], products[node] = square, product | value if is_product else product
        found |= squares[node] & products[node]
        values[node] = value if _is_scaled_copy(node) else frozenset((node,))
    return {node for node, of in values.items() if not found.isdisjoint(of)}


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target in PRODUCTS and node.args[0] is node.args[1]


def _is_scaled_copy(node: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:  # x¹ is a part of the gradient of x²
        return bool(node.args[1] == 1)
    return _is_negation_or_copy(node) or node.target in STACKS or _factor(node) is not None
