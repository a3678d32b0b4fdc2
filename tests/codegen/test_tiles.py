"""Tile kernels against the references of their programs: on a GPU, or in Triton's interpreter.

The interpreter runs if `TRITON_INTERPRET` is set when Triton is imported (see conftest.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import (
    CAST,
    INEXACT,
    PACKED,
    PACKED_GROUPS,
    assert_same,
    both_devices,
    check,
    in_parts,
    operands,
    run,
    swiglu_backward,
)

from fp8pass.codegen.kernels import tile_kernel
from fp8pass.codegen.kernels.triton_ops import write_expression
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.reference import compute_program
from fp8pass.graph.pointwise import POWERS, TRITON_TEMPLATES

pytest.importorskip("triton")


@both_devices
@given(rows=st.integers(1, 150), columns=st.integers(1, 10).map(lambda n: 16 * n))
def test_quantization_in_both_layouts(device, rows, columns):
    inputs = operands(CAST, rows, columns, device)
    by_rows, by_columns = run(tile_kernel, CAST, inputs)
    want = compute_program(CAST, inputs)
    assert_same(by_rows, want[0], exact=True)
    assert_same(by_columns, want[1], exact=True)


@both_devices
@given(rows=st.integers(1, 150), columns=st.integers(1, 10).map(lambda n: 16 * n))
def test_transposition_of_quantized_data(device, rows, columns):
    """All bit patterns are transposed unchanged: both zeros, subnormal numbers and NaN."""
    program = Program((Load("x", "full"),), (), (Store("x", ("columns",), format="e4m3"),))
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    inputs = [codes.to(device)]
    (got,), (want,) = run(tile_kernel, program, inputs), compute_program(program, inputs)
    assert_same(got, want, exact=True)
    numbers = ~want.float().isnan()  # the sign of NaN is undefined
    assert torch.equal(got.float()[numbers].signbit(), want.float()[numbers].signbit())
    assert_same(got[:, :rows].t(), inputs[0], exact=True)


@both_devices
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_tiny_huge_and_not_finite_values(device, scale):
    _, x = operands(CAST, 70, 48, device, scale)
    x[3, 5], x[4, 6], x[5, 7], x[6] = math.nan, math.inf, -math.inf, 0.0
    for amax in (x[:3].abs().amax().float(), torch.tensor(math.inf, device=device)):
        s = amax / 448
        for got, want in zip(
            run(tile_kernel, CAST, [s, x]), compute_program(CAST, [s, x]), strict=True
        ):
            assert_same(got, want, exact=True)


@pytest.mark.long
@both_devices
@pytest.mark.parametrize(
    ("saved", "group"), [*(("e4m3", n) for n in (16, 48, 128, 256)), *PACKED_GROUPS]
)
@given(rows=st.integers(1, 100))
def test_several_matrices_out_of_groups(device, saved, group, rows):
    program = swiglu_backward(group, saved)
    wider = [] if saved in PACKED else [in_parts(program, 3 * group, gap=2 * group)]
    for each in (program, *wider):
        inputs = operands(each, rows, 3 * group, device)
        for got, want in zip(
            run(tile_kernel, each, inputs), compute_program(each, inputs), strict=True
        ):
            assert_same(got, want, exact=False)


def _arity(target: str) -> int:
    return max(int(i) + 1 for i in range(3) if f"{{{i}}}" in TRITON_TEMPLATES[target])


@both_devices
@pytest.mark.parametrize("target", sorted(TRITON_TEMPLATES))
def test_every_operator(device, target):
    """A kernel computes the same result as PyTorch."""
    arity = _arity(target)
    takes_scalar = target.endswith(".Scalar") or "clamp_m" in target or "threshold" in target
    names = ["x", "y", "z"][: arity - takes_scalar]
    compares = target.split(".")[1] in ("gt", "ge", "lt", "le", "eq", "ne")
    condition = (Step("c", "aten.gt.Scalar", ("x", 0.1)),)
    args = ("c", "x", "y") if target == "aten.where.self" else (*names, *[0.25] * takes_scalar)
    steps = condition * (target == "aten.where.self") + (Step("v", target, args),)
    if compares:
        steps += (Step("w", "aten.where.self", ("v", "x", "y")),)
    program = Program(
        (Load("s", "scalar"), *(Load(n, "full") for n in ("x", "y", "z"))),
        steps,
        (Store("w" if compares else "v", ("rows", "columns"), "s", "e4m3"),),
    )
    inputs = operands(program, 37, 96, device)
    if any(name in target for name in ("log", "sqrt", "rsqrt")):
        inputs[1] = inputs[1].abs() + 0.1
    exact = not any(name in target for name in INEXACT) and "addcmul" not in target
    exact &= "backward" not in target and "reciprocal" not in target
    for got, want in zip(
        run(tile_kernel, program, inputs), compute_program(program, inputs), strict=True
    ):
        assert_same(got, want, exact=exact)


@both_devices
@pytest.mark.parametrize("power", sorted(POWERS))
def test_powers(device, power):
    program = Program(
        (Load("s", "scalar"), Load("x", "full")),
        (Step("v", "aten.pow.Tensor_Scalar", ("x", power)),),
        (Store("v", ("columns",), "s", "e4m3"),),
    )
    inputs = operands(program, 37, 96, device)
    inputs[1] = inputs[1].abs() + 0.1
    (got,), (want,) = run(tile_kernel, program, inputs), compute_program(program, inputs)
    assert_same(got, want, exact=False)


@both_devices
@pytest.mark.parametrize("number", [math.inf, -math.inf, 3, -0.5])
def test_constants(device, number):
    program = Program(
        (Load("s", "scalar"), Load("x", "full")),
        (
            Step("c", "aten.eq.Scalar", ("x", number)),
            Step("y", "aten.add.Scalar", ("x", number)),
            Step("v", "aten.where.self", ("c", "x", "y")),
        ),
        (Store("v", ("rows",), "s", "e4m3"),),
    )
    inputs = operands(program, 37, 96, device)
    inputs[1][3, 4] = number
    check(tile_kernel, program, inputs)


def test_nan_constants_are_not_supported():
    assert write_expression(Step("y", "aten.add.Scalar", ("x", math.nan))) is None


@both_devices
def test_rows_columns_and_groups_are_broadcast(device):
    program = Program(
        (
            Load("s", "scalar"),
            Load("w", "column"),
            Load("r", "row"),
            Load("x", "full"),
            Load("g", "groups", 64, "e4m3"),
        ),
        (
            Step("a", "aten.mul.Tensor", ("x", "r")),
            Step("b", "aten.mul.Tensor", ("a", "w")),
            Step("c", "aten.add.Tensor", ("b", "g")),
        ),
        (Store("c", ("rows", "columns"), "s", "e4m3"), Store("b", ("columns",), "s", "e4m3")),
    )
    inputs = operands(program, 67, 192, device)
    for got, want in zip(
        run(tile_kernel, program, inputs), compute_program(program, inputs), strict=True
    ):
        assert_same(got, want, exact=False)


@pytest.mark.long
@both_devices
@given(rows=st.integers(1, 150), columns=st.integers(1, 10).map(lambda n: 16 * n))
def test_amax_of_tiles(device, rows, columns):
    program = Program((Load("x", "full"),), (), (Store("x", ("amax",)),))
    inputs = operands(program, rows, columns, device)
    inputs[0][rows // 2, columns // 3] = math.nan
    (got,), (want,) = run(tile_kernel, program, inputs), compute_program(program, inputs)
    assert_same(got, want, exact=True)
    assert got.isnan().sum() == 1


@both_devices
@pytest.mark.parametrize("dtype", ["", "bfloat16", "float16"])
@given(rows=st.integers(1, 200), columns=st.integers(1, 10).map(lambda n: 16 * n))
def test_sums_of_tiles(device, dtype, rows, columns):
    """Each element is rounded before it is added. The sums may differ by the order of additions."""
    program = Program(
        (Load("x", "full"), Load("g", "full")),
        (Step("y", "aten.mul.Tensor", ("x", "g")),),
        (Store("y", ("amax",)), Store("y", ("tile_sums",), dtype=dtype)),
    )
    inputs = operands(program, rows, columns, device)
    (amaxes, sums), want = run(tile_kernel, program, inputs), compute_program(program, inputs)
    assert_same(amaxes, want[0], exact=True)
    tolerance = 64 * 2.0**-24 * inputs[0].float().abs().sum() * inputs[1].float().abs().max()
    assert sums.shape == (math.ceil(rows / 64), columns)
    assert (sums - want[1]).abs().max() <= tolerance


@both_devices
def test_sums_of_tiles_that_are_not_finite(device):
    """NaN and infinite elements reach the sums of their tile and column, and no other sums."""
    program = Program((Load("x", "full"),), (), (Store("x", ("tile_sums",), dtype="float16"),))
    (x,) = operands(program, 150, 48, device)
    x[3, 5], x[70, 6], x[149, 7], x[80, 8] = math.nan, math.inf, -math.inf, 1e5
    x[10, 9], x[20, 9] = math.inf, -math.inf
    (got,), (want,) = run(tile_kernel, program, [x]), compute_program(program, [x])
    assert got.isfinite().logical_not().sum() == 5
    assert_same(got[want.isfinite().logical_not()], want[want.isfinite().logical_not()], exact=True)
    assert got[1, 8] == math.inf  # it overflows in FP16


BLOCK_STORES = {
    "rows": [Store("h", ("rows",), format="e4m3", block="1×128")],
    "both": [
        Store("h", ("rows",), format="e4m3", block="1×128"),
        Store("h", ("columns",), scale="s", format="e4m3"),
        Store("x", ("columns",), scale="s", format="e4m3"),
        Store("x", ("rows",), format="e4m3", block="1×128"),
    ],
    "squares": [Store("h", ("rows", "columns"), format="e4m3", block="128×128")],
    "square": [Store("h", ("rows",), format="e4m3", block="128×128")],
}


@both_devices
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        *((kind, *sizes) for kind in BLOCK_STORES for sizes in ((128, 128), (256, 384))),
        ("rows", 77, 256),
        ("both", 77, 256),
    ],
)
def test_scales_of_blocks(device, kind, rows, columns):
    """Also of blocks with NaN, Inf or only zeros, and with rests of tiles where blocks allow it."""
    stores = tuple(BLOCK_STORES[kind])
    loads = Load("x", "full"), Load("y", "full"), Load("s", "scalar")
    program = Program(loads, (Step("h", "aten.mul.Tensor", ("x", "y")),), stores)
    x = torch.randn(rows, columns) * torch.logspace(-6, 6, columns)
    x[3, 5], x[40, 17] = math.nan, math.inf
    x[:, 32:33] = 0
    inputs = [t.to(device).bfloat16() for t in (x, torch.randn(rows, columns))]
    inputs.append(torch.tensor(0.5, device=device))
    got, want = run(tile_kernel, program, inputs), compute_program(program, inputs)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b, exact=True)
