"""Stochastic rounding with a counter-based generator (paper LLMQ, section 3).

A number is rounded up or down with probabilities that preserve its mean, so many tiny updates have
an effect. The random bits are a hash of the seed and of the indices of parameter, step and element.
They do not depend on which parameters are updated together. Integer arithmetic wraps around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS

# lowbias32, an integer hash (Wellons 2018). The second factor is 0x846CA68B as int32.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Factors of the hash in `random_bits`: digits of e.
FOLDED_FACTORS = (0xB7E15163, 0xADF85459)
LOW_WORD = 0xFFFFFFFF
# For each kind of tensor, the number of bits by which the hash of an element is rotated left.
# Rounding uses the upper bits. A parameter with a `master` copy is not rounded stochastically, so
# `master` and `parameter` may have the same rotation.
ROTATIONS = {"exp_avg_sq": 0, "exp_avg": 8, "momentum_buffer": 8, "master": 16, "parameter": 16}


def mix(x: Tensor) -> Tensor:
    """Hash int32 `x`, so that each bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST_FACTOR
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND_FACTOR
    return x ^ (x >> 16 & 0xFFFF)


def keys(seed: int, parameters: Tensor, steps: Tensor) -> Tensor:
    """Return hash keys, int32 [n], given the indices [n] and step counts [n] of parameters."""
    seeds = torch.full_like(parameters, wrap_to_int32(seed))
    return mix(mix(mix(seeds) + parameters) + steps.int())


def wrap_to_int32(seed: int) -> int:
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class SumStamp:
    """Inputs of the hash for rounding a sum of gradients. The inputs differ in each addition."""

    seed: int
    number: int  # index of the parameter in the optimizer
    step: Tensor  # number of updates so far, fp32 []
    count: int  # gradients in the sum, including the added gradient

    def key(self) -> Tensor:
        number = torch.full((1,), self.number, dtype=torch.int32, device=self.step.device)
        return mix(keys(self.seed, number, self.step) + self.count)


def random_bits(key: Tensor, element: Tensor) -> Tensor:
    """Return int32 random bits; keys and element indices broadcast.

    An odd element has the bits of the element before it, with the halves exchanged.
    """
    x = key.long() + (element >> 1) & LOW_WORD
    for factor in FOLDED_FACTORS:
        x = x * factor
        x = (x >> 32 ^ x) & LOW_WORD
    return torch.where(element & 1 == 0, x, x >> 16 | x << 16).int()


def rotate(bits: Tensor, by: int) -> Tensor:
    """Rotate int32 to the left, by 0 to 31 places."""
    return bits << by | bits >> 32 - by & (1 << by) - 1


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 `x` stochastically, with the upper half of int32 `bits` as noise."""
    rounded = (x.view(torch.int32) + (bits >> 16 & 0xFFFF) & BF16_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def uniform(bits: Tensor, digits: int) -> Tensor:
    """Return fp32 numbers in [0, 1) from the upper `digits` (up to 24) of int32 `bits`."""
    return (bits >> 32 - digits & (1 << digits) - 1).float() * 2.0**-digits
