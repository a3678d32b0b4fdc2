"""The sympy functions and helpers that the formulas of pointwise operators use.

A formula takes an operator's arguments, with an `Operand` for each tensor, and returns the
expression of one element. It raises `Underivable` if a relative perturbation may have an unbounded
effect, as in a division by a number that may be zero. `error_analysis/jumps.py` handles
comparisons.
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
    """No error bound can be derived. The message names the operator and the reason."""


class Sign(sympy.Function):
    """The sign of the argument. Relative perturbations do not change it."""

    nargs = 1
    is_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return sympy.Integer(0)


class UnitStep(Sign):
    """1 for positive arguments, else 0."""

    is_nonnegative = True


class Where(sympy.Function):
    """`Where(c, a, b)`: a where c is 1, b where c is 0. The unused value may be infinite."""

    nargs = 3
    is_real = True

    def fdiff(self, argindex: int = 1) -> Expr:
        """The derivative with respect to the condition is 0 except at jumps."""
        condition = self.args[0]
        return {1: sympy.Integer(0), 2: condition, 3: 1 - condition}[argindex]

    def _eval_is_positive(self) -> bool | None:
        return True if self.args[1].is_positive and self.args[2].is_positive else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[1].is_nonnegative and self.args[2].is_nonnegative else None


class Magnitude(sympy.Function):
    """|x|. The derivative is `Sign`, which is simpler than the derivative of `sympy.Abs`."""

    nargs = 1
    is_real = True
    is_nonnegative = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return Sign(self.args[0])


class Sigmoid(sympy.Function):
    """1 / (1 + e^-x). The derivative is written with the sigmoid itself."""

    nargs = 1
    is_real = True
    is_positive = True

    def fdiff(self, argindex: int = 1) -> Expr:
        return self * (1 - self)


# The PyTorch implementation of each sympy function, for `sympy.lambdify`.
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
    """A tensor operand of a formula. `symbol` stands for one element."""

    symbol: Symbol


def to_sympy(x: Operand | float | int) -> Expr:
    """Convert an argument to a sympy expression. Raise Underivable for infinity and NaN."""
    if isinstance(x, Operand):
        return x.symbol
    if not math.isfinite(x):
        raise Underivable(f"computes with the constant {x}")
    if isinstance(x, bool) or int(x) == x:
        return sympy.Integer(int(x))
    exact = sympy.Rational(x)
    return exact if exact.q <= 1 << 10 else sympy.Float(x)


def elementwise(function: Callable[..., Expr]) -> Formula:
    """Return the formula that applies `function` to the arguments, converted to sympy.

    The keyword argument `alpha` multiplies the second argument, as in `torch.add`.
    """

    def formula(*args: Any, **kwargs: Any) -> Expr:
        alpha = kwargs.pop("alpha", 1)
        if kwargs:
            raise Underivable(f"has the argument {next(iter(kwargs))}")
        expressions = [to_sympy(a) for a in args]
        if alpha != 1:
            expressions[1] = expressions[1] * to_sympy(alpha)
        return function(*expressions)

    return formula


def quotient(numerator: Expr, denominator: Expr) -> Expr:
    """Return the quotient. The denominator must be a constant or known to be positive."""
    if denominator.is_number or denominator.is_positive:
        return numerator / denominator
    raise Underivable(f"division by {denominator}, which may be zero")


def square_root(x: Expr, sign: int = 1) -> Expr:
    """Return x^½ of a nonnegative expression, or x^-½ of a positive one if `sign` is -1."""
    if x.is_positive or (sign > 0 and x.is_nonnegative):
        return x ** sympy.Rational(sign, 2)
    raise Underivable(f"a root of {x}, which may be zero")


def logarithm(x: Expr) -> Expr:
    if x.is_positive:
        return sympy.log(x)
    raise Underivable(f"a logarithm of {x}, which may be zero")


def power(base: Operand, exponent: float | Operand) -> Expr:
    """Return the power. Raise Underivable if a perturbation may have an unbounded effect."""
    if isinstance(exponent, Operand):
        raise Underivable("a power whose exponent is a tensor")
    constant = to_sympy(exponent)
    if constant.is_negative:
        return quotient(sympy.Integer(1), base.symbol**-constant)
    if not constant.is_integer and not base.symbol.is_nonnegative:
        raise Underivable(f"{base.symbol}^{exponent} of a base that may be negative")
    return base.symbol**constant


def comparison(sign: int, *, or_equal: bool = False) -> Formula:
    """Return the formula of x > y (1 or 0), or of x < y if `sign` is -1."""

    def compare(x: Operand, y: Operand | float) -> Expr:
        if _is_infinite(y):
            return sympy.Integer(sign * y < 0)  # type: ignore[operator]
        difference = sign * (x.symbol - to_sympy(y))
        return 1 - UnitStep(-difference) if or_equal else UnitStep(difference)

    return compare


def clamp(sign: int) -> Formula:
    """Return the formula of max(x, bound), or of min(x, bound) if `sign` is -1."""

    def formula(x: Operand, bound: Operand | float) -> Expr:
        if _is_infinite(bound) and sign * bound < 0:  # type: ignore[operator]
            return x.symbol
        limit, is_inside = to_sympy(bound), comparison(sign)(x, bound)
        return limit + sign * Magnitude(x.symbol - limit) * is_inside

    return formula


def _is_infinite(bound: Operand | float) -> bool:
    return not isinstance(bound, Operand) and math.isinf(bound)


def threshold_backward(gradient: Operand, x: Operand, threshold: float) -> Expr:
    """Return the gradient where `x` exceeds a threshold, else 0."""
    return gradient.symbol * comparison(1)(x, threshold)
