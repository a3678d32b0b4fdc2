"""Stochastic rounding with a counter-based generator (LLMQ 3).

A number is rounded up with the probability that preserves its expectation, so that updates far
below its last bit add up: those of BF16 weights, and of second moments in FP8. The random bits are
a hash of seed, parameter, step and element. They have no state and are the same on every run,
whichever parameters are updated together. All arithmetic is in integers, which wrap around.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS

# Factors of lowbias32, an integer hash (Wellons 2018); the second is 0x846CA68B, as int32.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Factors of 64-bit products, which are folded to 32 bits: digits of e.
FOLDED_FACTORS = (0xB7E15163, 0xADF85459)
LOW_WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A hash of int32 `x`: each bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST_FACTOR
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND_FACTOR
    return x ^ (x >> 16 & 0xFFFF)


def keys(seed: int, parameters: Tensor, steps: Tensor) -> Tensor:
    """A key for each parameter at its step: int32 [n], of parameters' numbers [n] and steps [n]."""
    wrapped = (seed + (1 << 31)) % (1 << 32) - (1 << 31)
    return mix(mix(mix(torch.full_like(parameters, wrapped)) + parameters) + steps.int())


def random_bits(key: Tensor, element: Tensor) -> Tensor:
    """Random int32 for elements of parameters with the keys `key`, int32 (they broadcast).

    Two neighbours have the same bits with the halves exchanged: a weight is rounded by the lower
    half, its second moment mainly by the upper one.
    """
    x = key.long() + (element >> 1) & LOW_WORD
    for factor in FOLDED_FACTORS:
        x = x * factor
        x = (x >> 32 ^ x) & LOW_WORD
    return torch.where(element & 1 == 0, x, x >> 16 | x << 16).int()


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 `x` stochastically rounded to bf16 by the lower half of random `bits`."""
    rounded = (x.view(torch.int32) + (bits & 0xFFFF) & BF16_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [-1/2, 1/2) from the upper bits of random `bits`."""
    return (bits >> 9 & 0x7FFFFF | 0x3F800000).view(torch.float32) - 1.5
