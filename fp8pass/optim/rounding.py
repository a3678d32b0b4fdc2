"""Stochastic rounding with a counter-based generator (paper LLMQ, section 3).

A number is rounded up with the probability that preserves its expectation, so that updates far
below the last bit add up. BF16 weights, master copies, moments and sums of gradients are rounded
this way. The random bits are a hash of seed, parameter, step and element: they need no generator
state, and every run draws the same bits, whichever parameters are updated together. All arithmetic
is in integers that wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS

# Factors of lowbias32, an integer hash (Wellons 2018); the second is 0x846CA68B, as int32.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Factors of the products that `random_bits` folds from 64 to 32 bits: digits of e.
FOLDED_FACTORS = (0xB7E15163, 0xADF85459)
LOW_WORD = 0xFFFFFFFF
# Rounding uses the upper bits of the element's hash, rotated left by these numbers, so that each
# tensor uses different bits. A parameter with a master copy is not rounded stochastically, so
# `master` and `parameter` share a rotation.
ROTATIONS = {"exp_avg_sq": 0, "exp_avg": 8, "master": 16, "parameter": 16}


def mix(x: Tensor) -> Tensor:
    """Hash int32 `x`: each bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST_FACTOR
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND_FACTOR
    return x ^ (x >> 16 & 0xFFFF)


def keys(seed: int, parameters: Tensor, steps: Tensor) -> Tensor:
    """Return int32 hash keys [n] of parameters, given their indices [n] and steps [n]."""
    seeds = torch.full_like(parameters, wrap_to_int32(seed))
    return mix(mix(mix(seeds) + parameters) + steps.int())


def wrap_to_int32(seed: int) -> int:
    """Return a seed of any size modulo 2^32, as a signed number."""
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class SumStamp:
    """Inputs of the hash that rounds a sum of gradients, unique for each addition."""

    seed: int  # of the parameter group
    number: int  # index of the parameter in the optimizer
    step: Tensor  # updates of the parameter so far, fp32 []; checkpoints contain it
    count: int  # gradients in the sum, including the added gradient

    def key(self) -> Tensor:
        """Return the hash key, int32 [1]."""
        number = torch.full((1,), self.number, dtype=torch.int32, device=self.step.device)
        return mix(keys(self.seed, number, self.step) + self.count)


def random_bits(key: Tensor, element: Tensor) -> Tensor:
    """Return random int32 for elements of parameters with int32 keys; the arguments broadcast.

    An odd element has the bits of its predecessor, with the halves exchanged.
    """
    x = key.long() + (element >> 1) & LOW_WORD
    for factor in FOLDED_FACTORS:
        x = x * factor
        x = (x >> 32 ^ x) & LOW_WORD
    return torch.where(element & 1 == 0, x, x >> 16 | x << 16).int()


def rotate(bits: Tensor, by: int) -> Tensor:
    """Rotate int32 `bits` to the left by 0 to 31 places."""
    return bits << by | bits >> 32 - by & (1 << by) - 1


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 `x` stochastically to bf16, by the upper half of random int32 `bits`."""
    rounded = (x.view(torch.int32) + (bits >> 16 & 0xFFFF) & BF16_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def uniform(bits: Tensor, digits: int) -> Tensor:
    """Return fp32 numbers in [0, 1) from the upper `digits` (up to 24) of random int32 `bits`."""
    return (bits >> 32 - digits & (1 << digits) - 1).float() * 2.0**-digits
