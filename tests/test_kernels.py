"""The Triton kernels against the references of their programs: on a GPU, or in the interpreter.

The interpreter runs where `TRITON_INTERPRET` is set when Triton is imported (see conftest.py).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp8pass
from fp8pass.codegen import program as program_module
from fp8pass.codegen import row_kernel, tile_kernel
from fp8pass.codegen.program import Load, Program, Step, Store, reference
from fp8pass.codegen.row_source import Shape, source
from fp8pass.codegen.simplify import simplify
from fp8pass.codegen.triton_ops import EXPRESSIONS, POWERS

pytest.importorskip("triton")

F8 = torch.float8_e4m3fn
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
both_devices = pytest.mark.parametrize("device", DEVICES)

# Operators of which the hardware's, or Triton's, differ from PyTorch's in the last bits.
INEXACT = ("exp", "log", "sin", "cos", "erf", "sigmoid", "tanh", "silu", "rsqrt", "sqrt", "div")


def run(module, program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Launch the Triton kernel of `program`, with its results poisoned first."""
    outputs = program.empty_outputs(inputs)
    for x in outputs:
        x.view(torch.uint8).fill_(0x55)
    launch = module.prepare(program, *program.sizes(inputs))
    arguments = {**launch.sizes, **launch.constants, "num_warps": launch.num_warps}
    launch.kernel[launch.grid](*inputs, *outputs, **arguments)
    return outputs


def operands(program: Program, rows: int, columns: int, device: str, scale: float = 1.0):
    """Random inputs of a program."""
    inputs: list[torch.Tensor] = []
    shapes = {"full": (rows, columns), "row": (rows, 1), "column": (columns,), "scalar": ()}
    for load in program.loads:
        if load.operand == "groups":
            codes = (torch.randn(rows, columns) * 100).clamp(-448, 448).to(F8)
            scales = torch.rand(rows, columns // load.group_size) * scale / 50 + 1e-3
            inputs += [codes, scales.bfloat16()]
        elif load.operand == "scalar":
            inputs.append(torch.rand(()) * scale / 50 + 1e-3)
        elif load.operand == "row":
            inputs.append(torch.rand(shapes["row"]) + 0.5)
        else:
            inputs.append((torch.randn(shapes[load.operand]) * scale).bfloat16())
    return [x.to(device) for x in inputs]


def values(codes: torch.Tensor) -> torch.Tensor:
    return codes.double()


def assert_same(got: torch.Tensor, want: torch.Tensor, *, exact: bool) -> None:
    """Equal bits, or codes that differ by one step, and few of them: last bits round two ways."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    nan = values(want).isnan()
    assert torch.equal(values(got).isnan(), nan)
    a, b = (values(x).masked_fill(nan, 0.0) for x in (got, want))
    if exact:
        assert torch.equal(a, b)
        return
    mantissa = {F8: 3, torch.bfloat16: 7, torch.float32: 18}[got.dtype]
    step = torch.maximum(a.abs(), b.abs()) * 2.0**-mantissa + 2.0**-9 * (got.dtype == F8)
    finite = b.isfinite()
    assert torch.equal(a[~finite], b[~finite])
    assert ((a - b).abs()[finite] <= step[finite] + 1e-30).all()
    if got.dtype == F8 and a.numel() > 1000:
        assert (a != b).double().mean() < 0.02


def check(module, program: Program, inputs: list[torch.Tensor], *, exact: bool = False) -> None:
    """The kernel of a program computes what its reference does."""
    wanted = reference(program, inputs)
    for got, want in zip(run(module, program, inputs), wanted, strict=True):
        assert_same(got, want, exact=exact)


# --- tiles --------------------------------------------------------------------------------------

CAST = Program(
    (Load("s", "scalar"), Load("x", "full")), (), (Store("x", ("rows", "columns"), "s", "e4m3"),)
)


def swiglu_backward(group: int) -> Program:
    """Down's input again, and the gradients of gate and up, in three stores."""
    return Program(
        (
            Load("s", "scalar"),
            Load("r", "scalar"),
            Load("t", "scalar"),
            Load("d", "full"),
            Load("g", "groups", group),
            Load("u", "groups", group),
        ),
        (
            Step("p", "aten.sigmoid.default", ("g",)),
            Step("a", "aten.mul.Tensor", ("g", "p")),
            Step("h", "aten.mul.Tensor", ("a", "u")),
            Step("du", "aten.mul.Tensor", ("d", "a")),
            Step("dh", "aten.mul.Tensor", ("d", "u")),
            Step("dg", "aten.silu_backward.default", ("dh", "g")),
        ),
        (
            Store("h", ("columns",), "s", "e4m3"),
            Store("du", ("rows", "columns"), "r", "e4m3"),
            Store("dg", ("rows", "columns"), "t", "e4m3"),
        ),
    )


@both_devices
@given(rows=st.integers(1, 150), columns=st.integers(1, 20).map(lambda n: 16 * n))
def test_codes_in_both_layouts(device, rows, columns):
    inputs = operands(CAST, rows, columns, device)
    by_rows, by_columns = run(tile_kernel, CAST, inputs)
    want = reference(CAST, inputs)
    assert_same(by_rows, want[0], exact=True)
    assert_same(by_columns, want[1], exact=True)


@both_devices
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_what_is_tiny_huge_or_not_finite(device, scale):
    _, x = operands(CAST, 70, 48, device, scale)
    x[3, 5], x[4, 6], x[5, 7], x[6] = math.nan, math.inf, -math.inf, 0.0
    for amax in (x[:3].abs().amax().float(), torch.tensor(math.inf, device=device)):
        s = amax / 448
        for got, want in zip(run(tile_kernel, CAST, [s, x]), reference(CAST, [s, x]), strict=True):
            assert_same(got, want, exact=True)


@both_devices
@pytest.mark.parametrize("group", [16, 48, 128, 256])
@given(rows=st.integers(1, 100))
def test_several_matrices_out_of_groups(device, group, rows):
    program = swiglu_backward(group)
    inputs = operands(program, rows, 3 * group, device)
    for got, want in zip(
        run(tile_kernel, program, inputs), reference(program, inputs), strict=True
    ):
        assert_same(got, want, exact=False)


def _arity(target: str) -> int:
    return max(int(i) + 1 for i in range(3) if f"{{{i}}}" in EXPRESSIONS[target])


@both_devices
@pytest.mark.parametrize("target", sorted(EXPRESSIONS))
def test_every_operator(device, target):
    """What a kernel makes of an operator is what PyTorch does."""
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
        run(tile_kernel, program, inputs), reference(program, inputs), strict=True
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
    (got,), (want,) = run(tile_kernel, program, inputs), reference(program, inputs)
    assert_same(got, want, exact=False)


@both_devices
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 3, -0.5])
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


@both_devices
def test_rows_columns_and_groups_are_broadcast(device):
    program = Program(
        (
            Load("s", "scalar"),
            Load("w", "column"),
            Load("r", "row"),
            Load("x", "full"),
            Load("g", "groups", 64),
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
        run(tile_kernel, program, inputs), reference(program, inputs), strict=True
    ):
        assert_same(got, want, exact=False)


# --- rows ---------------------------------------------------------------------------------------


def by_row(x: str) -> tuple[tuple[Step, ...], Store]:
    """`x` quantized by row."""
    steps = Step("amax", "row_amax", (x,)), Step("scale", "scale", ("amax", "e4m3"))
    return steps, Store(x, ("rows",), "scale", "e4m3")


ROW_CAST = Program((Load("x", "full"),), by_row("x")[0], (by_row("x")[1],))


def norm(columns: int, group: int) -> Program:
    """Residual sum, kept in groups; its RMS norm, quantized by row."""
    steps, store = by_row("h")
    return Program(
        (Load("w", "column"), Load("x", "full"), Load("y", "full")),
        (
            Step("sum", "aten.add.Tensor", ("x", "y")),
            Step("square", "aten.mul.Tensor", ("sum", "sum")),
            Step("total", "row_sum", ("square",)),
            Step("mean", "aten.mul.Scalar", ("total", 1 / columns)),
            Step("shifted", "aten.add.Scalar", ("mean", 1e-5)),
            Step("rstd", "aten.rsqrt.default", ("shifted",)),
            Step("n", "aten.mul.Tensor", ("sum", "rstd")),
            Step("h", "aten.mul.Tensor", ("n", "w")),
            *steps,
        ),
        (
            Store("sum", ("full",), dtype="bfloat16"),
            Store("sum", ("groups",), format="e4m3", group_size=group),
            Store("rstd", ("row",), dtype="float32"),
            Store("amax", ("row",), dtype="float32"),
            Store("scale", ("row",), dtype="float32"),
            store,
        ),
    )


def swiglu(group: int) -> Program:
    """Gate and up kept in groups; their product, quantized by row."""
    steps, store = by_row("h")
    return Program(
        (Load("g", "full"), Load("u", "full")),
        (Step("a", "aten.silu.default", ("g",)), Step("h", "aten.mul.Tensor", ("a", "u")), *steps),
        (
            Store("scale", ("row",), dtype="float32"),
            Store("g", ("groups",), format="e4m3", group_size=group),
            Store("u", ("groups",), format="e4m3", group_size=group),
            store,
        ),
    )


@pytest.fixture(params=["held", "loop"])
def reading(request, monkeypatch):
    """Rows held in registers, or read in a loop."""
    if request.param == "loop":
        monkeypatch.setattr(row_kernel, "LONGEST_HELD", 64)
        monkeypatch.setattr(row_kernel, "CHUNK", 128)


@both_devices
@pytest.mark.parametrize("columns", [16, 128, 272, 640])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_codes_by_row(device, reading, columns, scale):
    inputs = operands(ROW_CAST, 21, columns, device, scale)
    x = inputs[0]
    x[3, 5], x[4, 6], x[5] = math.nan, math.inf, 0.0
    (got,), (want,) = run(row_kernel, ROW_CAST, inputs), reference(ROW_CAST, inputs)
    assert_same(got, want, exact=scale == 1.0 and device == "cpu")
    assert values(got)[3].isnan().all()


@both_devices
@pytest.mark.parametrize(("columns", "group"), [(128, 128), (640, 128), (768, 64), (96, 32)])
def test_norm(device, reading, columns, group):
    program = norm(columns, group)
    inputs = operands(program, 19, columns, device)
    check(row_kernel, program, inputs)


@both_devices
@pytest.mark.parametrize(("columns", "group"), [(384, 128), (352, 32)])
def test_gated_activation(device, reading, columns, group):
    program = swiglu(group)
    inputs = operands(program, 19, columns, device)
    check(row_kernel, program, inputs)


def norm_backward(columns: int) -> Program:
    """Gradient of a residual stream through a norm, with that of the norm's weight."""
    return Program(
        (
            Load("w", "column"),
            Load("rstd", "row"),
            Load("dy", "full"),
            Load("residual", "full"),
            Load("x", "groups", 128),
        ),
        (
            Step("xhat", "aten.mul.Tensor", ("x", "rstd")),
            Step("dw", "aten.mul.Tensor", ("dy", "xhat")),
            Step("n", "aten.mul.Tensor", ("dy", "w")),
            Step("nx", "aten.mul.Tensor", ("n", "x")),
            Step("dot", "row_sum", ("nx",)),
            Step("mean", "aten.mul.Scalar", ("dot", 1 / columns)),
            Step("cube", "aten.pow.Tensor_Scalar", ("rstd", 3.0)),
            Step("factor", "aten.mul.Tensor", ("mean", "cube")),
            Step("along", "aten.mul.Tensor", ("x", "factor")),
            Step("scaled", "aten.mul.Tensor", ("n", "rstd")),
            Step("d", "aten.sub.Tensor", ("scaled", "along")),
            Step("sum", "aten.add.Tensor", ("residual", "d")),
            Step("amax", "row_amax", ("sum",)),
        ),
        (
            Store("sum", ("full",), dtype="bfloat16"),
            Store("dw", ("sums",)),
            Store("amax", ("row",), dtype="float32"),
        ),
    )


@both_devices
@pytest.mark.parametrize("columns", [256, 384])
@pytest.mark.parametrize("rows", [3, 1024, 1500])
def test_norm_backward(device, rows, columns, monkeypatch):
    monkeypatch.setattr(row_kernel, "VECTOR", 2)  # chunks of 256
    if device == "cpu":  # which runs programs one by one
        for module in (program_module, row_kernel):
            monkeypatch.setattr(module, "PARTIAL_SUMS", 4)
        rows = min(rows, 19)
    program = norm_backward(columns)
    inputs = operands(program, rows, columns, device)
    gradient, sums, amax = run(row_kernel, program, inputs)
    wanted = reference(program, inputs)
    assert_same(gradient, wanted[0], exact=False)
    assert torch.allclose(sums, wanted[1], rtol=1e-4, atol=1e-3)  # taken in another order
    assert_same(amax.bfloat16(), wanted[2].bfloat16(), exact=False)  # of what is rounded to it


@both_devices
@given(rows=st.integers(1, 200), columns=st.integers(1, 20).map(lambda n: 16 * n))
def test_amax_of_tiles(device, rows, columns):
    program = Program((Load("x", "full"),), (), (Store("x", ("amax",)),))
    inputs = operands(program, rows, columns, device)
    inputs[0][rows // 2, columns // 3] = math.nan
    (got,), (want,) = run(tile_kernel, program, inputs), reference(program, inputs)
    assert_same(got, want, exact=True)
    assert got.isnan().sum() == 1


COMPILATION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import test_kernels as t

TYPES = {"e4m3": "fp8e4nv", "bfloat16": "bf16", "float32": "fp32"}

def types(program):
    operands = {"full": "bf16", "column": "bf16", "row": "fp32", "scalar": "fp32"}
    for load in program.loads:
        yield from ("fp8e4nv", "bf16") if load.operand == "groups" else (operands[load.operand],)
    for store in program.stores:
        for layout in store.layouts:
            yield TYPES[store.format or store.dtype or "float32"]
            if layout == "groups":
                yield "bf16"

def compiled(module, program, rows, columns):
    launch = module.prepare(program, rows, columns)
    pointers = [n for n in launch.kernel.arg_names if n.startswith(("in", "out"))]
    signature = {n: f"*{t}" for n, t in zip(pointers, types(program), strict=True)}
    signature |= dict.fromkeys(launch.sizes, "i32") | dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(launch.kernel, signature, launch.constants)
    options = {"num_warps": launch.num_warps}
    return triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["ptx"]

tiles = compiled(t.tile_kernel, t.swiglu_backward(128), 4096, 1024)
print("cvt.rn.satfinite.e4m3x2" in tiles, "ex2.approx.ftz" in tiles)
rows = compiled(t.row_kernel, t.swiglu(128), 4096, 1024)
print("ex2.approx.ftz" in rows, "rcp.approx.ftz" in rows)
print("e4m3" in compiled(t.row_kernel, t.norm_backward(384), 4096, 384))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles in every other test")
def test_compiles_for_a_gpu(tmp_path):
    """What the interpreter does not see: the GPU's own instructions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), str(Path(fp8pass.__file__).parents[1])]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", COMPILATION]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["True"] * 5


def test_values_that_are_used_twice_are_written_once():
    squares = [Step("v1", "aten.mul.Tensor", ("x", "x"))]
    squares += [Step(f"v{i}", "aten.mul.Tensor", (f"v{i - 1}",) * 2) for i in range(2, 60)]
    steps, store = by_row("v59")
    program = Program((Load("x", "full"),), (*squares, *steps), (store,))
    shape = Shape(columns=96, chunk=128, held=True)
    assert source(program, shape).count(" * v58_0") == 1


@both_devices
@pytest.mark.parametrize("columns", [96, 1024, 1056, 1376])
def test_rows_in_several_chunks(device, columns, monkeypatch):
    """Some full, one not."""
    monkeypatch.setattr(row_kernel, "VECTOR", 1)
    program = swiglu(32)
    shape, _ = row_kernel._shape(program, columns)
    assert len(shape.chunks) == -(-columns // 256)
    check(row_kernel, program, operands(program, 5, columns, device))


@both_devices
@pytest.mark.parametrize("columns", [128, 130, 20480])
def test_values_that_do_not_vary_along_a_row(device, columns):
    """Reduced, and stored, as those that do."""
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
def test_equal_sums_are_stored_twice(device, monkeypatch):
    for module in (program_module, row_kernel):
        monkeypatch.setattr(module, "PARTIAL_SUMS", 4)
    program = Program(
        (Load("x", "full"),),
        (Step("total", "row_sum", ("x",)),),
        (Store("x", ("sums",)), Store("x", ("sums",)), Store("total", ("row",), dtype="float32")),
    )
    check(row_kernel, program, operands(program, 6, 128, device))


def spelled_out_silu() -> Program:
    """x / (1 + exp(-x)), its derivative's sigmoid, and a power that does nothing."""
    steps, store = by_row("y")
    return Program(
        (Load("x", "full"),),
        (
            Step("n", "aten.neg.default", ("x",)),
            Step("e", "aten.exp.default", ("n",)),
            Step("d", "aten.add.Tensor", ("e", 1)),
            Step("a", "aten.div.Tensor", ("x", "d")),
            Step("b", "aten.pow.Tensor_Scalar", ("a", 1.0)),
            Step("p", "aten.sigmoid.default", ("x",)),
            Step("y", "aten.mul.Tensor", ("b", "p")),
            *steps,
        ),
        (store,),
    )


def test_what_is_spelled_out_is_computed_once():
    targets = [step.target for step in simplify(spelled_out_silu()).steps]
    assert targets[:3] == ["aten.sigmoid.default", "aten.mul.Tensor", "aten.mul.Tensor"]
    assert targets[3:] == ["row_amax", "scale"]


@pytest.mark.parametrize("make", [spelled_out_silu, lambda: norm(96, 32), lambda: swiglu(32)])
def test_simpler_programs_are_equal(make):
    program = make()
    inputs = operands(program, 11, 96, "cpu")
    inputs[0][3], inputs[-1][4, :3] = -200.0, torch.tensor([math.nan, math.inf, -math.inf])
    wanted = reference(program, inputs)
    for got, want in zip(reference(simplify(program), inputs), wanted, strict=True):
        assert_same(got, want, exact=False)


def test_what_is_stored_keeps_its_name():
    """Of two equal values that are stored, each is."""
    squares = [Step(name, "aten.mul.Tensor", ("x", "x")) for name in ("a", "b", "c")]
    stores = tuple(Store(name, ("full",), dtype="float32") for name in ("a", "b"))
    program = Program((Load("x", "full"),), tuple(squares), stores)
    assert [step.name for step in simplify(program).steps] == ["a", "b"]


def test_what_is_rounded_is_not_taken_for_what_is_not():
    """A sum in bf16, and what it lacks."""
    program = Program(
        (Load("x", "full"), Load("y", "full")),
        (
            Step("a", "aten.add.Tensor", ("x", "y")),
            Step("c", "aten.add.Tensor", ("x", "y")),
            Step("d", "aten.sub.Tensor", ("c", "x")),
        ),
        (Store("a", ("full",), dtype="bfloat16"), Store("d", ("full",), dtype="float32")),
    )
    inputs = [torch.full((1, 16), x) for x in (256.0, 0.5)]
    assert reference(simplify(program), inputs)[1][0, 0] == 0.5


def test_a_program_is_its_text():
    program = norm(640, 128).canonical()
    assert Program.parse(program.dumps()) == program
    assert program.canonical() == program
