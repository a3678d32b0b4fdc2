"""Formats of optimizer states: errors, Dynamic Range Expansion, and values that are not finite."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_helpers import run, set_gradients
from torch import Tensor, nn

from fp8pass.optim import PRESETS, AdamW
from fp8pass.optim.group_options import STATE_ROUNDINGS
from fp8pass.optim.state_formats import (
    ALL_FORMATS,
    MAX_POWER,
    MIN_POWER,
    MOMENT_FORMATS,
    PLAIN,
    Quantized,
    dequantize,
    dynamic_values,
    moment_format,
    quantize,
)

GROUPED = tuple(name for name in MOMENT_FORMATS if name not in PLAIN)
EXPANDED = tuple(name for name in GROUPED if name.endswith("+expand"))


@st.composite
def rows(draw, signed: bool = True) -> Tensor:
    """Return groups with a range between 1 and 1e18, with some zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.floats(0, 18))
    x = 10 ** (-spread * torch.rand(5, 128, generator=generator, dtype=torch.float64))
    x *= 10 ** draw(st.floats(-18, 18))
    if draw(st.booleans()):
        x *= torch.rand(5, 128, generator=generator) < 0.5
    if signed:
        x *= torch.randint(2, x.shape, generator=generator) * 2 - 1
    return x.float()


def largest_step(format) -> float:
    """Return the largest ratio of neighbouring values in the upper half of the format's binades."""
    if format.values:
        values = torch.tensor([x for x in format.values if x > 0], dtype=torch.float64)
    else:
        bits = {1: torch.uint8, 2: torch.int16}[format.dtype.itemsize]
        every = torch.arange(1, 2 ** (8 * format.dtype.itemsize - 1), dtype=torch.int32)
        values = every.to(bits).view(format.dtype).double()
        values = values[values.isfinite()]
    upper = values[values >= format.middle]
    return (upper[1:] / upper[:-1]).max().item()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", GROUPED)
@given(st.data())
def test_errors_are_bounded_by_the_format(name, signed, data):
    format = moment_format(name, signed=signed)
    x = data.draw(rows(signed))
    stored = quantize(x, format)
    y = dequantize(stored, format)
    assert (y.sign() * x.sign() >= 0).all()
    if not signed:
        assert torch.equal(y == 0, x == 0)
    power = 1.0 if stored.power is None else stored.power.float()
    middle = stored.scale.float() * (1 if format.expands else format.middle)
    # Errors of values in the upper half of the format: half a step, to the power of 1/k.
    upper = x.abs() >= middle.unsqueeze(-1) * (1 + 1e-5)
    bound = (largest_step(format) ** (1 / torch.as_tensor(power)) - 1) * (1 + 1e-3)
    error = ((y - x).abs() / x.abs()).nan_to_num()
    assert (error <= bound.reshape(-1, 1) + 1e-4)[upper].all()
    # The error of other values is at most the smallest value in the upper half.
    assert ((y - x).abs() <= middle.unsqueeze(-1) * 1.1)[~upper].all()


@given(rows(signed=True), st.integers(0, 2**31 - 1))
def test_errors_of_int8_are_equal_for_all_elements_of_a_group(x, seed):
    """At most half a step to nearest, and less than a step stochastically, without a bias."""
    format = moment_format("int8", signed=True, choices=ALL_FORMATS)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (64, *x.shape), generator=generator).int()
    nearest, stochastic = quantize(x, format), quantize(x, format, bits[0])
    step = nearest.scale.float().unsqueeze(-1)
    assert torch.equal(nearest.scale, stochastic.scale)
    assert (nearest.data.view(torch.int8) > -128).all()
    error = (dequantize(nearest, format) - x).abs()
    assert (error <= 0.5001 * step).all()
    found = torch.stack([dequantize(quantize(x, format, each), format) for each in bits])
    assert ((found - x).abs() <= 1.0001 * step).all()
    assert ((found.mean(0) - x).abs() <= 5 * 0.5 * step / 64**0.5 + 1e-4 * step).all()


def test_int8_has_smaller_errors_unless_one_element_is_much_larger():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 128, generator=generator)
    bits = torch.randint(-(1 << 31), 1 << 31, x.shape, generator=generator).int()

    def error(x: Tensor, name: str, where: slice) -> float:
        format = moment_format(name, signed=True, choices=ALL_FORMATS)
        found = dequantize(quantize(x, format, bits), format)
        return float((found - x)[:, where].norm() / x[:, where].norm())

    assert error(x, "int8", slice(None)) < 0.8 * error(x, "e4m3+expand", slice(None))
    x[:, 0] = 100.0
    small = slice(1, None)
    assert error(x, "int8", small) > 2 * error(x, "e4m3+expand", small)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", EXPANDED)
@given(st.data())
def test_expansion_maps_a_groups_range_to_the_formats(name, signed, data):
    format = moment_format(name, signed=signed)
    x = data.draw(rows(signed)).double().abs()
    stored = quantize(x.float(), format)
    power = stored.power.double()
    high, low = x.amax(-1), torch.where(x == 0, torch.inf, x).amin(-1)
    span = (high / low).log2()
    fits = (span > format.span / MAX_POWER * 1.05) & (span < format.span / MIN_POWER * 0.95)
    center = stored.scale.double()
    top = (high / center) ** power * format.middle
    bottom = (low / center) ** power * format.middle
    # Scale and power are rounded to bf16, so that nothing leaves the format.
    assert (top <= format.max * 1.001)[fits].all()
    assert (bottom >= format.min * 0.999)[fits].all()
    missing = (math.log2(format.max) - top.log2()) + (bottom.log2() - math.log2(format.min))
    allowed = format.span * 2**-7 + power * 2**-6 + 0.01
    assert (missing <= allowed)[fits].all()


@pytest.mark.parametrize("name", EXPANDED)
@given(st.data())
def test_expansion_is_the_identity_for_a_power_of_one(name, data):
    x = data.draw(rows())
    expanding, plain = moment_format(name, signed=True), moment_format(name[:-7], signed=True)
    stored = quantize(x, plain)
    ones = torch.ones_like(stored.scale)
    middle = stored.scale.double() * expanding.middle
    one = Quantized(stored.data, middle.float(), ones)
    torch.testing.assert_close(
        dequantize(one, expanding), dequantize(stored, plain), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_edge_groups(name):
    format = moment_format(name, signed=False)

    def back(x: Tensor) -> Tensor:
        return dequantize(quantize(x[None], format), format)[0]

    zeros = torch.zeros(128)
    assert torch.equal(back(zeros), zeros)
    outlier = zeros.clone()
    outlier[7] = 3e-9
    assert torch.equal(back(outlier) > 0, outlier > 0)
    torch.testing.assert_close(back(outlier), outlier, rtol=0.01, atol=0)
    equal = torch.full((128,), 1.234e-11)
    torch.testing.assert_close(back(equal), equal, rtol=0.01, atol=0)
    lone = torch.cat([torch.tensor([1.0]), torch.full((127,), 1e-12)])
    assert (back(lone) > 0).all()
    torch.testing.assert_close(back(lone)[0], lone[0], rtol=0.2, atol=0)
    if format.grouped:
        denormal = torch.full((128,), 1e-40)
        assert (back(denormal) <= 1e-38).all()
        assert back(denormal).isfinite().all()
    assert back(torch.full((128,), 1e37)).isfinite().all()
    for bad in (torch.nan, torch.inf):
        x = torch.rand(128)
        x[3] = bad
        assert not back(x)[3].isfinite()


@pytest.mark.parametrize("name", EXPANDED)
def test_a_second_moment_never_becomes_zero(name):
    """The update divides by it: with zero an update would be m / ε."""
    for plain in (name, name.removesuffix("+expand")):
        format = moment_format(plain, signed=False)
        x = torch.logspace(-18, 0, 128)[None]
        assert (dequantize(quantize(x, format), format) > 0).all()


def test_dynamic_values():
    signed, unsigned = dynamic_values(signed=True), dynamic_values(signed=False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[-1] == unsigned[-1] == 1.0
    assert unsigned[0] == 0.0
    assert signed[0] == pytest.approx(-0.99296875)  # the second largest magnitude has both signs
    assert min(x for x in signed if x > 0) == pytest.approx(5.5e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("preset", PRESETS)
def test_bad_gradients_are_not_hidden(preset, bad):
    p = nn.Parameter(torch.randn(300))
    optimizer = AdamW([p], preset=preset)
    run([p], optimizer, range(2))
    p.grad = torch.randn(300)
    p.grad[200] = bad
    optimizer.step()
    assert not p[200].isfinite() or bad == math.inf
    set_gradients([p], 3)
    optimizer.step()
    assert not p[200].isfinite()
    assert p[:128].isfinite().all()


@pytest.mark.long
def test_expansion_lessens_errors_of_states_of_real_training(monkeypatch):
    """COAT reports 1.63 times, and in Table 1 this order of formats of the first moment."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("optimizer")
    states = benchmark.trained_states("tiny", steps=25)
    order = ("e4m3+expand", "e5m2+expand", "e4m3", "e5m2")
    for rounding in STATE_ROUNDINGS:
        errors = {x: benchmark.error(states, x, x, rounding) for x in ("e4m3", "e4m3+expand")}
        assert errors["e4m3"] >= 1.5 * errors["e4m3+expand"]
        found = [benchmark.error(states, first, "e4m3+expand", rounding) for first in order]
        assert found == sorted(found)
