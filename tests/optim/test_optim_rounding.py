"""Stochastic rounding of weights and states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_helpers import assert_same_state, moment_values, parameters, run
from torch import nn

from fp8pass.optim import AdamW, rounding
from fp8pass.optim.state_formats import (
    MOMENT_FORMATS,
    StateFormat,
    dequantize,
    moment_format,
    quantize,
)

ROUNDED = tuple(name for name in MOMENT_FORMATS if name != "fp32")
# The largest distance of two values in the upper decade, relative to the largest value.
DISTANCE = {"e4m3": 2**-4, "e5m2": 2**-3, "fp16": 2**-11, "de8": 0.015, "bf16": 2**-8}
PLAIN = tuple(DISTANCE)


def bits_of(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits for elements of `shape`."""
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    return rounding.random_bits(key, torch.arange(math.prod(shape)).view(shape))


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
def test_stochastic_rounding_does_not_change_bf16_values(seed):
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([special, torch.randn(100)]).bfloat16().float()
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    bits = rounding.random_bits(key, torch.arange(len(x), dtype=torch.int32))
    rounded = rounding.round_to_bf16(x, bits).float()
    assert torch.equal(rounded.nan_to_num(7), x.nan_to_num(7))


def test_elements_are_numbered_beyond_32_bits():
    """The kernel adds the index of a pair to the key, which is one of 2^32 keys."""
    key = torch.tensor([5], dtype=torch.int32)
    element = torch.arange(100)
    far = rounding.random_bits(key, element + 2**31)
    assert torch.equal(far, rounding.random_bits(key + 2**30, element))
    assert not torch.equal(far, rounding.random_bits(key, element))


@given(st.integers(-(2**31), 2**31 - 1))
def test_noise_is_uniform(seed):
    bits = bits_of(seed, (1 << 14,))
    noise = rounding.uniform(bits, 20).double()
    assert 0 <= noise.min() < 0.01
    assert 0.99 < noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert (noise - 0.5).square().mean().item() == pytest.approx(1 / 12, rel=0.03)


@given(st.integers(-(2**31), 2**31 - 1))
def test_states_are_rounded_by_bits_of_their_own(seed):
    bits = bits_of(seed, (1 << 14,))
    noises = [
        rounding.uniform(rounding.rotate(bits, by), 16).double() - 0.5
        for by in sorted(set(rounding.ROTATIONS.values()))
    ]
    for i, noise in enumerate(noises):
        for other in noises[:i]:
            assert abs((noise * other).mean().item()) < 0.004


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", PLAIN)
@given(st.integers(0, 2**31 - 1))
def test_the_mean_of_many_roundings_is_the_number(name, signed, seed):
    format = moment_format(name, signed=signed)
    generator = torch.Generator().manual_seed(seed)
    x = 0.1 + 0.9 * torch.rand(128, generator=generator)
    if signed:
        x *= torch.randn(128, generator=generator).sign()
    x = x.expand(1 << 10, 128)
    found = dequantize(quantize(x, format, bits_of(seed, tuple(x.shape))), format).double()
    deviation = found.var(0).sqrt() / x.shape[0] ** 0.5
    # A number close to a value of the format may always be rounded to it in this many draws.
    never = 10 / x.shape[0] * DISTANCE[name]
    assert ((found.mean(0) - x[0]).abs() <= 5 * deviation + never).all()


@pytest.mark.parametrize(("name", "bound"), [("e4m3+expand", 1.2e-4), ("e5m2+expand", 2e-4)])
def test_expansion_does_not_bias_the_mean(name, bound):
    """A power of the mean exceeds the mean of powers by 1.7e-4 and 3.9e-4.

    A second moment with a decay of 0.1% would accumulate that to a sixth and more.
    """
    format = moment_format(name, signed=False)
    x = 10 ** (-2 * torch.rand(1 << 12, 128, generator=torch.Generator().manual_seed(0)))
    found = dequantize(quantize(x, format, bits_of(0, tuple(x.shape))), format)
    upper = x > 0.1  # the rest are subnormal numbers, which are further apart
    assert abs((found / x - 1)[upper].double().mean().item()) < bound


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", PLAIN)
@given(st.integers(0, 2**31 - 1), st.integers(-20, 20))
def test_values_of_a_format_are_not_rounded(name, signed, seed, exponent):
    format = moment_format(name, signed=signed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(64, 128, generator=generator) - (0.5 if signed else 0.0)
    x[:, 0] = 1.0
    if format.grouped:
        x = dequantize(quantize(x, format)._replace(scale=torch.ones(64)), format)
        x[:, 0] = format.max  # determines the scale
    else:
        x = x.bfloat16().float()
    x = x * 2.0**exponent
    found = dequantize(quantize(x, format, bits_of(seed, tuple(x.shape))), format)
    assert torch.equal(found, x)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ROUNDED)
@given(st.integers(0, 2**31 - 1))
def test_nonfinite_values_stay_and_finite_values_stay_finite(name, signed, seed):
    format = moment_format(name, signed=signed)
    x = torch.rand(4, 128, generator=torch.Generator().manual_seed(seed)) * 1e38
    x[1, 5], x[2, 9] = torch.nan, torch.inf
    found = dequantize(quantize(x, format, bits_of(seed, tuple(x.shape))), format)
    assert not found[1, 5].isfinite()
    assert not found[2, 9].isfinite()
    assert found[::3].isfinite().all()
    zeros = torch.zeros(1, 128)
    assert torch.equal(dequantize(quantize(zeros, format, bits_of(seed, (1, 128))), format), zeros)


@pytest.mark.long
@pytest.mark.parametrize("name", ROUNDED)
def test_second_moments_follow_gradients_that_shrink(name):
    """Rounded to nearest they would stay five times too large, because a decay of 0.1% is lost."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, betas=(0.0, 0.999), first_moment="fp32", second_moment=name)
    exact = torch.zeros(4096)
    torch.manual_seed(0)
    for step in range(2000):
        p.grad = torch.randn(4096) * (1.0 if step < 500 else 0.2)
        exact = 0.999 * exact + 0.001 * p.grad**2
        optimizer.step()
    found = moment_values(optimizer, 0, "exp_avg_sq")
    assert (found.mean() / exact.mean()).item() == pytest.approx(1, abs=0.15)
    assert (exact / found).sqrt().mean().item() == pytest.approx(1, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("name", ROUNDED)
def test_first_moments_follow_gradients_that_shrink(name):
    """A slow first moment decays by 0.1%, too.

    With expansion an error of rounding to nearest enlarges the range of the group, which enlarges
    the next error.
    """
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, betas=(0.999, 0.999), first_moment=name, second_moment="fp32")
    torch.manual_seed(0)
    mean = torch.randn(4096)
    exact = torch.zeros(4096)
    for step in range(2000):
        p.grad = (mean + 0.3 * torch.randn(4096)) * (1.0 if step < 500 else 0.2)
        exact = 0.999 * exact + 0.001 * p.grad
        optimizer.step()
    found = moment_values(optimizer, 0, "exp_avg")
    assert ((found @ exact) / (exact @ exact)).item() == pytest.approx(1, abs=0.15)


def values_of_format(format: StateFormat) -> torch.Tensor:
    """Return all finite values of a format, fp64, ascending."""
    if format.values:
        return torch.tensor(format.values, dtype=torch.float64)
    bits = torch.arange(2 ** (8 * format.dtype.itemsize)).to(
        torch.int16 if format.dtype.itemsize == 2 else torch.uint8
    )
    values = bits.view(format.dtype).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", PLAIN)
@given(st.integers(0, 2**31 - 1), st.integers(-20, 20))
def test_nearest_is_within_half_a_step(name, signed, seed, exponent):
    """The error is at most half the distance of the neighbouring values."""
    format = moment_format(name, signed=signed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(8, 128, generator=generator) - (0.5 if signed else 0.0)
    x = x * 2.0**exponent
    stored = quantize(x, format)
    scale = 1.0 if stored.scale is None else stored.scale.double().unsqueeze(-1)
    exact, found = (y.double() / scale for y in (x, dequantize(stored, format)))
    values = values_of_format(format)
    if not signed:
        values = values[values > 0]  # no divisor becomes zero
    above = torch.searchsorted(values, exact).clamp(1, len(values) - 1)
    distance = torch.minimum((exact - values[above - 1]).abs(), (values[above] - exact).abs())
    assert ((found - exact).abs() <= distance * (1 + 1e-4) + 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", [name for name in ROUNDED if name.endswith("+expand")])
@given(st.integers(0, 2**31 - 1))
def test_nearest_is_within_half_a_step_of_expanded_values(name, signed, seed):
    """The bound applies to quantized values, which are powers of the states."""
    format = moment_format(name, signed=signed)
    x = 10 ** (-3 * torch.rand(8, 128, generator=torch.Generator().manual_seed(seed)))
    if signed:
        x[:, ::2] *= -1
    stored = quantize(x, format)
    scale, power = (y.double().unsqueeze(-1) for y in (stored.scale, stored.power))
    found = dequantize(stored, format).double()
    exact, found = ((y.abs() / scale) ** power * format.middle for y in (x.double(), found))
    values = values_of_format(format)
    values = values[values > 0] if not signed else values[values >= 0]
    above = torch.searchsorted(values, exact).clamp(1, len(values) - 1)
    distance = torch.minimum((exact - values[above - 1]).abs(), (values[above] - exact).abs())
    # Logarithms in fp32 have an error of 1e-6. It is multiplied by the power, which is up to 64.
    assert ((found - exact).abs() <= distance + 1e-4 * exact).all()


def test_states_rounded_to_nearest_do_not_depend_on_the_seed():
    results = []
    for rounding_, seed in (("nearest", 0), ("nearest", 1), ("stochastic", 0)):
        params = parameters(dtype=torch.bfloat16)
        optimizer = AdamW(params, weights="fp16", state_rounding=rounding_, seed=seed)
        run(params, optimizer, range(3))
        results.append(optimizer)
    assert_same_state(*results[:2])
    with pytest.raises(AssertionError):
        assert_same_state(*results[1:])


@pytest.mark.parametrize("name", ROUNDED)
def test_states_rounded_to_nearest_equal_quantize(name):
    """The moments after one step are (1 - β₁) g and (1 - β₂) g²."""
    (p,) = parameters(((4, 128),))
    optimizer = AdamW([p], first_moment=name, second_moment=name, state_rounding="nearest")
    run([p], optimizer, range(1))
    for state, signed, exact in (
        ("exp_avg", True, 0.1 * p.grad),
        ("exp_avg_sq", False, 0.001 * p.grad**2),
    ):
        format = moment_format(name, signed=signed)
        want = dequantize(quantize(exact, format), format).reshape(-1)
        found = moment_values(optimizer, 0, state)
        off = (found - want).abs() > 1e-5 * want.abs()
        assert off.sum() <= 0.01 * want.numel()  # ties


def test_same_seed_same_results():
    results = []
    for seed in (0, 0, 1):
        params = parameters(dtype=torch.bfloat16)
        run(params, AdamW(params, seed=seed), range(3))
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
