"""Number formats: their stated errors, and the groups of rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.dialect.encoding import decode, encode
from fp8pass.dialect.formats import (
    E2M1,
    E2M2,
    E2M3,
    E2M5,
    E4M3,
    E4M3_BYTES,
    E5M2,
    EXACT,
    FORMATS,
    divisor_group,
)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_relative_error_of_log_uniform_values(fmt):
    exponents = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)) * 8 - 4
    x = exponents.exp2()
    error = ((x.to(fmt.dtype).float() - x) / x).square().mean().sqrt().item()
    assert fmt.relative_error == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_limits_equal_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert 2.0**fmt.min_exponent == info.smallest_normal
    assert 2.0**-fmt.mantissa == info.eps


@pytest.mark.parametrize("fmt", [E2M1, E2M2, E2M3, E2M5])
def test_limits_equal_the_decoded_limits(fmt):
    values = decode(torch.arange(1 << fmt.bits - 1, dtype=torch.uint8), fmt)
    assert values[-1] == values.max() == fmt.max
    assert values[1 << fmt.mantissa] == 2.0**fmt.min_exponent
    assert fmt.packed == (fmt.bits < 8)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3_BYTES, E2M1, E2M2, E2M3, E2M5])
def test_half_step_is_the_largest_relative_error(fmt):
    x = torch.linspace(1, 4, (1 << 12) + 1) * 2.0**fmt.min_exponent
    codes = encode(x, fmt)
    largest = ((decode(codes, fmt) - x).abs() / x).max().item()
    assert largest <= fmt.half_step
    # The relative error of a tie half a step above a power of two.
    assert largest == pytest.approx(fmt.half_step / (1 + fmt.half_step), rel=0.01)


@pytest.mark.parametrize(("fmt", "bits"), [(E4M3, 8), (E2M1, 4), (E2M2, 5), (E2M3, 6)])
def test_stored_bytes(fmt, bits):
    assert fmt.bits == bits
    assert fmt.stored_bytes(4096, 128) == 4096 * bits / 8 + 32 * 2


def test_groups_must_fill_whole_bytes():
    assert E2M1.stored_bytes(510, 51) == math.inf
    assert E2M2.stored_bytes(440, 44) == math.inf
    assert math.isfinite(E2M1.stored_bytes(440, 44))
    assert math.isfinite(E4M3.stored_bytes(510, 51))


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
