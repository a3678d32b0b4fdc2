"""Programs that share a launch, and what the graph has them share it for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    AMAX,
    CAST,
    CODES,
    ROW_CAST,
    assert_same,
    both_devices,
    norm_backward,
    operands,
    rotary,
    run_batch,
    swiglu,
    swiglu_backward,
)
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import hardware
from fp8pass.codegen import fuse_launches, kernels, row_kernel, tile_kernel
from fp8pass.codegen.batch import Batch
from fp8pass.codegen.kernel_op import parts_of
from fp8pass.codegen.launch import MOST_PARTS, grouped, launches
from fp8pass.codegen.program import Load, Program, Step, Store
from fp8pass.codegen.row_kernel import LONGEST_HELD, rows
from fp8pass.codegen.tile_kernel import tiles

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
    rope = [(rotary(64, 40, store), 80, 128) for store in (CODES, AMAX)]
    check_together(tile_kernel, [(swiglu_backward(16), 40, 48), (CAST, 33, 80), *rope], device)


@both_devices
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_matrix(device, bad):
    batch = Batch((SCALE, SCALE, SCALE))
    inputs = [torch.rand(1, count, device=device) for count in (20, 300, 5)]
    inputs[1][0, 17] = bad
    found = run_batch(row_kernel, batch, inputs)
    for got, want in zip(found, batch.reference(inputs), strict=True):
        assert torch.equal(got, want) or got.isnan().all() == want.isnan().all()
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
    assert (small.inputs, large.inputs) == ((0, 2), (1,))
    assert small.num_warps < large.num_warps
    assert (small.grid, large.grid) == (8, 4)


def test_tensors_that_parts_share_are_passed_once():
    program = rotary(64, 8, CODES)
    inputs = [torch.empty(x.shape, device="meta") for x in operands(program, 8, 64, "cpu")]
    one, two = parts(tile_kernel, Batch((program, program)), inputs * 2)
    (launch,) = launches([one, replace(two, inputs=(4, *one.inputs[1:3], 7))])
    assert launch.inputs == (0, 1, 2, 3, 4, 7)
    names = [name for name in launch.kernel.arg_names if name.startswith("in")]
    assert names == [f"in{i}" for i in range(6)]


# --- graphs -------------------------------------------------------------------------------------


def fused(monkeypatch, function, *args: torch.Tensor) -> fx.GraphModule:
    """The graph of a function after kernels took what they take; its results are as before."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    gm = make_fx(function, tracing_mode="fake")(*args)
    kernels.use_kernels(gm)
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


def test_scales_that_something_waits_for_are_taken_apart(monkeypatch):
    def function(x, y):
        a, of_x = by_rows(x)
        scale = fp8.scale(fp8.amax(of_x), "e4m3")
        b, of_y = by_rows(y * scale)
        return a, b, fp8.amax(of_y)

    gm = fused(monkeypatch, function, random(40, 64), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


def test_long_amaxes_stay_with_generated_code(monkeypatch):
    def function(x, y):
        (a, of_x), (b, of_y) = by_rows(x), by_rows(y)
        return a, b, fp8.amax(of_x), fp8.amax(of_y)

    gm = fused(monkeypatch, function, random(LONGEST_HELD + 1, 16), random(24, 32))
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.amax.default)) == 2


@pytest.mark.parametrize(("largest", "together"), [(48 * 32, [3]), (48 * 32 - 1, [2, 1])])
def test_what_is_there_is_quantized_together(monkeypatch, largest, together):
    """Unless its codes, which are of as many bytes, would be in memory long before."""
    monkeypatch.setattr(fuse_launches, "LARGEST_RESULTS", largest)

    def function(x, y, z):
        a, _ = by_rows(x)
        b, _ = by_rows(y)
        c, _ = by_rows(z)
        return a.int() + 1, b, c

    sizes = random(40, 64), random(20, 32), random(48, 32)
    assert programs_of(fused(monkeypatch, function, *sizes), rows) == together


def test_what_is_computed_from_codes_is_quantized_after_them(monkeypatch):
    def function(x, w):
        a, _ = by_rows(x)
        b, _ = by_rows((a.int() @ a.int().t()).float())
        c, _ = by_rows(w)
        return a, b, c

    gm = fused(monkeypatch, function, random(32, 64), random(16, 32))
    assert programs_of(gm, rows) == [1, 2]


def test_launches_can_be_kept_apart(monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_KERNELS", "launches,scales")

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
