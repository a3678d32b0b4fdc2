"""The statistics of a tensor compared with float64, and merged from parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8pass.dialect.formats import FORMATS
from fp8pass.stability.monitor import statistics
from fp8pass.stability.monitor.statistics import TensorName, make_row, measure, merge

fp8 = torch.ops.fp8pass
NAME = TensorName("m", "input", "row", "e4m3", torch.float32)
SPECIAL = [0.0, -0.0, 1e-40, 3e-39, 6e4, math.inf, -math.inf, math.nan, 1e30]


@st.composite
def matrices(draw):
    """Draw values of many magnitudes, some of them special, in fp32, bf16 or fp16."""
    rows, columns = draw(st.integers(1, 5)), draw(st.sampled_from([16, 32, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    spread = draw(st.sampled_from([0.0, 4.0, 12.0]))
    exponents = torch.randn(rows, columns, generator=generator) * spread
    x = torch.randn(rows, columns, generator=generator) * exponents.exp2()
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def reference(x, dequantized, quantized, fmt):
    """Compute the statistics in float64."""
    finite = x.isfinite()
    exact, back = x.double()[finite], dequantized.double()[finite]
    signal, noise = exact.square().sum(), (exact - back).square().sum()
    nonzero = exact != 0
    return {
        "elements": x.numel(),
        "amax": exact.abs().max().item() if len(exact) else 0.0,
        "saturated": (quantized[finite].abs() == fmt.max).sum().item() / x.numel(),
        "underflow": (nonzero & (quantized[finite] == 0)).sum().item()
        / max(nonzero.sum().item(), 1),
        "sqnr_db": math.inf if noise == 0 else (10 * torch.log10(signal / noise)).item(),
        "nonfinite": (~finite).sum().item(),
    }


# Above this SQNR noise is dominated by fp32 rounding.
HIGH = 90.0


def check(totals, expected):
    row = make_row(0, "m", NAME, totals.tolist())
    for field, value in expected.items():
        got = getattr(row, field)
        if field == "sqnr_db" and got > HIGH:
            assert value > HIGH
        else:
            allowed = fp32_rounding(got) if field == "sqnr_db" else None
            assert got == pytest.approx(value, rel=1e-5, abs=allowed, nan_ok=True), field


def fp32_rounding(sqnr_db):
    """Return the uncertainty in dB of an SQNR from rounding in fp32. It grows with the SQNR."""
    return 20 / math.log(10) * 2**-22 * 10 ** (sqnr_db / 20)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@given(x=matrices())
def test_statistics_of_linear_operands_are_right(x, format, by_row):
    scale = fp8.scale(fp8.amax(x, "row") if by_row else fp8.amax(x, "tensor"), f"{format} row")
    data = fp8.quantize(x, scale, f"{format} tensor").float()
    expected = reference(x, data * scale, data, FORMATS[format])
    check(measure(x, scale, FORMATS[format], x.shape[-1]), expected)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("format", ["e4m3", "e4m3_bytes", "e2m3", "e2m2", "e2m1"])
@given(x=matrices())
def test_statistics_of_groups_are_right(x, format, group):
    fmt, group = FORMATS[format], min(group, x.shape[-1])
    scales = fp8.scale(fp8.amax(x, f"1×{group}"), f"{format} 1×{group}")
    planes = [fp8.quantize(x, scales, f"{format} 1×{group}", i) for i in range(len(fmt.planes))]
    back = fp8.dequantize(planes, scales, f"{format} 1×{group}", torch.float32)
    ones = torch.ones_like(scales)
    data = fp8.dequantize(planes, ones, f"{format} 1×{group}", torch.float32)
    check(measure(x, scales, fmt, group), reference(x, back, data, fmt))


@given(x=matrices(), y=matrices())
def test_statistics_of_parts_merge(x, y):
    """Parts are chunks or micro-batches."""
    parts = []
    for part in (x, y):
        flat = part.float().reshape(-1, 16)
        parts.append((flat, fp8.scale(fp8.amax(flat, "row"), "e4m3 row")))
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = measure(*whole, FORMATS["e4m3"], 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CPU_CHUNK", 48)
        (a, b), fmt = parts, FORMATS["e4m3"]
        torch.testing.assert_close(
            merge(measure(*a, fmt, 16), measure(*b, fmt, 16)), expected, equal_nan=True
        )


def test_empty_tensors_have_statistics():
    row = make_row(
        0, "m", NAME, measure(torch.empty(0, 16), torch.ones(0, 1), FORMATS["e4m3"], 16).tolist()
    )
    assert (row.elements, row.amax, row.saturated, row.underflow) == (0, 0.0, 0.0, 0.0)


@given(x=matrices())
def test_finite_values_have_a_good_sqnr(x):
    """This is why a low SQNR has no warning."""
    x = x.float().nan_to_num(1.0, 1.0, 1.0)
    x[x.abs() < 1e-30] = 0  # below this, scales are not proportional to the amax
    scale = fp8.scale(fp8.amax(x, "tensor"), "e4m3 tensor")
    row = make_row(0, "m", NAME, measure(x, scale, FORMATS["e4m3"], x.shape[-1]).tolist())
    assert row.sqnr_db > 24 or row.amax == 0
