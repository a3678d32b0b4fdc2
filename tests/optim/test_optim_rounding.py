"""Stochastic rounding of weights and second moments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_helpers import parameters, run, values_of
from torch import nn

from fp8pass.optim import AdamW, rounding


def test_stochastic_rounding_is_unbiased_and_uncorrelated():
    x = torch.full((1 << 16,), 1 + 0.3 * 2**-7)
    element = torch.arange(len(x))
    key = rounding.keys(0, torch.tensor([3], dtype=torch.int32), torch.tensor([7.0]))
    up = rounding.round_to_bf16(x, rounding.random_bits(key, element)).float() > 1
    assert up.double().mean().item() == pytest.approx(0.3, abs=0.01)
    bits = up.double() - 0.3
    for other in ((1, 3, 7.0), (0, 4, 7.0), (0, 3, 8.0)):
        seed, number, step = other
        key = rounding.keys(seed, torch.tensor([number], dtype=torch.int32), torch.tensor([step]))
        again = rounding.round_to_bf16(x, rounding.random_bits(key, element)).float() > 1
        assert abs((bits * (again.double() - 0.3)).mean().item()) < 0.005
    for lag in (1, 2, 128):
        assert abs((bits[lag:] * bits[:-lag]).mean().item()) < 0.005


@given(st.integers(-(2**40), 2**40))
def test_stochastic_rounding_keeps_what_bf16_holds(seed):
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([special, torch.randn(100)]).bfloat16().float()
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    bits = rounding.random_bits(key, torch.arange(len(x), dtype=torch.int32))
    rounded = rounding.round_to_bf16(x, bits).float()
    assert torch.equal(rounded.nan_to_num(7), x.nan_to_num(7))


def test_elements_are_numbered_beyond_32_bits():
    """As the kernel does it, which adds the number of a pair to the key: one of 2^32 keys."""
    key = torch.tensor([5], dtype=torch.int32)
    element = torch.arange(100)
    far = rounding.random_bits(key, element + 2**31)
    assert torch.equal(far, rounding.random_bits(key + 2**30, element))
    assert not torch.equal(far, rounding.random_bits(key, element))


@given(st.integers(-(2**31), 2**31 - 1))
def test_noise_is_uniform(seed):
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    bits = rounding.random_bits(key, torch.arange(1 << 14, dtype=torch.int32))
    noise = rounding.uniform(bits).double()
    assert -0.5 <= noise.min() < -0.49
    assert 0.49 < noise.max() < 0.5
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.square().mean().item() == pytest.approx(1 / 12, rel=0.03)
    # Weights are rounded by the other bits.
    low = (bits & 0xFFFF).double() / 65536 - 0.5
    assert abs((noise * low).mean().item()) < 0.004


@pytest.mark.parametrize("name", ["e4m3+expand", "e5m2+expand", "fp16"])
def test_second_moments_follow_gradients_that_shrink(name):
    """Rounded to nearest they would stay five times too large: 0.1% of them is no step."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, betas=(0.0, 0.999), second_moment=name)
    exact = torch.zeros(4096)
    torch.manual_seed(0)
    for step in range(2000):
        p.grad = torch.randn(4096) * (1.0 if step < 500 else 0.2)
        exact = 0.999 * exact + 0.001 * p.grad**2
        optimizer.step()
    found = values_of(optimizer, 0, "exp_avg_sq", False)
    assert (found.mean() / exact.mean()).item() == pytest.approx(1, abs=0.15)
    assert (exact / found).sqrt().mean().item() == pytest.approx(1, abs=0.1)


def test_same_seed_same_results():
    results = []
    for seed in (0, 0, 1):
        params = parameters(dtype=torch.bfloat16)
        run(params, AdamW(params, seed=seed), range(3))
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
