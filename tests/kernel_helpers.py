"""Helpers of the tests of kernels: programs, their inputs, launches, and comparisons."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import benchmark_models
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import compat, compilation, hardware
from fp8pass.codegen.kernels import kernel_operator
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.codegen.program.reference import compute_program
from fp8pass.config import Config
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.nodes import copy_module
from fp8pass.passes import LOWERING_PASSES, Context
from fp8pass.passes.lowering.describe_kernels import describe_kernels
from fp8pass.passes.lowering.lower_dialect import lower_dialect
from fp8pass.passes.runner import run_passes

fp8 = torch.ops.fp8pass
F8 = torch.float8_e4m3fn
# Formats with packed planes, and the sizes of groups that kernels read.
PACKED = ("e2m1", "e2m2", "e2m3")
PACKED_GROUPS = [(format, size) for format in PACKED for size in (16, 128)]
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
both_devices = pytest.mark.parametrize("device", DEVICES)

# Operators that hardware or Triton computes with other last bits than PyTorch.
INEXACT = ("exp", "log", "sin", "cos", "erf", "sigmoid", "tanh", "silu", "rsqrt", "sqrt", "div")

# The passes that insert kernels in a forward or backward graph, and count them.
KERNEL_PASSES = LOWERING_PASSES[: LOWERING_PASSES.index(lower_dialect)]


def interpret_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run lowered graphs op by op instead of compiling them with Inductor."""
    monkeypatch.setattr(
        compat, "compile_fx_inner", lambda gm, inputs, **kwargs: compat.interpret(gm)
    )


@pytest.fixture
def interpreted(monkeypatch) -> None:
    """Run lowered graphs op by op instead of compiling them with Inductor."""
    interpret_halves(monkeypatch)


@pytest.fixture
def graphs(kernels_on_cpu, interpreted) -> list[fx.Graph]:
    """Enable kernels on the CPU, and interpret graphs. Return the list of graphs with kernels."""
    return kernels_on_cpu


@pytest.fixture
def kernels_on_cpu(monkeypatch) -> list[fx.Graph]:
    """Enable kernels on the CPU. Compilations append graphs with kernels to the returned list."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    found: list[fx.Graph] = []

    def record(gm: fx.GraphModule, ctx: Context) -> None:
        gm.graph.lint()
        found.append(copy_module(gm).graph)

    rest = LOWERING_PASSES[len(KERNEL_PASSES) :]
    monkeypatch.setattr(compilation, "LOWERING_PASSES", (*KERNEL_PASSES, record, *rest))
    return found


def use_kernels(gm: fx.GraphModule) -> None:
    """Run the passes that insert kernels."""
    run_passes(KERNEL_PASSES, gm, Context(Config()), of="forward")


def counts(graphs: list[fx.Graph]) -> Counter[str]:
    """Count programs by kernel. "quantize" counts matrices that are quantized without a kernel."""
    found: Counter[str] = Counter()
    for g in graphs:
        ctx = Context(Config())
        describe_kernels(fx.GraphModule(nn.Module(), g), ctx)
        (use,) = ctx.plan.kernels
        found.update(use.programs)
        found["quantize"] += sum(use.generated.values())
    return +found


def run(module, program: Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Launch the Triton kernel of `program`. Poisoned outputs reveal elements that it skips."""
    return run_batch(module, Batch((program,)), inputs)


def run_batch(module, batch: Batch, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Launch the Triton kernels of a batch. Poisoned outputs reveal elements that they skip."""
    results = batch.empty_outputs(inputs)
    for x in results:
        x.view(torch.uint8).fill_(0x55)
    kernel_operator.run(module.prepare, batch, inputs, results)
    return results


def operands(program: Program, rows: int, columns: int, device: str, scale: float = 1.0):
    """Return random inputs of a program."""
    inputs: list[torch.Tensor] = []
    shapes = {"full": (rows, columns), "row": (rows, 1), "column": (columns,), "scalar": ()}
    for load in program.loads:
        width = load.width or columns
        if load.operand == "groups":
            planes = [(torch.randn(rows, width) * 100).clamp(-448, 448).to(F8)]
            if load.packed:
                sizes = [(rows, columns * bits // 8) for bits in FORMATS[load.format].planes]
                planes = [torch.randint(256, size, dtype=torch.uint8) for size in sizes]
            scales = torch.rand(rows, width // load.group_size) * scale / 50 + 1e-3
            inputs += [*planes, scales.bfloat16()]
        elif load.operand == "scalar":
            inputs.append(torch.rand(()) * scale / 50 + 1e-3)
        elif load.operand == "row":
            inputs.append(torch.rand(shapes["row"]) + 0.5)
        elif load.width:
            inputs.append((torch.randn(rows, width) * scale).bfloat16())
        else:
            inputs.append((torch.randn(shapes[load.operand]) * scale).bfloat16())
    return [x.to(device) for x in inputs]


def values(codes: torch.Tensor) -> torch.Tensor:
    return codes.double()


def assert_same(got: torch.Tensor, want: torch.Tensor, *, exact: bool) -> None:
    """Check that bits are equal, or differ by one rounding step in few elements."""
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
    wanted = compute_program(program, inputs)
    for got, want in zip(run(module, program, inputs), wanted, strict=True):
        assert_same(got, want, exact=exact)


CAST = Program(
    (Load("s", "scalar"), Load("x", "full")), (), (Store("x", ("rows", "columns"), "s", "e4m3"),)
)


def swiglu_backward(group: int, saved: str = "e4m3") -> Program:
    """Return a program that recomputes the input of down, and the gradients of gate and up."""
    return Program(
        (
            Load("s", "scalar"),
            Load("r", "scalar"),
            Load("t", "scalar"),
            Load("d", "full"),
            Load("g", "groups", group, saved),
            Load("u", "groups", group, saved),
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


def gelu_backward(group: int) -> Program:
    """Return a program for the amaxes and column sums of a gradient of GELU, in the tanh form."""
    return Program(
        (Load("d", "full"), Load("x", "groups", group, "e4m3")),
        (
            Step("square", "aten.mul.Tensor", ("x", "x")),
            Step("cube", "aten.mul.Tensor", ("square", "x")),
            Step("part", "aten.mul.Scalar", ("cube", 0.044715)),
            Step("sum", "aten.add.Tensor", ("x", "part")),
            Step("inner", "aten.mul.Scalar", ("sum", 0.7978845608028654)),
            Step("t", "aten.tanh.default", ("inner",)),
            Step("up", "aten.add.Scalar", ("t", 1.0)),
            Step("half", "aten.mul.Scalar", ("x", 0.5)),
            Step("slope", "aten.mul.Scalar", ("square", 0.1070322243)),
            Step("shifted", "aten.add.Scalar", ("slope", 0.7978845608028654)),
            Step("tt", "aten.mul.Tensor", ("t", "t")),
            Step("rest", "aten.rsub.Scalar", ("tt", 1.0)),
            Step("left", "aten.mul.Tensor", ("half", "rest")),
            Step("right", "aten.mul.Tensor", ("left", "shifted")),
            Step("halved", "aten.mul.Scalar", ("up", 0.5)),
            Step("derivative", "aten.add.Tensor", ("halved", "right")),
            Step("dx", "aten.mul.Tensor", ("d", "derivative")),
        ),
        (Store("dx", ("amax",)), Store("dx", ("tile_sums",), dtype="bfloat16")),
    )


def by_row(x: str) -> tuple[tuple[Step, ...], Store]:
    """Return the steps and the store that quantize `x` by row."""
    steps = Step("amax", "row_amax", (x,)), Step("scale", "scale", ("amax", "e4m3"))
    return steps, Store(x, ("rows",), "scale", "e4m3")


ROW_CAST = Program((Load("x", "full"),), by_row("x")[0], (by_row("x")[1],))


def norm(columns: int, group: int) -> Program:
    """Return a program that saves a residual sum in groups, and quantizes its RMS norm by row."""
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


def swiglu(group: int, saved: str = "e4m3") -> Program:
    """Return a program that saves gate and up in groups, and quantizes their product by row."""
    steps, store = by_row("h")
    return Program(
        (Load("g", "full"), Load("u", "full")),
        (Step("a", "aten.silu.default", ("g",)), Step("h", "aten.mul.Tensor", ("a", "u")), *steps),
        (
            Store("scale", ("row",), dtype="float32"),
            Store("g", ("groups",), format=saved, group_size=group),
            Store("u", ("groups",), format=saved, group_size=group),
            store,
        ),
    )


def in_parts(program: Program, columns: int, gap: int) -> Program:
    """Make a program read matrices with `gap` unused columns before and after them."""
    wider = {"columns": columns, "width": columns + 2 * gap, "offset": gap}
    loads = (replace(x, **wider) if x.operand in ("full", "groups") else x for x in program.loads)
    return replace(program, loads=tuple(loads))


def norm_backward(columns: int, saved: str = "e4m3") -> Program:
    """Return a program for the gradients of a residual stream and of the weight of its norm."""
    return Program(
        (
            Load("w", "column"),
            Load("rstd", "row"),
            Load("dy", "full"),
            Load("residual", "full"),
            Load("x", "groups", 128, saved),
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


def cross_entropy() -> Program:
    """Return a program for the loss of each row, and the gradient of the logits `x`."""
    return Program(
        (Load("label", "row"), Load("weight", "row"), Load("x", "full")),
        (
            Step("largest", "row_max", ("x",)),
            Step("shifted", "aten.sub.Tensor", ("x", "largest")),
            Step("power", "aten.exp.default", ("shifted",)),
            Step("total", "row_sum", ("power",)),
            Step("log", "aten.log.default", ("total",)),
            Step("log_p", "aten.sub.Tensor", ("shifted", "log")),
            Step("is_label", "is_column", ("label",)),
            Step("picked", "aten.where.self", ("is_label", "log_p", 0.0)),
            Step("loss", "row_sum", ("picked",)),
            Step("one_hot", "aten.where.self", ("is_label", -1.0, 0.0)),
            Step("p", "aten.exp.default", ("log_p",)),
            Step("weighted", "aten.mul.Tensor", ("one_hot", "weight")),
            Step("element", "row_sum", ("weighted",)),
            Step("rest", "aten.mul.Tensor", ("p", "element")),
            Step("gradient", "aten.sub.Tensor", ("weighted", "rest")),
        ),
        (
            Store("gradient", ("full",), dtype="bfloat16"),
            Store("loss", ("row",), dtype="float32"),
        ),
    )


# --- graphs ---------------------------------------------------------------------------------------


def fused(monkeypatch, function, *args: torch.Tensor) -> fx.GraphModule:
    """Return the graph of a function with kernels. Check that its results do not change.

    The graph is not verified, because the spec does not allow the uint8 views of FP8 data here.
    """
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    gm = make_fx(function, tracing_mode="fake")(*args)
    use_kernels(gm)
    gm.graph.lint()
    for got, want in zip(gm(*args), function(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return gm


def programs_of(gm: fx.GraphModule, op) -> list[int]:
    """Return the number of programs of each node that calls `op`."""
    return [len(Batch.parse(n.args[1]).programs) for n in gm.graph.nodes if n.target is op]


def by_rows(x):
    """Quantize by row. Return the FP8 data as bytes, and the amax of each row."""
    largest = fp8.amax(x, "row")
    codes = fp8.quantize(x, fp8.scale(largest, "e4m3 row"), "e4m3 row")
    return codes.view(torch.uint8), largest


def random(*shape: int) -> torch.Tensor:
    """Return random numbers that depend on the shape only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- models ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Small decoder layers of the benchmarks."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        models = benchmark_models()
        self.stack = models.Stack(layers, 128, 2, 256)
        self.tables = models.rope_tables(16, 64, torch.device("cpu"))

    def forward(self, x):
        return self.stack(x, *self.tables)
