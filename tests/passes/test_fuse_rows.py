"""Row kernels store only values that have users."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import by_rows, fused, random

from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.program.program_batch import Batch

fp8 = torch.ops.fp8pass


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("format", "planes"), [("e4m3", 1), ("e2m1", 1), ("e2m2", 2)])
def test_a_value_saved_in_groups_is_stored_in_groups_alone(monkeypatch, format, planes):
    how = f"{format} 1×16"

    def function(x):
        y = torch.tanh(x)
        scales = fp8.scale(fp8.amax(y, "1×16"), how)
        saved = [fp8.quantize(y, scales, how, i).view(torch.uint8) for i in range(planes)]
        data, _ = by_rows(y)
        return data, *saved, scales

    gm = fused(monkeypatch, function, random(40, 64))
    (kernel,) = gm.graph.find_nodes(op="call_function", target=rows)
    (program,) = Batch.parse(str(kernel.args[1])).programs
    assert sorted(store.layouts for store in program.stores) == [("groups",), ("rows",)]
    assert not gm.graph.find_nodes(op="call_function", target=fp8.amax.default)


def test_the_same_plane_twice_is_not_stored_by_the_kernel(monkeypatch):
    """The kernel stores each plane of a format once."""
    how = "e2m2 1×16"

    def function(x):
        y = torch.tanh(x)
        scales = fp8.scale(fp8.amax(y, "1×16"), how)
        data, _ = by_rows(y)
        return data, fp8.quantize(y, scales, how, 0), fp8.quantize(y, scales, how, 0), scales

    gm = fused(monkeypatch, function, random(40, 64))
    (kernel,) = gm.graph.find_nodes(op="call_function", target=rows)
    (program,) = Batch.parse(str(kernel.args[1])).programs
    assert ("groups",) not in [store.layouts for store in program.stores]


def test_a_value_in_fp32_is_stored_in_16_bits_if_only_its_cast_is_used(monkeypatch):
    """As the norm of DiT, which no row kernel can compute, under autocast."""

    def function(x, scale):
        wide = x.float().view(4, 10, 64) * scale  # [4, 1, 64]: each value for ten rows
        narrow = wide.bfloat16().view(40, 64)
        return by_rows(narrow)

    args = random(40, 64).bfloat16(), random(4, 64).view(4, 1, 64)
    gm = fused(monkeypatch, function, *args)
    (kernel,) = gm.graph.find_nodes(op="call_function", target=rows)
    (loaded,) = kernel.args[0]
    assert loaded.meta["val"].dtype == torch.bfloat16


def in_blocks(x, how="e4m3 1×128 fp32"):
    """Quantize in blocks of 128 columns. Return the FP8 data as bytes, and the scales."""
    scales = fp8.scale(fp8.amax(x, "1×128"), how)
    return fp8.quantize(x, scales, how).view(torch.uint8), scales


def test_an_operand_in_blocks_is_stored_with_a_norm(monkeypatch):
    """Beside the same value in groups for the backward."""

    def function(x, weight):
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
        saved = fp8.scale(fp8.amax(x, "1×128"), "e4m3 1×128")
        data = fp8.quantize(x, saved, "e4m3 1×128").view(torch.uint8)
        return *in_blocks(y), data, saved

    gm = fused(monkeypatch, function, random(40, 256), random(256))
    (kernel,) = gm.graph.find_nodes(op="call_function", target=rows)
    (program,) = Batch.parse(str(kernel.args[1])).programs
    assert sorted(store.scale_form for store in program.stores) == ["", "fp32"]
    for target in (fp8.amax.default, fp8.quantize.default):
        assert not gm.graph.find_nodes(op="call_function", target=target)


def test_other_blocks_are_not_stored_by_the_kernel(monkeypatch):
    def function(x):
        square = fp8.scale(fp8.amax(x, "128×128"), "e4m3 128×128 fp32")
        data = fp8.quantize(x, square, "e4m3 128×128 fp32").view(torch.uint8)
        return *in_blocks(x.t()), data, *in_blocks(x, "e4m3 1×128 e8m0")

    gm = fused(monkeypatch, function, random(128, 128).bfloat16())
    assert not gm.graph.find_nodes(op="call_function", target=rows)
