"""Programs that share a launch, and what the graph has them share it for."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers import MLP
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    CAST,
    ROW_CAST,
    assert_same,
    both_devices,
    norm_backward,
    operands,
    run_batch,
    swiglu,
    swiglu_backward,
    use_kernels,
)
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.codegen.kernels import rows as row_kernel
from fp8pass.codegen.kernels import tiles as tile_kernel
from fp8pass.codegen.kernels.launch import MOST_PARTS, grouped, launches
from fp8pass.codegen.kernels.operator import parts_of
from fp8pass.codegen.kernels.rows import LONGEST_HELD, rows
from fp8pass.codegen.kernels.tiles import tiles
from fp8pass.codegen.program.batch import Batch
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.dialect import hardware

pytest.importorskip("triton")
fp8 = torch.ops.fp8pass

SCALE = Program(
    (Load("x", "full"),),
    (Step("a", "row_amax", ("x",)), Step("s", "scale", ("a", "e4m3"))),
    (Store("a", ("row",), dtype="float32"), Store("s", ("row",), dtype="float32")),
)


def parts(module, batch: Batch, inputs: list) -> list:
    return list(parts_of(module.prepare, batch, [x.shape for x in inputs]))


def check_together(module, programs: list[tuple[Program, int, int]], device: str) -> None:
    """Programs of a batch compute what their references do."""
    batch = Batch(tuple(program for program, *_ in programs))
    inputs = [x for program, *size in programs for x in operands(program, *size, device)]
    wanted, found = batch.reference(inputs), run_batch(module, batch, inputs)
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want, exact=False)


SIZES = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 12).map(lambda n: 16 * n)), min_size=1, max_size=4
)


@both_devices
@pytest.mark.parametrize("module", [row_kernel, tile_kernel])
@settings(max_examples=10)
@given(sizes=SIZES)
def test_one_program_on_matrices_of_many_sizes(device, module, sizes):
    program = ROW_CAST if module is row_kernel else CAST
    check_together(module, [(program, *size) for size in sizes], device)


@both_devices
def test_row_programs_of_several_kinds(device):
    programs = [
        (swiglu(16), 5, 96),
        (ROW_CAST, 9, 48),
        (norm_backward(128), 7, 128),
        (SCALE, 1, 300),
    ]
    check_together(row_kernel, programs, device)


@both_devices
def test_tile_programs_of_several_kinds(device):
    check_together(tile_kernel, [(swiglu_backward(16), 40, 48), (CAST, 33, 80)], device)


@both_devices
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_matrix(device, bad):
    batch = Batch((SCALE, SCALE, SCALE))
    inputs = [torch.rand(1, count, device=device) for count in (20, 300, 5)]
    inputs[1][0, 17] = bad
    found = run_batch(row_kernel, batch, inputs)
    for got, want in zip(found, batch.reference(inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert [bool(x.isfinite()) for x in found] == [True, True, False, False, True, True]


@both_devices
def test_a_launch_has_not_too_many_parts(device):
    count = MOST_PARTS + 3
    batch = Batch((ROW_CAST,) * count)
    inputs = [torch.randn(2 + i, 32, device=device).bfloat16() for i in range(count)]
    found = [len(alike) for alike in grouped(parts(row_kernel, batch, inputs))]
    assert found == [MOST_PARTS, 3]
    check_together(row_kernel, [(ROW_CAST, 2 + i, 32) for i in range(count)], device)


def test_parts_of_as_many_warps_share_a_launch():
    batch = Batch((ROW_CAST, ROW_CAST, ROW_CAST))
    inputs = [torch.empty(4, columns, device="meta") for columns in (64, LONGEST_HELD, 128)]
    small, large = launches(parts(row_kernel, batch, inputs))
    assert (sorted(small.inputs), large.inputs) == ([0, 2], (1,))
    assert small.num_warps < large.num_warps
    assert (small.grid, large.grid) == (8, 4)


def test_equal_parts_are_written_once_and_lie_side_by_side():
    batch = Batch((ROW_CAST, SCALE, ROW_CAST, SCALE))
    inputs = [torch.empty(size, device="meta") for size in ((4, 64), (1, 64), (8, 64), (1, 64))]
    (launch,) = launches(parts(row_kernel, batch, inputs))
    assert launch.inputs == (0, 2, 1, 3)
    assert launch.kernel.__name__ == "rows_cast_x2_and_rows_scale_x2"
    source = Path(inspect.getfile(launch.kernel.fn)).read_text()
    assert source.count("def part_") == 2


def test_what_programs_store_side_by_side_is_one_result():
    codes = Store("x", ("rows",), "s", "e4m3", width=96)
    program = Program((Load("s", "scalar"), Load("x", "full")), (), (codes,))
    beside = replace(program, stores=(replace(codes, offset=64),))
    batch = Batch((program, beside))
    one = torch.tensor(1.0, device="meta")
    inputs = [one, torch.empty(32, 64, device="meta"), one, torch.empty(32, 32, device="meta")]
    (launch,) = launches(parts(tile_kernel, batch, inputs))
    assert launch.outputs == (0,)


# --- graphs -------------------------------------------------------------------------------------


def fused(monkeypatch, function, *args: torch.Tensor) -> fx.GraphModule:
    """The graph of a function after kernels took what they take; its results are as before."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    gm = make_fx(function, tracing_mode="fake")(*args)
    use_kernels(gm)
    gm.graph.lint()
    for got, want in zip(gm(*args), function(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return gm


def programs_of(gm: fx.GraphModule, op) -> list[int]:
    """How many programs each operator of a kind runs."""
    return [len(Batch.parse(n.args[1]).programs) for n in gm.graph.nodes if n.target is op]


def by_rows(x):
    """Codes with a scale for each row, and the largest magnitudes of rows."""
    largest = fp8.row_amax(x)
    return fp8.quantize(x, fp8.scale(largest, "e4m3"), "e4m3").view(torch.uint8), largest


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_scales_are_taken_together(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        total = fp8.amax(of_y)
        return a, b, fp8.scale(fp8.amax(of_x), "e4m3"), fp8.scale(total, "e5m2"), total

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert not {n.target for n in gm.graph.nodes} & {fp8.amax.default, fp8.scale.default}
    assert programs_of(gm, rows) == [2, 2]


def test_amaxes_of_inputs_are_taken_together(monkeypatch):
    def function(x, y):
        return fp8.scale(fp8.amax(x), "e4m3"), fp8.scale(fp8.amax(y), "e4m3")

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert (programs_of(gm, tiles), programs_of(gm, rows)) == ([2], [2])


def test_scales_that_something_waits_for_are_taken_apart(monkeypatch):
    def function(x, y):
        a, of_x = by_rows(x)
        scale = fp8.scale(fp8.amax(of_x), "e4m3")
        b, of_y = by_rows(y * scale)
        return a, b, fp8.amax(of_y)

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


def test_each_scale_right_after_its_amax(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.scale(fp8.amax(of_x), "e4m3"), fp8.scale(fp8.amax(of_y), "e4m3")

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert programs_of(gm, rows) == [2, 2]
    numbers = [n.meta["val"] for n in gm.graph.nodes if n.target is rows][-1]
    assert [x.numel() for x in numbers] == [1, 1], "amaxes that nothing uses are not stored"


def test_amaxes_of_matrices_stay(monkeypatch):
    """What a kernel stores besides amaxes, or something else computes."""

    def function(x, y, z):
        half, rest = z.split(2)
        normed = [value * torch.rsqrt((value * value).mean(-1, keepdim=True)) for value in (x, y)]
        codes = [by_rows(value)[0] for value in normed]
        return *codes, *normed, *(fp8.amax(value) for value in (*normed, half, rest))

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32), random(4, 1))
    assert programs_of(gm, rows) == [2]
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 4


def test_amaxes_of_sizes_that_vary_stay(graphs):
    """Those of weights, whose sizes do not, are taken together."""
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


def test_each_device_has_launches_of_its_own(monkeypatch):
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.amax(of_x), fp8.amax(of_x * 2), fp8.amax(of_y)

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
        return a, b, fp8.amax(of_x), fp8.amax(of_y)

    gm = fused(monkeypatch, function, random(LONGEST_HELD + 1, 16), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


@pytest.mark.parametrize(("most", "together"), [(40 * 32, [3]), (40 * 32 - 1, [2, 1])])
def test_what_is_there_is_quantized_together(monkeypatch, most, together):
    """Unless codes, of `y` and `z` as many bytes, would be in memory long before."""
    monkeypatch.setattr(import_module("fp8pass.passes.fuse_launches"), "MOST_EARLY", most)

    def function(x, y, z):
        a, _ = by_rows(x)
        b, _ = by_rows(y)
        c, _ = by_rows(z)
        return a.int() + 1, b, c

    sizes = random(40, 64), random(16, 32), random(24, 32)
    assert programs_of(fused(monkeypatch, function, *sizes), rows) == together


@pytest.mark.parametrize("most", [16 * 32 * 5, 16 * 32 * 5 - 1])
def test_what_takes_longer_than_a_launch_has_its_own(monkeypatch, most):
    """`y`, in fp32, is read, and its codes, of a byte each, are written."""
    monkeypatch.setattr(import_module("fp8pass.passes.fuse_launches"), "MOST_MOVED", most)

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
def test_what_stores_side_by_side_is_an_operator_of_its_own(monkeypatch, order):
    def function(x, y, z, s):
        def codes(x):
            return fp8.quantize(x, s, "e4m3")

        def turned(x):
            return fp8.transpose(x).view(torch.uint8)

        c = turned(codes(z)) if order == "before" else z
        a, b = codes(x), codes(y)
        both = turned(a), turned(b), fp8.joined([a, b]).view(torch.uint8)
        return turned(codes(z)) if order == "after" else c, *both

    args = random(32, 64), random(32, 48), random(16, 32), torch.tensor(0.01)
    assert sorted(programs_of(fused(monkeypatch, function, *args), tiles)) == [1, 2]


def test_what_is_computed_from_codes_is_quantized_after_them(monkeypatch):
    def function(x, w):
        a, _ = by_rows(x)
        b, _ = by_rows((a.int() @ a.int().t()).float())
        c, _ = by_rows(w)
        return a, b, c

    gm = fused(monkeypatch, function, random(32, 64), random(16, 32))
    assert programs_of(gm, rows) == [1, 2]


def test_launches_can_be_kept_apart(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_launches,fuse_scales")

    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.amax(of_x), fp8.amax(of_y)

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert programs_of(gm, rows) == [1, 1]


def test_both_kinds_of_kernels(monkeypatch):
    """Each kind has launches of its own."""

    def function(x, y, s):
        a, _ = by_rows(x)
        b = fp8.quantize(y, s, "e4m3")
        c, _ = by_rows(y)
        d = fp8.quantize(x, s, "e4m3")
        turned = (fp8.transpose(codes).view(torch.uint8) for codes in (b, d))
        return a, c, *turned

    gm = fused(monkeypatch, function, random(32, 64), random(48, 32), torch.tensor(0.01))
    assert (programs_of(gm, rows), programs_of(gm, tiles)) == ([2], [2])
