"""One kernel computes the amaxes and scales that no operator between them needs."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from kernel_helpers import by_rows, fused, programs_of, random, use_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import hardware
from fp8pass.codegen.kernels.row_kernel import LONGEST_REDUCED, rows
from fp8pass.codegen.kernels.tile_kernel import tiles
from fp8pass.codegen.program.program_batch import Batch

fp8 = torch.ops.fp8pass


def test_scales_are_taken_together(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        total = fp8.amax(of_y, "tensor")
        return (
            a,
            b,
            fp8.scale(fp8.amax(of_x, "tensor"), "e4m3 tensor"),
            fp8.scale(total, "e5m2 tensor"),
            total,
        )

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert not {n.target for n in gm.graph.nodes} & {fp8.amax.default, fp8.scale.default}
    assert programs_of(gm, rows) == [2, 2]


def test_amaxes_of_inputs_are_taken_together(monkeypatch):
    def function(x, y):
        return fp8.scale(fp8.amax(x, "tensor"), "e4m3 tensor"), fp8.scale(
            fp8.amax(y, "tensor"), "e4m3 tensor"
        )

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert (programs_of(gm, tiles), programs_of(gm, rows)) == ([2], [2])


def test_scales_of_rows_that_are_inputs_are_taken_first(monkeypatch):
    def function(x, of_y, of_z):
        a, of_x = by_rows(x * fp8.amax(of_y, "tensor"))
        return a, fp8.scale(fp8.amax(of_x, "tensor"), "e4m3 tensor"), fp8.amax(of_z, "tensor")

    gm = fused(monkeypatch, function, random(40, 64), random(24, 1), random(32, 1))
    first = next(n for n in gm.graph.nodes if n.target is rows)
    assert len(first.args[0]) == 2
    assert {x.target for x in first.all_input_nodes} == {torch.ops.aten.reshape.default}


def test_scales_that_something_waits_for_are_taken_apart(monkeypatch):
    def function(x, y):
        a, of_x = by_rows(x)
        scale = fp8.scale(fp8.amax(of_x, "tensor"), "e4m3 tensor")
        b, of_y = by_rows(y * scale)
        return a, b, fp8.amax(of_y, "tensor")

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


def test_each_scale_right_after_its_amax(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return (
            a,
            b,
            fp8.scale(fp8.amax(of_x, "tensor"), "e4m3 tensor"),
            fp8.scale(fp8.amax(of_y, "tensor"), "e4m3 tensor"),
        )

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert programs_of(gm, rows) == [2, 2]
    numbers = [n.meta["val"] for n in gm.graph.nodes if n.target is rows][-1]
    assert [x.numel() for x in numbers] == [1, 1], "amaxes that nothing uses are not stored"


def test_amaxes_of_matrices_stay(monkeypatch):
    """Matrices that a kernel stores, or that other operators compute."""

    def function(x, y, z):
        half, rest = z.split(2)
        normed = [value * torch.rsqrt((value * value).mean(-1, keepdim=True)) for value in (x, y)]
        codes = [by_rows(value)[0] for value in normed]
        return *codes, *normed, *(fp8.amax(value, "tensor") for value in (*normed, half, rest))

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32), random(4, 1))
    assert programs_of(gm, rows) == [2]
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 4


@pytest.mark.long
def test_amaxes_of_symbolic_size_are_not_fused(graphs):
    """Weights have static sizes, so one kernel computes their amaxes."""
    model, x = MLP().bfloat16(), torch.randn(32, 64).bfloat16().requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    forward = graphs[0]
    left = forward.find_nodes(op="call_function", target=fp8.amax.default)
    assert left
    assert all(isinstance(n.args[0].meta["val"].shape[0], torch.SymInt) for n in left)
    programs = [
        p for n in forward.nodes if n.target is rows for p in Batch.parse(n.args[1]).programs
    ]
    assert sum(program.finishes_amax for program in programs) > 1


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="PyTorch asks for the second GPU")
def test_each_device_has_launches_of_its_own(monkeypatch):
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return (
            a,
            b,
            fp8.amax(of_x, "tensor"),
            fp8.amax(of_x * 2, "tensor"),
            fp8.amax(of_y, "tensor"),
        )

    with FakeTensorMode():
        args = [torch.empty(32, 64, device=f"cuda:{i}") for i in range(2)]
        gm = make_fx(function)(*args)
        use_kernels(gm)
    for node in gm.graph.nodes:
        if node.target is rows:
            assert len({x.meta["val"].device for x in node.args[0]}) == 1
    assert programs_of(gm, rows) == [1, 1]


def test_long_amaxes_stay_with_generated_code(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.amax(of_x, "tensor"), fp8.amax(of_y, "tensor")

    gm = fused(monkeypatch, function, random(LONGEST_REDUCED + 1, 16), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


@pytest.mark.parametrize(("rows_of_x", "is_fused"), [(8192, False), (8208, True)])
def test_a_single_amax_is_taken_by_a_kernel_if_inductor_would_need_two(
    monkeypatch, rows_of_x, is_fused
):
    def function(x):
        a, of_x = by_rows(x)
        return a, fp8.scale(fp8.amax(of_x, "tensor"), "e4m3 tensor")

    gm = fused(monkeypatch, function, random(rows_of_x, 16))
    assert programs_of(gm, rows) == [1, 1][: 1 + is_fused]
