"""Stochastic rounding with a counter-based generator (LLMQ 3).

A number is rounded up with the probability that preserves its expectation, so that changes far
below its last bit add up: those of BF16 weights, of master copies, moments and sums of gradients.
The random bits are a hash of seed, parameter, step and element. They have no state and are the same
on every run, whichever parameters are updated together. All arithmetic is in integers, which wrap
around.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.dialect.scaling import BF16_BITS

# Factors of lowbias32, an integer hash (Wellons 2018); the second is 0x846CA68B, as int32.
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - (1 << 32)
# Factors of 64-bit products, which are folded to 32 bits: digits of e.
FOLDED_FACTORS = (0xB7E15163, 0xADF85459)
LOW_WORD = 0xFFFFFFFF
# What an update rounds of an element has its own bits of the hash: rotated by so many to the left,
# the upper ones are those that decide. Weights have no bits of their own beside a master copy.
ROTATIONS = {"exp_avg_sq": 0, "exp_avg": 8, "master": 16, "parameter": 16}


def mix(x: Tensor) -> Tensor:
    """A hash of int32 `x`: each bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST_FACTOR
    x = (x ^ (x >> 15 & 0x1FFFF)) * SECOND_FACTOR
    return x ^ (x >> 16 & 0xFFFF)


def keys(seed: int, parameters: Tensor, steps: Tensor) -> Tensor:
    """A key for each parameter at its step: int32 [n], of parameters' numbers [n] and steps [n]."""
    seeds = torch.full_like(parameters, wrapped(seed))
    return mix(mix(mix(seeds) + parameters) + steps.int())


def wrapped(seed: int) -> int:
    """A seed as int32."""
    return (seed + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(frozen=True)
class SumStamp:
    """What the random bits of a sum of gradients depend on: those of no other sum do.

    Attributes:
        seed: of the optimizer's group.
        number: of the parameter.
        step: how often it was updated before, fp32 []; a checkpoint has it.
        count: how many gradients the sum has.
    """

    seed: int
    number: int
    step: Tensor
    count: int

    def key(self) -> Tensor:
        """int32 [1]."""
        number = torch.full((1,), self.number, dtype=torch.int32, device=self.step.device)
        return mix(keys(self.seed, number, self.step) + self.count)


def random_bits(key: Tensor, element: Tensor) -> Tensor:
    """Random int32 for elements of parameters with the keys `key`, int32 (they broadcast).

    Two neighbours have the same bits with the halves exchanged.
    """
    x = key.long() + (element >> 1) & LOW_WORD
    for factor in FOLDED_FACTORS:
        x = x * factor
        x = (x >> 32 ^ x) & LOW_WORD
    return torch.where(element & 1 == 0, x, x >> 16 | x << 16).int()


def rotated(bits: Tensor, by: int) -> Tensor:
    """int32 `bits` rotated to the left by `by`, 0 to 31."""
    return bits << by | bits >> 32 - by & (1 << by) - 1


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 `x` stochastically rounded to bf16 by the upper half of random `bits`."""
    rounded = (x.view(torch.int32) + (bits >> 16 & 0xFFFF) & BF16_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def uniform(bits: Tensor, digits: int) -> Tensor:
    """fp32 numbers in [0, 1) of up to 24 binary digits: the upper ones of random `bits`."""
    return (bits >> 32 - digits & (1 << digits) - 1).float() * 2.0**-digits
