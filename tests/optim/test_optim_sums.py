"""Quantized sums of gradients: the kernels compared with the reference, and values not finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8pass import hardware
from fp8pass.optim.rounding import SumStamp
from fp8pass.optim.slots import group_count
from fp8pass.optim.state_formats import SUM_GROUP_SIZE, Quantized, dequantize, moment_format
from fp8pass.optim.sums import add_from, add_to

pytest.importorskip("triton")

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]


def make_sums(size: int, format, device: str) -> Quantized:
    groups = group_count(size, SUM_GROUP_SIZE)
    data = torch.full((groups, SUM_GROUP_SIZE), 7, dtype=format.storage_dtype, device=device)
    return Quantized(data, torch.full((groups,), 3.0, dtype=torch.bfloat16, device=device))


def summed(monkeypatch, gradients, format, stamp, first, *, kernel: bool):
    """Return the sum of all gradients but the last, and the last gradient plus that sum."""
    with monkeypatch.context() as patch:
        patch.setattr(
            hardware, "why_no_triton_kernels", lambda device: None if kernel else "for comparison"
        )
        sum_ = make_sums(len(gradients[0]), format, gradients[0].device.type)
        for i, gradient in enumerate(gradients[:-1]):
            add_to(sum_, gradient, format, replace(stamp, count=i + 1), first)
        last = gradients[-1].clone()
        add_from(sum_, last, format)
    return sum_, last


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16"])
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 3000), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000), first=st.integers(0, 10).map(lambda n: n * SUM_GROUP_SIZE),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e4]),
)  # fmt: skip
def test_the_kernels_equal_the_reference(device, name, size, dtype, seed, first, scale):
    format = moment_format(name, signed=True)
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        (torch.randn(size, generator=generator) * scale).to(device, dtype) for _ in range(3)
    ]
    gradients[0][: size // 3] = 0
    stamp = SumStamp(seed * 7919, seed, torch.tensor(float(seed), device=device), 1)
    with pytest.MonkeyPatch.context() as patch:
        ours, theirs = (
            summed(patch, gradients, format, stamp, first, kernel=k) for k in (True, False)
        )
    assert torch.equal(ours[0].scale, theirs[0].scale)
    assert torch.equal(ours[0].data.view(torch.uint8), theirs[0].data.view(torch.uint8))
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nonfinite_sums_reach_the_user(device, kernel, monkeypatch):
    format = moment_format("e4m3", signed=True)
    first, second = torch.ones(2, 300, device=device)
    first[130] = torch.inf
    second[0] = torch.nan
    stamp = SumStamp(0, 0, torch.zeros((), device=device), 1)
    _, last = summed(monkeypatch, [first, second, second], format, stamp, 0, kernel=kernel)
    assert not last[:256].isfinite().any()
    assert (last[256:] - 3).abs().max() < 0.2  # a sum of two in E4M3, and one


def test_pieces_are_rounded_as_the_whole():
    format = moment_format("e4m3", signed=True)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    stamp = SumStamp(0, 3, torch.ones(()), 1)
    whole, parts = make_sums(1000, format, "cpu"), make_sums(1000, format, "cpu")
    add_to(whole, gradient, format, stamp, 0)
    for first, size in ((0, 256), (256, 744)):
        rows = slice(first // SUM_GROUP_SIZE, group_count(first + size, SUM_GROUP_SIZE))
        piece = Quantized(parts.data[rows], parts.scale[rows])
        add_to(piece, gradient[first : first + size], format, stamp, first)
    assert torch.equal(dequantize(whole, format), dequantize(parts, format))
