"""Masks of simulated formats against a reference that computes with numbers instead of bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.dialect.formats import E4M3, FORMATS, simulated_format
from fp8pass.dialect.masking import is_identity, mask

fp8 = torch.ops.fp8pass
WIDTHS = [(e, m) for e in range(1, 9) for m in range(24)]
MANTISSAS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Return every number of a 16-bit dtype: NaNs, infinities, subnormals, both zeros."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def limits(exponent: int, mantissa: int) -> tuple[float, float]:
    """Return the smallest normal and the largest number of a format, computed independently."""
    known = {(4, 3): 448.0, (2, 1): 6.0, (2, 2): 7.0, (2, 3): 7.5, (2, 5): 7.875}
    bias = 2 ** (exponent - 1) - 1
    least, top = 1 - bias, max(2**exponent - 2 - bias, 1 - bias)
    return 2.0**least, known.get((exponent, mantissa), 2.0**top * (2 - 2.0**-mantissa))


def reference(x: torch.Tensor, exponent: int, mantissa: int, inner=True, outer=True) -> np.ndarray:
    """Mask in float64 (FP8 and back 3.2): round magnitudes down to a grid, then clamp."""
    values = x.double().numpy()
    magnitude = np.abs(values)
    finite = np.isfinite(values) & (values != 0)
    binade = np.floor(np.log2(magnitude, where=finite, out=np.zeros_like(values)))
    step = np.exp2(np.maximum(binade, -126) - mantissa)  # below, float32 has subnormals
    cut = np.floor(np.divide(magnitude, step, where=finite, out=np.zeros_like(values))) * step
    least, largest = limits(exponent, mantissa)
    if exponent < 8 and outer:
        room = min(mantissa, MANTISSAS[x.dtype])
        top = math.frexp(largest)[1] - 1
        cut = np.minimum(cut, math.floor(largest * 2.0 ** (room - top)) * 2.0 ** (top - room))
    if exponent < 8 and inner:
        cut = np.maximum(cut, least)
    return np.where(finite, np.copysign(cut, values), values)


def assert_masked(got: torch.Tensor, want: np.ndarray) -> None:
    numbers = got.double().numpy()
    assert np.array_equal(numbers, want, equal_nan=True)
    zeros = want == 0
    assert np.array_equal(np.signbit(numbers[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize("exponent", range(1, 9))
def test_all_16_bit_values_in_every_format(exponent):
    for dtype, step in ((torch.bfloat16, 1), (torch.float16, 3)):
        x = all_values(dtype)
        for mantissa in range(0, 24, step):
            got = fp8.mask_format(x, f"e{exponent}m{mantissa}", True, True)
            assert got.dtype is dtype
            assert_masked(got, reference(x, exponent, mantissa))


@given(
    st.sampled_from(WIDTHS),
    st.lists(st.floats(width=32), min_size=1, max_size=50),
    st.sampled_from(list(MANTISSAS)),
    st.booleans(),
    st.booleans(),
)
def test_any_values_clamped_inside_and_outside_separately(widths, values, dtype, inner, outer):
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    got = fp8.mask_format(x, "e{}m{}".format(*widths), inner, outer)
    assert_masked(got, reference(x, *widths, inner, outer))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e8m7", torch.bfloat16), ("e8m10", torch.float16), ("e8m12", torch.float16)],
)
def test_formats_that_hold_a_16_bit_dtype_are_the_identity(name, dtype):
    x = all_values(dtype)
    assert is_identity(simulated_format(name), dtype)
    got, finite = fp8.mask_format(x, name, True, True), ~x.isnan()  # the payload of NaN may change
    assert torch.equal(got.view(torch.int16)[finite], x.view(torch.int16)[finite])
    assert got.isnan().equal(x.isnan())


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_e8m23_is_the_identity_of_float32(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert is_identity(simulated_format("e8m23"), torch.float32)
    got = fp8.mask_format(x, "e8m23", True, True)
    assert torch.equal(got.view(torch.int32), x.view(torch.int32))


def test_masks_are_idempotent_and_keep_the_layout():
    x = torch.randn(6, 8).bfloat16().t()
    once = fp8.mask_format(x, "e5m2", True, True)
    assert torch.equal(fp8.mask_format(once, "e5m2", True, True), once)
    assert once.stride() == x.stride()


def test_nan_stays_nan_when_its_payload_is_cut_off():
    signalling = torch.tensor([0x7F800001, 0x7F810000]).to(torch.int32).view(torch.float32)
    assert mask(signalling, simulated_format("e8m0"), True, True).isnan().all()


def test_simulated_formats_in_the_table():
    assert simulated_format("e4m3") is E4M3
    assert all(simulated_format(f.name) is f for f in FORMATS.values() if f.saves or f.multiplies)


@pytest.mark.parametrize("name", ["e8m7", "e5m10", "e8m23"])
def test_other_simulated_formats_follow_ieee(name):
    fmt = simulated_format(name)
    info = torch.finfo({"e8m7": torch.bfloat16, "e5m10": torch.float16}.get(name, torch.float32))
    assert (fmt.max, 2.0**fmt.min_exponent) == (info.max, info.smallest_normal)
    assert 2.0**-fmt.mantissa == info.eps
    assert not fmt.lossless


@pytest.mark.parametrize("name", ["e9m3", "e0m3", "e8m24", "m3e8", "fp8", "e8m3 "])
def test_invalid_format_names(name):
    with pytest.raises(ValueError, match="is not a format"):
        simulated_format(name)
