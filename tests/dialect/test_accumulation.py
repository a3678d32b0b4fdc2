"""Sums of products as Hopper's FP8 tensor cores compute them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fp8pass
from fp8pass import Config
from fp8pass.config import RECIPES
from fp8pass.dialect.accumulation import (
    FRACTION_BITS,
    INSTRUCTION,
    PROMOTION,
    accumulate,
    hardware_accumulation,
    product,
)
from fp8pass.testing import Reference, assert_close, step
from fp8pass.testing.noise import Formats

LONG = 16384
# The largest error that the rounding of a BF16 result hides.
BF16_ERROR = 2.0**-9


def correlated(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Return a matrix with a mean of half its standard deviation."""
    return (torch.randn(rows, columns) + 0.5).to(dtype)


def error(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative L2 error of `a @ b.T`."""
    exact = a.double() @ b.double().T
    return float((found.double() - exact).norm() / exact.norm())


def small_sum(terms: list[float], *, fast: bool = True) -> float:
    """Sum like tensor cores: each term is its product with 1."""
    a = torch.tensor([terms]).to(torch.float8_e4m3fn)
    assert torch.equal(a.float(), torch.tensor([terms]))
    return accumulate(a, torch.ones_like(a.float()).to(a.dtype), fast=fast).item()


@pytest.mark.parametrize("sign", [1, -1])
def test_addends_are_truncated_13_bits_below_the_largest(sign):
    """As an H100 computes 1 ± 2^-p."""
    for power in range(6, 18):
        a = torch.zeros(1, 32)
        b = torch.zeros(1, 32)
        a[0, 0] = b[0, 0] = 1
        a[0, 1], b[0, 1] = sign * 2.0 ** -(power // 2), 2.0 ** -(power - power // 2)
        found = accumulate(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), fast=True)
        kept = power <= FRACTION_BITS
        # 1 - 2^-14 and so on: the addend is truncated towards zero, not the difference.
        assert found.item() == 1 + sign * kept * 2.0**-power


def test_the_running_sum_is_an_addend():
    """Products of a later instruction are aligned to it."""
    tiny = 2.0**-9
    assert small_sum([tiny] * 32) == 32 * tiny
    assert small_sum([448.0] + [0.0] * 31 + [tiny] * 32) == 448
    assert small_sum([0.0] * 31 + [tiny] + [448.0]) == 448


def test_precise_accumulation_adds_to_an_fp32_sum():
    """After 128 products a new running sum starts."""
    tiny = 2.0**-9
    terms = [448.0] + [0.0] * (PROMOTION - 1) + [tiny] * PROMOTION
    assert small_sum(terms, fast=True) == 448
    assert small_sum(terms, fast=False) == 448 + PROMOTION * tiny
    within = [448.0] + [0.0] * (INSTRUCTION - 1) + [tiny] * (PROMOTION - INSTRUCTION)
    assert small_sum(within, fast=False) == 448


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 20), st.integers(0, 3))
def test_an_exact_sum_is_exact(rows, columns, length, seed):
    """Small integers are not truncated."""
    torch.manual_seed(seed)
    a, b = (torch.randint(-4, 5, (n, 16 * length)).float() for n in (rows, columns))
    for fast in (False, True):
        found = accumulate(*(x.to(torch.float8_e4m3fn) for x in (a, b)), fast=fast)
        assert torch.equal(found, a @ b.T)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("fast", [False, True])
def test_nan_and_inf(dtype, fast):
    a, b = correlated(3, 160, dtype).float(), correlated(4, 160)
    a[0, 3] = torch.nan
    if dtype is torch.float8_e5m2:
        a[1, 70] = torch.inf
    found = accumulate(a.to(dtype), b, fast=fast)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all() == (dtype is not torch.float8_e5m2)
    assert found[2].isfinite().all()


def test_blocks_of_rows_make_no_difference(monkeypatch):
    a, b = correlated(33, 256), correlated(16, 256)
    whole = accumulate(a, b, fast=True)
    monkeypatch.setattr("fp8pass.dialect.accumulation._BLOCK", 32 * 16 * 4)
    assert torch.equal(accumulate(a, b, fast=True), whole)


def test_fast_accumulation_has_the_error_of_an_h100():
    """Relative errors of correlated operands, measured by `benchmarks/accumulation.py`."""
    torch.manual_seed(0)
    for length, fast, precise in ((1024, 9.6e-4, 6e-5), (4096, 6.9e-3, 5e-5), (LONG, 3.8e-2, 5e-5)):
        a, b = correlated(32, length), correlated(32, length)
        assert error(accumulate(a, b, fast=True), a, b) == pytest.approx(fast, rel=0.1)
        assert error(accumulate(a, b, fast=False), a, b) == pytest.approx(precise, rel=0.5)


def test_references_sum_in_fp32_by_default():
    a, b = correlated(16, 4096), correlated(16, 4096)
    exact = a.float() @ b.float().T
    assert torch.equal(product(a, b, fast=True), exact)
    with hardware_accumulation(emulate=False):
        assert torch.equal(product(a, b, fast=True), exact)
    with hardware_accumulation():
        assert torch.equal(product(a, b, fast=True), accumulate(a, b, fast=True))
        with hardware_accumulation(emulate=False):  # as `diagnose` has it
            assert torch.equal(product(a, b, fast=False), accumulate(a, b, fast=False))
    assert torch.equal(product(a, b, fast=True), exact)


def wgrad_of(config: Config, tokens: int) -> float:
    """Return the error of a weight gradient that Hopper's accumulation causes."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, (16, 16)))
    # Numbers that E4M3 represents with a power of two as scale.
    x = correlated(tokens, 16).float().clamp(-1.75, 1.75)
    x[0] = 1.75
    gradient = correlated(tokens, 16).float().clamp(-1.75, 1.75)
    gradient[0] = 1.75
    torch.compiler.reset()
    backend = fp8pass.backend(config)
    with hardware_accumulation():
        (torch.compile(layer, backend=backend)(x) * gradient).sum().backward()
    return error(layer.weight.grad, gradient.T, x.T)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "exact"])
def test_the_default_does_not_lose_precision(recipe):
    """At 16384 tokens the error is smaller than the rounding of a BF16 gradient."""
    assert wgrad_of(Config.recipe(recipe, compiler="eager"), LONG) < BF16_ERROR


@pytest.mark.long
def test_fast_accumulation_everywhere_loses_precision():
    """The reference must show the error of fast accumulation in all GEMMs."""
    config = Config(compiler="eager", longest_fast=LONG)
    assert wgrad_of(config, LONG) > 5 * BF16_ERROR
    assert wgrad_of(Config(compiler="eager", fast_accumulation=()), LONG) < BF16_ERROR


def judged(layer: nn.Module, x: torch.Tensor, config: Config, formats: Formats) -> list[str]:
    """Run `assert_close` with other formats."""
    batches = [(x,)]
    with hardware_accumulation():
        torch.compiler.reset()
        twin = copy.deepcopy(layer)
        got = step(torch.compile(twin, backend=fp8pass.backend(config)), twin, batches[0])
    return Reference(layer, lambda: batches, formats).judge([got], more=6).complaints


@pytest.mark.long
def test_assert_close_accounts_for_accumulation():
    """Rounding errors of numbers with one sign average out; truncation does not."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4096, 80, bias=False), torch.rand(8, 4096)
    with torch.no_grad():
        layer.weight.abs_()
    config = Config(compiler="eager")
    assert_close(layer, x, config=config)
    formats = Formats.of(config)
    assert not judged(layer, x, config, formats)
    assert judged(layer, x, config, replace(formats, longest_fast=0))
