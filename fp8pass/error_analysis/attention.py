"""The error rule of attention: how much errors of its operands are amplified (AGoQ 8.1.3).

For one head over L tokens, A = P V with P = softmax(S), S = Q Kᵀ / √d, and with the gradient
factors ∂A/∂V = Pᵀ, ∂A/∂S = P ∘ (V - z), ∂A/∂Q = (∂A/∂S) K / √d, the norms of matrices multiply:

    ‖Δ(AB)‖₂ ≤ ‖ΔA‖₂ ‖B‖₂ + ‖A‖₂ ‖ΔB‖₂          ‖Δ softmax(S)‖₂ ≤ ‖ΔS‖₂
    ‖Δ(A ∘ B)‖₂ ≤ ‖ΔA‖₂ ‖B‖_∞ + ‖A‖₂ ‖ΔB‖_∞      (Eq. 8)

With entries of unit variance, ‖Q‖₂ = Θ(√(L d)), the bounds grow as L √d for ∂A/∂V and as
L^1.5 √d for ∂A/∂Q and ∂A/∂K. RMSNorm's bound is constant; attention's operands are kept exactly.

The output is in the backward once, in the row sums δ = Σ ∂A ∘ A of ∂S = P ∘ (∂A Vᵀ - δ). A part
that all rows of V share cancels, but an error in proportion to it does not: where the user lets the
output be inexact (`Config.attention_output`) it is its difference from its mean over tokens that is
rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import sympy
import torch
from sympy import Expr, Symbol

PERTURBATION = 1e-4  # small enough to be linear, far above the rounding errors of fp64
LARGEST_SAMPLE = 256  # tokens


@dataclass(frozen=True)
class Bounded:
    """Bounds of a matrix.

    Attributes:
        norm: its 2-norm.
        largest: its largest entry.
        error: the 2-norm of its perturbation.
        largest_error: the largest entry of its perturbation.
    """

    norm: Expr
    largest: Expr
    error: Expr
    largest_error: Expr = sympy.S.Zero

    def __matmul__(self, other: Bounded) -> Bounded:
        """The matrix product."""
        error = self.error * other.norm + self.norm * other.error
        return Bounded(self.norm * other.norm, sympy.oo, error)

    def hadamard(self, other: Bounded) -> Bounded:
        """The element-wise product."""
        error = self.error * other.largest + self.norm * other.largest_error
        return Bounded(self.norm * other.largest, sympy.oo, error)

    def scaled(self, factor: Expr) -> Bounded:
        """The matrix times a number."""
        return Bounded(self.norm * factor, self.largest * factor, self.error * factor)


def softmax(scores: Bounded, rows: Expr) -> Bounded:
    """Row-wise softmax: each row has at most norm one, and the Lipschitz constant is one."""
    return Bounded(sympy.sqrt(rows), sympy.Integer(1), scores.error)


def bounds(length: Expr, head_dim: Expr) -> dict[str, Expr]:
    """‖Δ‖₂ of ∂A/∂V, ∂A/∂Q and ∂A/∂K per unit relative perturbation of q, k and v (Case 1)."""
    entries = sympy.sqrt(length * head_dim)  # unit variance
    one = sympy.Integer(1)
    q = k = v = Bounded(entries, one, entries, one)
    scale = 1 / sympy.sqrt(head_dim)
    p = softmax((q @ k).scaled(scale), length)
    ds = p.hadamard(v)
    dq = (ds @ k).scaled(scale)
    dk = (ds @ q).scaled(scale)
    return {"v": p.error, "q": sympy.expand(dq.error), "k": sympy.expand(dk.error)}


def relative_bound(length: int, head_dim: int) -> float:
    """The bound for ∂A/∂V, the smallest of the three, relative to ‖P‖₂ ≤ √L."""
    tokens, dim = Symbol("L", positive=True), Symbol("d", positive=True)
    share = bounds(tokens, dim)["v"] / sympy.sqrt(tokens)
    return float(share.subs({tokens: length, dim: head_dim}))


@cache
def expected(length: int, head_dim: int, inexact: str = "qkv") -> float:
    """Relative RMS error of the worst of dq, dk and dv, for operands of unit variance.

    Per unit relative RMS perturbation, independently, of each operand that is `inexact`: letters of
    `qkv`, and `o` for the output. If q, k and v are, no less than the error of their sum where all
    three are one value. Of few tokens several heads are drawn, since errors vary from one to next.
    """
    random = torch.Generator().manual_seed(0)
    size = min(length, LARGEST_SAMPLE), head_dim

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64, device="cpu")

    squares = 0.0
    heads = max(1, LARGEST_SAMPLE // length)
    for _ in range(heads):
        q, k, v, gradient = normal(), normal(), normal(), normal()
        noise = [1 + PERTURBATION * normal() * (operand in inexact) for operand in "qkvo"]
        changes = _changes((q, k, v), noise, gradient)
        if inexact == "qkv" and length < LARGEST_SAMPLE:
            changes.append(_change_of_sum(q, noise[0], gradient))
        squares += max(changes) ** 2
    found = math.sqrt(squares / heads) / PERTURBATION
    return found if math.isfinite(found) else math.inf


def _changes(
    operands: Sequence[torch.Tensor], noise: Sequence[torch.Tensor], gradient: torch.Tensor
) -> list[float]:
    """Relative changes of dq, dk and dv where q, k, v and the output are multiplied by `noise`."""
    sums, output = _forward(*operands)
    exact = _gradients((*operands, output), gradient, sums)
    wrong = [x * n for x, n in zip((*operands, output), noise, strict=True)]
    perturbed = _gradients(wrong, gradient, sums)
    # Of a single token the gradients of q and k are zero, and no error is small beside them.
    return [float((b - a).norm() / a.norm()) for a, b in zip(exact, perturbed, strict=True)]


def _change_of_sum(x: torch.Tensor, noise: torch.Tensor, gradient: torch.Tensor) -> float:
    """The relative change of dq + dk + dv where q = k = v = x is multiplied by `noise`."""
    sums, output = _forward(x, x, x)
    exact = sum(_gradients((x, x, x, output), gradient, sums))
    perturbed = sum(_gradients((*[x * noise] * 3, output), gradient, sums))
    return float(torch.norm(perturbed - exact) / torch.norm(exact))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sums and output."""
    scores = _scores(q, k)
    return scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(len(q), len(q), dtype=torch.bool, device="cpu").triu(1)
    return (q @ k.T * q.shape[-1] ** -0.5).masked_fill(mask, -torch.inf)


def _gradients(
    operands: Sequence[torch.Tensor], gradient: torch.Tensor, logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As kernels compute them, from q, k, v, the output and the forward's log-sums."""
    q, k, v, output = operands
    p = (_scores(q, k) - logsumexp).exp()
    ds = p * (gradient @ v.T - (gradient * output).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.T @ q, p.T @ gradient
