"""Number formats: what their error is said to be, and how rows are cut into groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.formats import E4M3, E4M3_BYTES, E5M2, EXACT, FORMATS, divisor_group


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_relative_error_is_that_of_log_uniform_values(fmt):
    exponents = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 8 - 4
    x = exponents.exp2()
    error = ((x.to(fmt.dtype).float() - x) / x).square().mean().sqrt().item()
    assert fmt.relative_error == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_limits_are_those_of_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert 2.0**fmt.min_exponent == info.smallest_normal
    assert 2.0**-fmt.mantissa == info.eps


def test_only_exact_is_lossless():
    assert [f.name for f in FORMATS.values() if f.lossless] == ["exact"]
    assert EXACT.relative_error == 0
    assert E4M3_BYTES.relative_error == E4M3.relative_error


@given(st.integers(1, 6000), st.integers(1, 32).map(lambda n: 16 * n))
def test_divisor_group_is_the_largest(length, group_size):
    divisors = [d for d in range(16, group_size + 1) if length % d == 0]
    assert divisor_group(length, group_size) == max(divisors, default=None)


@given(st.integers(0, 40))
def test_divisor_group_of_short_rows(length):
    assert divisor_group(length, 128) == (length if length >= 16 else None)
