"""Programs that share a launch."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
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
)

from fp8pass.codegen.kernels import row_kernel, tile_kernel
from fp8pass.codegen.kernels.kernel_operator import prepare_batch
from fp8pass.codegen.kernels.launch import MOST_PARTS, group_into_launches, plan_launches
from fp8pass.codegen.kernels.row_kernel import LONGEST_HELD
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch

pytest.importorskip("triton")

SCALE = Program(
    (Load("x", "full"),),
    (Step("a", "row_amax", ("x",)), Step("s", "scale", ("a", "e4m3"))),
    (Store("a", ("row",), dtype="float32"), Store("s", ("row",), dtype="float32")),
)


def parts(module, batch: Batch, inputs: list) -> list:
    return list(prepare_batch(module.prepare, batch, [x.shape for x in inputs]))


def check_together(module, programs: list[tuple[Program, int, int]], device: str) -> None:
    """Check the programs of a batch against their references."""
    batch = Batch(tuple(program for program, *_ in programs))
    inputs = [x for program, *size in programs for x in operands(program, *size, device)]
    wanted, found = batch.reference(inputs), run_batch(module, batch, inputs)
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want, exact=False)


SIZES = st.lists(
    st.tuples(st.integers(0, 70), st.integers(1, 12).map(lambda n: 16 * n)), min_size=1, max_size=4
)


@pytest.mark.long
@both_devices
@pytest.mark.parametrize("module", [row_kernel, tile_kernel])
@given(sizes=SIZES)
def test_one_program_on_matrices_of_many_sizes(device, module, sizes):
    program = ROW_CAST if module is row_kernel else CAST
    check_together(module, [(program, *size) for size in sizes], device)


@pytest.mark.long
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
def test_nan_and_inf_stay_in_their_matrix(device, bad):
    batch = Batch((SCALE, SCALE, SCALE))
    inputs = [torch.rand(1, count, device=device) for count in (20, 300, 5)]
    inputs[1][0, 17] = bad
    found = run_batch(row_kernel, batch, inputs)
    for got, want in zip(found, batch.reference(inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert [bool(x.isfinite()) for x in found] == [True, True, False, False, True, True]


@pytest.mark.long
@both_devices
def test_a_launch_has_at_most_most_parts(device):
    count = MOST_PARTS + 3
    batch = Batch((ROW_CAST,) * count)
    inputs = [torch.randn(2 + i, 32, device=device).bfloat16() for i in range(count)]
    found = [len(group) for group in group_into_launches(parts(row_kernel, batch, inputs))]
    assert found == [MOST_PARTS, 3]
    check_together(row_kernel, [(ROW_CAST, 2 + i, 32) for i in range(count)], device)


def test_parts_with_equal_warps_share_a_launch():
    batch = Batch((ROW_CAST, ROW_CAST, ROW_CAST))
    inputs = [torch.empty(4, columns, device="meta") for columns in (64, LONGEST_HELD, 128)]
    small, large = plan_launches(parts(row_kernel, batch, inputs))
    assert (sorted(small.inputs), large.inputs) == ([0, 2], (1,))
    assert small.num_warps < large.num_warps
    assert (small.grid, large.grid) == (8, 4)


def rows_kernel(*programs: Program):
    """Return the single launch of row programs on matrices of several sizes."""
    inputs = [torch.empty((1 + i) * 4, 64, device="meta") for i in range(len(programs))]
    (launch,) = plan_launches(parts(row_kernel, Batch(programs), inputs))
    return launch


def functions_in(kernel) -> int:
    """Count the functions in the source of a kernel."""
    module = ast.parse(Path(inspect.getfile(kernel.fn)).read_text())
    return sum(isinstance(node, ast.FunctionDef) for node in module.body)


def test_equal_parts_are_written_once():
    once, twice = rows_kernel(ROW_CAST, SCALE), rows_kernel(ROW_CAST, ROW_CAST, SCALE, SCALE)
    assert functions_in(once.kernel) == functions_in(twice.kernel)


def test_the_order_of_parts_does_not_change_the_kernel():
    """Equal parts are adjacent, so that models with many layers have few kernels."""
    apart, together = (
        rows_kernel(ROW_CAST, SCALE, ROW_CAST, SCALE),
        rows_kernel(ROW_CAST, ROW_CAST, SCALE, SCALE),
    )
    assert apart.kernel is together.kernel
    assert (apart.inputs, together.inputs) == ((0, 2, 1, 3), (0, 1, 2, 3))


def test_programs_store_columns_of_one_result():
    codes = Store("x", ("rows",), "s", "e4m3", width=96)
    program = Program((Load("s", "scalar"), Load("x", "full")), (), (codes,))
    beside = replace(program, stores=(replace(codes, offset=64),))
    batch = Batch((program, beside))
    one = torch.tensor(1.0, device="meta")
    inputs = [one, torch.empty(32, 64, device="meta"), one, torch.empty(32, 32, device="meta")]
    (launch,) = plan_launches(parts(tile_kernel, batch, inputs))
    assert launch.outputs == (0,)
