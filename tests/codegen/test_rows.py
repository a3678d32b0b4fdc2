"""Row kernels against the references of their programs: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kernel_helpers import (
    PACKED,
    PACKED_GROUPS,
    ROW_CAST,
    assert_same,
    both_devices,
    by_row,
    check,
    cross_entropy,
    in_parts,
    norm,
    norm_backward,
    operands,
    run,
    swiglu,
    values,
)

from fp8pass.codegen.kernels import kernel_operator, row_kernel
from fp8pass.codegen.kernels.row_source import Shape, write
from fp8pass.codegen.program import ir as program_module
from fp8pass.codegen.program import reference as reference_module
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.codegen.program.reference import compute_program
from fp8pass.codegen.program.simplify import simplify

pytest.importorskip("triton")
EDGES = math.inf, -math.inf, math.nan
REDUCTIONS_OF_A_LOSS = ["row_max", "row_exp_sum", "row_sum"]


@pytest.fixture(params=["held", "wide", "loop"])
def reading(request, monkeypatch):
    """Whether registers hold short rows or wide rows, or a loop reads the rows."""
    if request.param != "held":
        monkeypatch.setattr(row_kernel, "LONGEST_HELD", 64)
        monkeypatch.setattr(row_kernel, "WIDE_CHUNK", 128)
    if request.param == "loop":
        monkeypatch.setattr(row_kernel, "LONGEST_WIDE", 64)
        monkeypatch.setattr(row_kernel, "ROW_CHUNK", 128)


@pytest.mark.parametrize(
    ("columns", "packed", "shape", "warps"),
    [
        (8960, False, Shape(8960, 4096, held=True, last=1024), 8),
        (16384, False, Shape(16384, 8192, held=True), 16),
        (18944, False, Shape(18944, 8192, held=True, last=4096), 8),
        (18944, True, Shape(18944, 4096, held=False), 4),
        (32768, False, Shape(32768, 4096, held=False), 4),
    ],
)
def test_shapes_of_long_rows(columns, packed, shape, warps):
    """A packed format needs more registers than wide rows leave."""
    assert row_kernel._choose_shape(cross_entropy(), 32768) == (Shape(32768, 4096, False), 8)
    program = swiglu(128)
    if packed:
        stores = (replace(s, format="e2m2") if s.group_size else s for s in program.stores)
        program = replace(program, stores=tuple(stores))
    assert row_kernel._choose_shape(program, columns) == (shape, warps)


@both_devices
@pytest.mark.parametrize("columns", [16, 128, 272, 640])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_quantization_by_row(device, reading, columns, scale):
    inputs = operands(ROW_CAST, 21, columns, device, scale)
    x = inputs[0]
    x[3, 5], x[4, 6], x[5] = math.nan, math.inf, 0.0
    (got,), (want,) = run(row_kernel, ROW_CAST, inputs), compute_program(ROW_CAST, inputs)
    assert_same(got, want, exact=scale == 1.0 and device == "cpu")
    assert values(got)[3].isnan().all()


@both_devices
def test_long_rows_that_are_only_reduced(device, monkeypatch):
    monkeypatch.setattr(row_kernel, "LONGEST_HELD", 64)
    monkeypatch.setattr(row_kernel, "REDUCED_CHUNK", 256)
    steps = Step("a", "row_amax", ("x",)), Step("s", "scale", ("a", "e4m3"))
    stores = (Store(name, ("row",), dtype="float32") for name in "as")
    program = Program((Load("x", "full"),), steps, tuple(stores)).canonical()
    assert row_kernel._choose_shape(program, 640) == (Shape(640, 256, held=False), 16)
    (x,) = operands(program, 3, 640, device)
    x[1, 600] = math.nan
    got, want = run(row_kernel, program, [x]), compute_program(program, [x])
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, exact=True)


@both_devices
@pytest.mark.parametrize(("columns", "group"), [(128, 128), (640, 128), (768, 64), (96, 32)])
def test_norm(device, reading, columns, group):
    program = norm(columns, group)
    inputs = operands(program, 19, columns, device)
    check(row_kernel, program, inputs)


@both_devices
@pytest.mark.parametrize("columns", [16, 250, 640])
def test_cross_entropy(device, reading, columns):
    """Also of rows with infinities or NaN, of masked classes, and of labels out of range."""
    program = simplify(cross_entropy(), columns).canonical()
    assert [s.target for s in program.steps if "row" in s.target] == REDUCTIONS_OF_A_LOSS
    label, weight, x = operands(program, 21, columns, device)
    label = torch.randint(columns, label.shape, device=device)
    label[7], label[8] = -100, columns
    for row, edge in enumerate(EDGES):
        x[row, 5] = edge
    x[3] = -math.inf
    x[4, : columns // 2] = -math.inf
    inputs = [label, weight, x]
    for got, want in zip(
        run(row_kernel, program, inputs), compute_program(cross_entropy(), inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-5, equal_nan=True)


def overwriting(make: Step) -> Program:
    """Return a program that stores `y`, of the size of `x`, and quantizes it by row."""
    steps, store = by_row("y")
    stores = Store("y", ("full",), dtype="bfloat16"), store
    return Program((Load("x", "full"), Load("z", "full")), (make, *steps), stores)


OVERWRITING = {
    "loss": lambda: simplify(cross_entropy(), 640),
    "a sum that is quantized": lambda: overwriting(Step("y", "aten.add.Tensor", ("x", "z"))),
    "another input": lambda: overwriting(Step("y", "aten.neg.default", ("z",))),
}


@both_devices
@pytest.mark.parametrize("case", OVERWRITING)
def test_results_in_the_memory_of_an_input(device, reading, case):
    """Loops may read an input again after the result is stored, so only losses may overwrite."""
    program = OVERWRITING[case]().canonical()
    number = next(i for i, load in enumerate(program.loads) if load.operand == "full")
    inputs = operands(program, 21, 640, device)
    if case == "loss":
        inputs[0] = torch.randint(640, inputs[0].shape, device=device)
    allowed = row_kernel._may_overwrite(program, 640, program.loads[number], 0)
    assert allowed == (row_kernel._choose_shape(program, 640)[0].held or case == "loss")
    wanted = compute_program(program, inputs)
    results = Batch((program,)).empty_outputs(inputs)
    results[0] = inputs[number]
    kernel_operator.run(row_kernel.prepare, Batch((program,)), inputs, results)
    is_same = all(
        torch.allclose(values(a), values(b), rtol=0.07, atol=1e-3)
        for a, b in zip(results, wanted, strict=True)
    )
    assert is_same or not allowed


@pytest.mark.long
@both_devices
@pytest.mark.parametrize(("columns", "group"), [(384, 128), (352, 32)])
def test_gated_activation(device, reading, columns, group):
    program = swiglu(group)
    inputs = operands(program, 19, columns, device)
    check(row_kernel, program, inputs)


@pytest.mark.long
@both_devices
@pytest.mark.parametrize(("columns", "group"), [(384, 128), (352, 32)])
def test_parts_of_wider_matrices(device, reading, columns, group):
    for whole in (swiglu(group), swiglu_of_groups(group)):
        program = in_parts(whole, columns, gap=2 * group)
        check(row_kernel, program, operands(program, 19, columns, device))


def swiglu_of_groups(group):
    """Return a program that dequantizes gate and up, and quantizes their product by row."""
    loads = tuple(Load(name, "groups", group, "e4m3") for name in "gu")
    whole = swiglu(group)
    return replace(whole, loads=loads, stores=tuple(s for s in whole.stores if not s.group_size))


@both_devices
@pytest.mark.parametrize("columns", [256, 384])
@pytest.mark.parametrize("rows", [3, 1024, 1500])
def test_norm_backward(device, rows, columns, monkeypatch):
    monkeypatch.setattr(row_kernel, "VECTOR", 2)  # chunks of 256
    if device == "cpu":  # Triton's interpreter runs programs one by one
        for module in (program_module, reference_module, row_kernel):
            monkeypatch.setattr(module, "PARTIAL_SUMS", 4)
        rows = min(rows, 19)
    program = norm_backward(columns)
    inputs = operands(program, rows, columns, device)
    gradient, sums, amax = run(row_kernel, program, inputs)
    wanted = compute_program(program, inputs)
    # The kernel sums in another order. Where a gradient and the sum subtracted from it are nearly
    # equal, the rounding errors of the sum are large relative to the difference.
    torch.testing.assert_close(gradient, wanted[0], rtol=2**-7, atol=1e-5)
    assert torch.allclose(sums, wanted[1], rtol=1e-4, atol=1e-3)
    assert_same(amax.bfloat16(), wanted[2].bfloat16(), exact=False)  # the operand is rounded


@both_devices
@pytest.mark.parametrize(
    ("saved", "group"), [*(("e4m3", n) for n in (16, 17, 20, 128)), *PACKED_GROUPS]
)
def test_reading_groups_of_any_size(device, reading, group, saved):
    """With and without several neighboring elements that share the load of a scale."""
    steps, store = by_row("x")
    program = Program((Load("x", "groups", group, saved),), steps, (store,))
    check(row_kernel, program, operands(program, 3, 6 * group, device))


def test_values_that_are_used_twice_are_written_once():
    squares = [Step("v1", "aten.mul.Tensor", ("x", "x"))]
    squares += [Step(f"v{i}", "aten.mul.Tensor", (f"v{i - 1}",) * 2) for i in range(2, 60)]
    steps, store = by_row("v59")
    program = Program((Load("x", "full"),), (*squares, *steps), (store,))
    shape = Shape(columns=96, chunk=128, held=True)
    assert write(program, shape).body.count(" * v58_0") == 1


@pytest.mark.long
@both_devices
@pytest.mark.parametrize("fewest", [1, 4])
@pytest.mark.parametrize("columns", [96, 1024, 1056, 1376])
def test_rows_in_several_chunks(device, columns, fewest, monkeypatch):
    """The last chunk is not full. With `fewest` = 1, it has fewer elements."""
    monkeypatch.setattr(row_kernel, "VECTOR", 1)
    monkeypatch.setattr(row_kernel, "FEWEST_HELD", fewest)
    program = swiglu(32)
    shape, _ = row_kernel._choose_shape(program, columns)
    assert len(shape.chunks) == -(-columns // 256)
    assert bool(shape.last) == (fewest == 1 and columns in (1056, 1376))
    check(row_kernel, program, operands(program, 5, columns, device))


@both_devices
def test_reductions_in_a_short_last_chunk(device, monkeypatch):
    monkeypatch.setattr(row_kernel, "VECTOR", 1)
    monkeypatch.setattr(row_kernel, "FEWEST_HELD", 1)
    steps = [Step(reduction, reduction, ("x",)) for reduction in ("row_sum", "row_amax", "row_max")]
    stores = (Store(step.name, ("row",), dtype="float32") for step in steps)
    program = Program((Load("x", "full"),), tuple(steps), tuple(stores)).canonical()
    assert row_kernel._choose_shape(program, 300)[0] == Shape(300, 256, held=True, last=128)
    (x,) = operands(program, 6, 300, device)
    x[0, 299], x[1, 0], x[2] = 1e3, -1e3, -x[2].abs() - 1
    x[3, 280], x[4, 280], x[5, 280] = math.nan, math.inf, -math.inf
    got, want = run(row_kernel, program, [x]), compute_program(program, [x])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.long
@both_devices
@pytest.mark.parametrize("columns", [128, 130, 20480])
def test_values_that_do_not_vary_along_a_row(device, columns):
    """Such values are reduced and stored like values that vary."""
    program = Program(
        (Load("x", "full"), Load("r", "row")),
        (
            Step("total", "row_sum", ("r",)),
            Step("amax", "row_amax", ("r",)),
            Step("scale", "scale", ("amax", "e4m3")),
            Step("y", "aten.mul.Tensor", ("x", "total")),
        ),
        (
            Store("total", ("row",), dtype="float32"),
            Store("r", ("full",), dtype="float32"),
            Store("r", ("rows",), "scale", "e4m3"),
            *[Store("r", ("groups",), format="e4m3", group_size=128)] * (columns % 128 == 0),
            Store("y", ("full",), dtype="float32"),
        ),
    )
    check(row_kernel, program, operands(program, 3, columns, device))


@both_devices
def test_erf_is_accurate(device):
    """Kernels have a formula of their own for `erf`."""
    program = Program(
        (Load("x", "full"),),
        (Step("y", "aten.erf.default", ("x",)),),
        (Store("y", ("full",), dtype="float32"),),
    )
    x = torch.cat([torch.linspace(-6, 6, 1017), torch.tensor([*EDGES, 0.0, -0.0, 0.05, -0.05])])
    x = torch.cat([x, x.sign() * x.abs().clamp(max=6) ** 8 * 1e-8]).view(2, 1024).to(device)
    (got,) = run(row_kernel, program, [x])
    torch.testing.assert_close(got, x.erf(), rtol=2e-5, atol=0, equal_nan=True)


@both_devices
def test_equal_sums_are_stored_twice(device, monkeypatch):
    for module in (program_module, reference_module, row_kernel):
        monkeypatch.setattr(module, "PARTIAL_SUMS", 4)
    program = Program(
        (Load("x", "full"),),
        (Step("total", "row_sum", ("x",)),),
        (Store("x", ("sums",)), Store("x", ("sums",)), Store("total", ("row",), dtype="float32")),
    )
    check(row_kernel, program, operands(program, 6, 128, device))


@both_devices
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize(("columns", "group"), [(16, 16), (48, 16), (384, 128)])
def test_packed_groups(device, reading, columns, group, format):
    """Rounding equals the reference, including ties, denormals, zeros, NaN and Inf."""
    steps, store = by_row("x")
    kept = Store("x", ("groups",), format=format, group_size=group)
    program = Program((Load("x", "full"),), steps, (kept, store))
    x = torch.randn(5, columns)
    x[0] = torch.arange(columns) % 97 / 16 - 3  # with 3: all multiples of a 32nd of the scale
    x[1] *= torch.logspace(-6, 3, columns)
    x[2] = 0
    x[3, 3], x[3, 5], x[4, 7] = torch.nan, torch.inf, -torch.inf
    x = x.to(device)
    for got, want in zip(run(row_kernel, program, [x]), compute_program(program, [x]), strict=True):
        assert_same(got[:3], want[:3], exact=True)
    values = [
        torch.ops.fp8pass.dequantize(planes, scales, f"{format} 1×{group}", torch.float32)
        for *planes, scales, _ in (run(row_kernel, program, [x]), compute_program(program, [x]))
    ]
    assert torch.equal(*(v.isfinite() for v in values))


@both_devices
@pytest.mark.parametrize("columns", [128, 640])
def test_groups_of_operands_have_powers_of_two_as_scales(device, reading, columns):
    """The same value is saved in groups with other scales."""
    operand = Store("sum", ("groups",), format="e4m3", group_size=128, scale_form="fp32")
    program = replace(norm(columns, 128), stores=(*norm(columns, 128).stores, operand))
    inputs = operands(program, 9, columns, device)
    inputs[1][2], inputs[1][3, 5], inputs[1][4, 6] = 0.0, math.nan, math.inf
    got, want = run(row_kernel, program, inputs), compute_program(program, inputs)
    for x, y in zip(got[-2:], want[-2:], strict=True):
        assert_same(x, y, exact=True)
    scales = got[-1]
    assert scales.dtype is torch.float32
    finite = scales[scales.isfinite()]
    assert torch.equal(torch.exp2(torch.log2(finite).round()), finite)
    assert scales[3, 0].isnan()
    assert scales[4, 0].isinf()


@pytest.mark.parametrize("columns", [8192, 16384])
def test_many_sums_of_long_rows_have_the_most_warps(columns):
    """A thread then holds more elements than it should."""
    loads = tuple(Load(name, "full") for name in "abcde")
    program = Program(loads, (), tuple(Store(load.name, ("sums",)) for load in loads))
    assert row_kernel.prepare(program, 4096, columns).num_warps == 16
