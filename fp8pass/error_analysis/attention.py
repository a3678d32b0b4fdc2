"""Bound and estimate how much attention amplifies errors of its operands.

The bound follows section 8.1.3 of the AGoQ paper. It grows with the number of tokens, so the
operands of attention stay exact. The bound of RMSNorm, in contrast, is constant.

The backward computes ∂S = P ∘ (∂A Vᵀ - δ), and reads the output A only in the row sums
δ = Σ ∂A ∘ A. If the rows of V have a large mean, this mean cancels in ∂A Vᵀ - δ. But a relative
error of A is also a relative error of this mean, and does not cancel. So if the user allows an
inexact output (`Config.attention_output`), only the output minus its mean over tokens is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

PERTURBATION = 1e-4
SAMPLED_TOKENS = 256


def bound_amplification(length: int, head_dim: int) -> float:
    """Bound the change of ∂A/∂V per unit relative perturbation of Q and K.

    For one head over L tokens, A = P V with P = softmax(S), S = Q Kᵀ / √d, and ∂A/∂V = Pᵀ. If the
    entries of Q and K have unit variance, ‖ΔQ‖₂ = ‖Q‖₂ = √(L d), and so

        ‖ΔP‖₂ ≤ ‖ΔS‖₂ ≤ (‖ΔQ‖₂ ‖K‖₂ + ‖Q‖₂ ‖ΔK‖₂) / √d = 2 L √d

    The result is relative to ‖P‖₂ ≤ √L. The bounds of ∂A/∂Q and ∂A/∂K grow as L^1.5 √d.
    """
    return 2 * math.sqrt(length * head_dim)


@cache
def estimate_amplification(length: int, head_dim: int, inexact: str = "qkv") -> float:
    """Return the largest relative RMS error of dq, dk and dv per unit error of the operands.

    The operands are random numbers of unit variance. The operands in `inexact` (`q`, `k`, `v`, and
    `o` for the output) have independent relative errors. With few tokens, the result is averaged
    over several heads. Then `qkv` also covers self-attention with q = k = v, whose gradient is
    dq + dk + dv.
    """
    random = torch.Generator().manual_seed(0)
    size = min(length, SAMPLED_TOKENS), head_dim

    def draw() -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64, device="cpu")

    squares = 0.0
    heads = max(1, SAMPLED_TOKENS // length)
    for _ in range(heads):
        q, k, v, gradient = draw(), draw(), draw(), draw()
        noise = [1 + PERTURBATION * draw() * (operand in inexact) for operand in "qkvo"]
        pairs = zip(*_perturb((q, k, v), noise, gradient), strict=True)
        changes = [_relative_change(a, b) for a, b in pairs]
        if inexact == "qkv" and length < SAMPLED_TOKENS:
            exact, perturbed = _perturb(
                (q, q, q), [*[noise[0]] * 3, torch.ones((), device="cpu")], gradient
            )
            changes.append(_relative_change(sum(exact), sum(perturbed)))  # type: ignore[arg-type]
        squares += max(changes) ** 2
    found = math.sqrt(squares / heads) / PERTURBATION
    return found if math.isfinite(found) else math.inf


def _perturb(
    operands: Sequence[Tensor], noise: Sequence[Tensor], gradient: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return dq, dk and dv for exact operands, and dq, dk and dv for operands times `noise`."""
    q, k, v = operands
    scores = _compute_scores(q, k)
    logsumexp, output = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v
    exact = _compute_gradients((q, k, v, output), gradient, logsumexp)
    inexact = [x * n for x, n in zip((q, k, v, output), noise, strict=True)]
    return exact, _compute_gradients(inexact, gradient, logsumexp)


def _relative_change(exact: Tensor, inexact: Tensor) -> float:
    """Return the relative change. It is infinite or NaN for one token, where dq and dk are 0."""
    return float((inexact - exact).norm() / exact.norm())


def _compute_scores(q: Tensor, k: Tensor) -> Tensor:
    mask = torch.ones(len(q), len(q), dtype=torch.bool, device="cpu").triu(1)
    return (q @ k.T * q.shape[-1] ** -0.5).masked_fill(mask, -torch.inf)


def _compute_gradients(
    operands: Sequence[Tensor], gradient: Tensor, logsumexp: Tensor
) -> list[Tensor]:
    """Compute dq, dk and dv as kernels do: from q, k, v, the output and the saved logsumexp."""
    q, k, v, output = operands
    p = (_compute_scores(q, k) - logsumexp).exp()
    ds = p * (gradient @ v.T - (gradient * output).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return [ds @ k, ds.T @ q, p.T @ gradient]
