"""The sympy side of pointwise operators: functions, operands, and formulas that need care.

A formula takes the arguments of an operator, with an `Operand` in the place of each tensor, and
returns a sympy expression of one element. It raises `Underivable` where a relative perturbation of
an operand has no bounded effect: at a division by something that may vanish. Comparisons are
written down as they are; `error_analysis/jumps.py` finds whether they make anything jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol

Formula = Callable[..., Expr]


class Underivable(Exception):
    """No bound can be derived; the message says for which operator and why."""


class UnitStep(sympy.Function):
    """1 for positive arguments, else 0. A relative perturbation never crosses zero."""

    nargs = 1
    is_real = True
    is_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """Zero where it exists."""
        return sympy.Integer(0)


class Where(sympy.Function):
    """`Where(c, a, b)`: a where c is 1, b where it is 0; only the chosen one has to be finite."""

    nargs = 3
    is_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """A change of the condition is a jump, not a derivative."""
        condition = self.args[0]
        return {1: sympy.Integer(0), 2: condition, 3: 1 - condition}[argindex]

    def _eval_is_positive(self) -> bool | None:
        return True if self.args[1].is_positive and self.args[2].is_positive else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[1].is_nonnegative and self.args[2].is_nonnegative else None


class Sign(sympy.Function):
    """The sign of its argument, constant under relative perturbations."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """Zero where it exists."""
        return sympy.Integer(0)


class Magnitude(sympy.Function):
    """The absolute value, whose derivative is a `Sign`."""

    nargs = 1
    is_real = True
    is_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """The sign of the argument."""
        return Sign(self.args[0])


class Sigmoid(sympy.Function):
    """1 / (1 + e^-x), whose derivative sympy would not write by the function itself."""

    nargs = 1
    is_real = True
    is_positive = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """s (1 - s)."""
        return self * (1 - self)


# How the functions above and sympy's evaluate on tensors.
TORCH_FUNCTIONS: dict[str, Any] = {
    "UnitStep": lambda x: (x > 0).to(x.dtype),
    "Sign": torch.sign,
    "Where": lambda c, a, b: torch.where(c > 0.5, a, b),
    "Magnitude": torch.abs,
    "Sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": lambda x: x**0.5,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "Abs": torch.abs,
    "pi": torch.pi,
}


@dataclass(frozen=True)
class Operand:
    """A tensor operand of a formula; its symbol stands for one element."""

    symbol: Symbol


def number(x: Operand | float | int) -> Expr:
    """An operand's symbol, or a constant in sympy; raises Underivable if it is not finite."""
    if isinstance(x, Operand):
        return x.symbol
    if not math.isfinite(x):
        raise Underivable(f"computes with the constant {x}")
    if isinstance(x, bool) or int(x) == x:
        return sympy.Integer(int(x))
    exact = sympy.Rational(x)
    return exact if exact.q <= 1 << 10 else sympy.Float(x)


def elementwise(function: Callable[..., Expr]) -> Formula:
    """The formula of an operator that is a function of numbers.

    `alpha`, which sums and differences take, multiplies the second operand.
    """

    def formula(*args: Any, **kwargs: Any) -> Expr:
        alpha = kwargs.pop("alpha", 1)
        if kwargs:
            raise Underivable(f"has the argument {next(iter(kwargs))}")
        numbers = [number(a) for a in args]
        if alpha != 1:
            numbers[1] = numbers[1] * number(alpha)
        return function(*numbers)

    return formula


def over(numerator: Expr, denominator: Expr) -> Expr:
    """A quotient of numbers; the denominator must be a constant or known to be positive."""
    if denominator.is_number or denominator.is_positive:
        return numerator / denominator
    raise Underivable(f"division by {denominator}, which may vanish")


def root(x: Expr, sign: int) -> Expr:
    """x^½, or x^-½ with `sign` -1, of a number that is known to be positive."""
    if x.is_positive or (sign > 0 and x.is_nonnegative):
        return x ** sympy.Rational(sign, 2)
    raise Underivable(f"a root of {x}, which may vanish")


def logarithm(x: Expr) -> Expr:
    """The logarithm of a number that is known to be positive."""
    if x.is_positive:
        return sympy.log(x)
    raise Underivable(f"a logarithm of {x}, which may vanish")


def sigmoid_backward(g: Expr, sigmoid: Expr) -> Expr:
    """The gradient of a sigmoid, by its result, times `g`."""
    return g * sigmoid * (1 - sigmoid)


def tanh_backward(g: Expr, tanh: Expr) -> Expr:
    """The gradient of tanh, by its result, times `g`."""
    return g * (1 - tanh**2)


def silu_backward(g: Expr, x: Expr) -> Expr:
    """The gradient of x · sigmoid(x), times `g`."""
    return g * Sigmoid(x) * (1 + x * (1 - Sigmoid(x)))


def power(base: Operand, exponent: float | Operand) -> Expr:
    """A constant power."""
    if isinstance(exponent, Operand):
        raise Underivable("a power whose exponent is a tensor")
    constant = number(exponent)
    if constant.is_negative:
        return over(sympy.Integer(1), base.symbol**-constant)
    if not constant.is_integer and not base.symbol.is_nonnegative:
        raise Underivable(f"{base.symbol}^{exponent} of something that may be negative")
    return base.symbol**constant


def compared(sign: int, *, or_equal: bool = False) -> Formula:
    """x > y, or with `sign` -1 x < y, as 0 or 1."""

    def compare(x: Operand, y: Operand | float) -> Expr:
        if _is_infinite(y):
            return sympy.Integer(sign * y < 0)  # type: ignore[operator]
        difference = sign * (x.symbol - number(y))
        return 1 - UnitStep(-difference) if or_equal else UnitStep(difference)

    return compare


def clamped(sign: int) -> Formula:
    """max(x, bound), or with `sign` -1 min(x, bound)."""

    def clamp(x: Operand, bound: Operand | float) -> Expr:
        if _is_infinite(bound) and sign * bound < 0:  # type: ignore[operator]
            return x.symbol
        limit, inside = number(bound), compared(sign)(x, bound)
        return limit + sign * Magnitude(x.symbol - limit) * inside

    return clamp


def _is_infinite(bound: Operand | float) -> bool:
    return not isinstance(bound, Operand) and math.isinf(bound)


def where(condition: Operand, a: Operand | float, b: Operand | float) -> Expr:
    """`a` where a condition, which is 0 or 1, is 1, and `b` elsewhere."""
    return Where(condition.symbol, number(a), number(b))


def threshold_backward(gradient: Operand, x: Operand, threshold: float) -> Expr:
    """The gradient where `x` exceeds a threshold, else 0."""
    return gradient.symbol * compared(1)(x, threshold)
