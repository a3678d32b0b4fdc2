"""Kernels that can run together share a launch."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from kernel_helpers import by_rows, fused, programs_of, random

from fp8pass.codegen.kernels.launch import MOST_PARTS
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.kernels.tile_kernel import tiles

fp8 = torch.ops.fp8pass


@pytest.mark.parametrize(("most", "together"), [(40 * 32, [3]), (40 * 32 - 1, [2, 1])])
def test_available_inputs_are_quantized_together(monkeypatch, most, together):
    """Unless FP8 data, as many bytes as `y` and `z` have elements, would be in memory too early."""
    monkeypatch.setattr(import_module("fp8pass.passes.lowering.fuse_launches"), "MOST_EARLY", most)

    def function(x, y, z):
        a, _ = by_rows(x)
        b, _ = by_rows(y)
        c, _ = by_rows(z)
        return a.int() + 1, b, c

    sizes = random(40, 64), random(16, 32), random(24, 32)
    assert programs_of(fused(monkeypatch, function, *sizes), rows) == together


@pytest.mark.parametrize("most", [16 * 32 * 5, 16 * 32 * 5 - 1])
def test_large_kernels_have_their_own_launch(monkeypatch, most):
    """The kernel reads `y` in FP32, and writes one byte for each element."""
    monkeypatch.setattr(import_module("fp8pass.passes.lowering.fuse_launches"), "MOST_MOVED", most)

    def function(x, y):
        return by_rows(x)[0], by_rows(y)[0]

    gm = fused(monkeypatch, function, random(40, 64), random(16, 32))
    assert programs_of(gm, rows) == ([2] if most == 16 * 32 * 5 else [1, 1])


def test_an_operator_has_not_too_many_programs(monkeypatch):
    def function(*args):
        return tuple(by_rows(x)[0] for x in args)

    gm = fused(monkeypatch, function, *(random(2 + i, 32) for i in range(MOST_PARTS + 1)))
    assert programs_of(gm, rows) == [MOST_PARTS, 1]


@pytest.mark.parametrize("order", ["before", "after"])
def test_kernels_that_store_a_concatenation_are_not_fused(monkeypatch, order):
    def function(x, y, z, s):
        def codes(x):
            return fp8.quantize(x, s, "e4m3 tensor")

        def turned(x):
            return fp8.transpose(x).view(torch.uint8)

        c = turned(codes(z)) if order == "before" else z
        a, b = codes(x), codes(y)
        both = turned(a), turned(b), fp8.joined([a, b]).view(torch.uint8)
        return turned(codes(z)) if order == "after" else c, *both

    args = random(32, 64), random(32, 48), random(16, 32), torch.tensor(0.01)
    assert sorted(programs_of(fused(monkeypatch, function, *args), tiles)) == [1, 2]


def test_kernels_follow_the_kernels_that_they_read(monkeypatch):
    def function(x, w):
        a, _ = by_rows(x)
        b, _ = by_rows((a.int() @ a.int().t()).float())
        c, _ = by_rows(w)
        return a, b, c

    gm = fused(monkeypatch, function, random(32, 64), random(16, 32))
    assert programs_of(gm, rows) == [1, 2]


def test_both_kinds_of_kernels(monkeypatch):
    """Each kind has its own launches."""

    def function(x, y, s):
        a, _ = by_rows(x)
        b = fp8.quantize(y, s, "e4m3 tensor")
        c, _ = by_rows(y)
        d = fp8.quantize(x, s, "e4m3 tensor")
        turned = (fp8.transpose(codes).view(torch.uint8) for codes in (b, d))
        return a, c, *turned

    gm = fused(monkeypatch, function, random(32, 64), random(48, 32), torch.tensor(0.01))
    assert (programs_of(gm, rows), programs_of(gm, tiles)) == ([2], [2])


def test_fused_launches_can_be_disabled(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_launches,fuse_scales")

    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.amax(of_x, "tensor"), fp8.amax(of_y, "tensor")

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert programs_of(gm, rows) == [1, 1]
