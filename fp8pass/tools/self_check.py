"""Run every kernel and GEMM once on a GPU, and compare the results with the reference.

`fp8pass env --check` prints the outcomes. The sizes include single rows, incomplete tiles and
unaligned matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.codegen import lowering
from fp8pass.codegen.kernels import kernel_operator
from fp8pass.codegen.kernels.row_kernel import prepare as prepare_rows
from fp8pass.codegen.kernels.tile_kernel import prepare as prepare_tiles
from fp8pass.codegen.program.ir import (
    ROW_BLOCK,
    SQUARE_BLOCK,
    Load,
    Program,
    Step,
    Store,
)
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.dialect import ops as ops  # defines the operators
from fp8pass.dialect.formats import SAVED_FORMATS
from fp8pass.dialect.quantization import block_text, parse

fp8 = torch.ops.fp8pass

GROUP = 128
ROWS = 1, 17, 130
COLUMNS = 128, 640
# Library GEMMs sum in another order than the reference. A result may differ by the first share of
# its magnitude, plus the second share of the sum of the magnitudes of its terms.
GEMM_ERROR, TERM_ERROR = 2.0**-7, 2.0**-10
CAST_ERROR = 2.0**-7


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        name: the kernel or GEMM.
        case: sizes and formats.
        problem: the difference from the reference, or an error; '' if the check passed.
        skipped: why the check did not run; '' if it ran.
    """

    name: str
    case: str
    problem: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Comparison:
    """Results of one check: computed by the device, and by the reference."""

    case: str
    got: list[Tensor]
    want: list[Tensor]
    allowed: list[Tensor] | None = None  # allowed differences; None if bits must be equal


Check = Callable[[torch.device], Iterator[Comparison]]


def check_device(device: torch.device) -> Iterator[Outcome]:
    """Run all checks on `device`, a GPU."""
    for name, (why_not, check) in CHECKS.items():
        if reason := why_not(device):
            yield Outcome(name, "", skipped=reason)
            continue
        try:
            with torch.accelerator.device_index(device.index):  # Triton uses the current device
                comparisons = list(check(device))
            for comparison in comparisons:
                yield Outcome(name, comparison.case, _describe_difference(comparison))
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            yield Outcome(name, "", f"{type(error).__name__}: {text[0]}")


def _describe_difference(found: Comparison) -> str:
    for number, (got, want) in enumerate(zip(found.got, found.want, strict=True)):
        a, b = (x.detach().cpu().double() for x in (got, want))
        if a.shape != b.shape:
            return f"result {number} has shape {list(a.shape)} instead of {list(b.shape)}"
        allowed = found.allowed[number].double() if found.allowed else 0.0
        wrong = ~(((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()))
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            return (
                f"result {number}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, "
                f"first {a[place]:.6g} instead of {b[place]:.6g} at {list(place)}"
            )
    return ""


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Return BF16 values whose columns have very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, shape[-1]).roll(seed)
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def quantize(x: Tensor, text: str) -> tuple[Tensor, Tensor]:
    scale = fp8.scale(fp8.amax(x, block_text(parse(text).block)), text)
    return fp8.quantize(x, scale, text), scale


# --- kernels --------------------------------------------------------------------------------------

# The elementwise steps only add and multiply, so that results are bitwise equal on all devices.
ROW_PROGRAM = Program(
    (Load("w", "column"), Load("x", "full"), Load("y", "full")),
    (
        Step("sum", "aten.add.Tensor", ("x", "y")),
        Step("h", "aten.mul.Tensor", ("sum", "w")),
        Step("amax", "row_amax", ("h",)),
        Step("scale", "scale", ("amax", "e4m3")),
    ),
    (
        Store("sum", ("full",), dtype="bfloat16"),
        *(Store("sum", ("groups",), format=f.name, group_size=GROUP) for f in SAVED_FORMATS),
        Store("h", ("groups",), format="e4m3", group_size=GROUP, scale_form="fp32"),
        Store("amax", ("row",), dtype="float32"),
        Store("scale", ("row",), dtype="float32"),
        Store("h", ("rows",), "scale", "e4m3"),
    ),
)
TILE_PROGRAM = Program(
    (Load("s", "scalar"), Load("d", "full"), Load("g", "groups", GROUP, "e4m3")),
    (Step("h", "aten.mul.Tensor", ("d", "g")),),
    (Store("h", ("rows", "columns"), "s", "e4m3"), Store("d", ("columns",), "s", "e4m3")),
)
AMAX_PROGRAM = replace(TILE_PROGRAM, stores=(Store("h", ("amax",)),))
SUM_PROGRAM = Program(
    (Load("x", "full"), Load("y", "full")),
    (Step("h", "aten.mul.Tensor", ("x", "y")),),
    (Store("h", ("amax",)), Store("x", ("tile_sums",), dtype="bfloat16")),
)
ROW_BLOCKS = replace(
    TILE_PROGRAM,
    stores=(
        Store("h", ("rows",), format="e4m3", block=ROW_BLOCK),
        Store("h", ("columns",), "s", "e4m3"),
        Store("d", ("rows",), format="e4m3", block=ROW_BLOCK),
    ),
)
# The number of rows must be a multiple of the block's side.
SQUARES = replace(
    SUM_PROGRAM, stores=(Store("y", ("rows", "columns"), format="e4m3", block=SQUARE_BLOCK),)
)


def _compare_programs(
    prepare: Any,
    programs: dict[str, Program],
    device: torch.device,
    all_rows: tuple[int, ...] = ROWS,
) -> Iterator[Comparison]:
    for rows in all_rows:
        for columns in COLUMNS:
            for name, program in programs.items():
                inputs = _make_inputs(program, rows, columns)
                batch, on_device = Batch((program,)), [x.to(device) for x in inputs]
                got = batch.empty_outputs(on_device)
                kernel_operator.run(prepare, batch, on_device, got)
                want = batch.reference(inputs)
                allowed = None
                if program is SUM_PROGRAM:  # sums depend on the order of their terms
                    allowed = [2.0**-16 * x.float().abs() + 1e-3 for x in want]
                yield Comparison(f"{name} {rows}×{columns}", got, want, allowed)


def _make_inputs(program: Program, rows: int, columns: int) -> list[Tensor]:
    inputs: list[Tensor] = []
    for number, load in enumerate(program.loads):
        x = _random(rows, columns, seed=number)
        if load.operand == "groups":
            inputs += quantize(x, f"{load.format} 1×{load.group_size}")
        else:
            shapes = {"full": x, "column": x[0], "scalar": torch.tensor(2.0**-3)}
            inputs.append(shapes[load.operand])
    return inputs


def _check_rows(device: torch.device) -> Iterator[Comparison]:
    return _compare_programs(prepare_rows, {"sum, groups and row scales": ROW_PROGRAM}, device)


def _check_tiles(device: torch.device) -> Iterator[Comparison]:
    programs = {"both layouts": TILE_PROGRAM, "amax of": AMAX_PROGRAM, "sums of": SUM_PROGRAM}
    yield from _compare_programs(prepare_tiles, {**programs, "1×128 of": ROW_BLOCKS}, device)
    yield from _compare_programs(prepare_tiles, {"128×128 of": SQUARES}, device, (128, 384))


def _check_expert_transpose(device: torch.device) -> Iterator[Comparison]:
    from fp8pass.codegen.kernels.expert_transpose import transpose_segments

    for counts in ([20], [0, 7, 33, 16, 1]):
        offsets = torch.tensor(counts).cumsum(0).int()
        x = _random(sum(counts) + 3, 80)
        scales = fp8.scale(fp8.segment_amax(fp8.amax(x, "row"), offsets), "e4m3 row")
        data, row_scales = quantize(x, "e4m3 row")
        for case, rows, own_scales in (("", x, None), (", FP8 data", data, row_scales)):
            want = fp8.transpose_segments(rows, scales, offsets, "e4m3", None, own_scales)
            on_device = rows.to(device), scales.to(device), offsets.to(device)
            own_scales = own_scales if own_scales is None else own_scales.to(device)
            got = transpose_segments(*on_device, "e4m3", row_scales=own_scales)
            yield Comparison(f"{len(counts)} experts{case}", [got], [want])


def _check_weights(device: torch.device) -> Iterator[Comparison]:
    from fp8pass.weights import quantization_kernel

    weights = [_random(rows, columns, seed=rows) for rows in ROWS for columns in COLUMNS]
    want = [quantize(x, "e4m3 row") for x in weights]
    data = torch.empty(sum(x.numel() for x in weights), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(sum(map(len, weights)), device=device)
    on_device = [x.to(device) for x in weights]
    quantization_kernel.quantize_rows(on_device, torch.bfloat16, data, scales)
    wanted = [torch.cat([x[i].float().flatten() for x in want]) for i in range(2)]
    yield Comparison(f"{len(weights)} matrices", [data.float(), scales], wanted)


def _check_wire(device: torch.device) -> Iterator[Comparison]:
    from fp8pass.distributed import wire, wire_kernels

    for length in (1, 129, 1000):
        rows = _random(3, length).float()
        want = wire.pack(rows)
        got = torch.empty_like(want, device=device)
        wire_kernels.pack(rows.to(device), got, wire.WIRE_GROUP_SIZE)
        yield Comparison(f"pack 3×{length}", [got], [want])
        total, into = wire.add_up(want[:, None], rows[:1].clone()), torch.empty(1, length)
        into = into.to(device)
        wire_kernels.add_up(want[:, None].to(device), into, 1.0, wire.WIRE_GROUP_SIZE)
        yield Comparison(f"add up 3×{length}", [into], [total], [2.0**-20 * total.abs()])


def _check_optimizer(device: torch.device) -> Iterator[Comparison]:
    from fp8pass.optim import AdamW

    found = []
    for place in (device, torch.device("cpu")):
        weight = torch.nn.Parameter(_random(17, 130).float().to(place))
        optimizer = AdamW([weight], lr=1e-2)
        for step in range(3):
            weight.grad = _random(17, 130, seed=step + 1).float().to(place)
            optimizer.step()
        found.append(weight.detach())
    # A moment near the midpoint between two FP8 numbers may be rounded up or down.
    yield Comparison(
        "three steps of 17×130", found[:1], found[1:], [2.0**-8 * found[1].abs() + 1e-3]
    )


def _check_generated(device: torch.device) -> Iterator[Comparison]:
    """Check the casts that Inductor generates: with group scales, and transposed."""
    texts = [f"{f.name} 1×{GROUP}" for f in SAVED_FORMATS]

    def cast(x: Tensor, factor: float) -> list[Tensor]:
        """Return data and scales. Scales are computed from `x`, data from `factor * x`."""
        results = []
        for text in texts:
            scale = fp8.scale(fp8.amax(x, f"1×{GROUP}"), text)
            count = len(parse(text).format.planes)
            planes = [fp8.quantize(x * factor, scale, text, i) for i in range(count)]
            results += [fp8.dequantize(planes, scale, text, torch.float32), scale.float()]
        for text in ("e4m3 tensor", "e5m2 tensor"):
            scale = fp8.scale(fp8.amax(x, "tensor"), text)
            data = fp8.quantize(x * factor, scale, text)
            results += [data.float(), fp8.transpose(data).float()]
        return results

    x = _random(48, 640).float()
    lowered, want = trace_and_lower(partial(cast, factor=1.0), x.to(device)), cast(x, 1.0)
    # Generated divisions and powers are less precise, so values near the midpoint between two FP8
    # numbers may be rounded up or down.
    ends = zip(cast(x, 1 - CAST_ERROR), cast(x, 1 + CAST_ERROR), want, strict=True)
    allowed = [torch.maximum((a - b).abs(), CAST_ERROR * c.abs()) for a, b, c in ends]
    yield Comparison("48×640", torch.compile(lowered)(x.to(device)), want, allowed)


def trace_and_lower(function: Callable[..., Any], *args: Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function, tracing_mode="fake")(*args)
    lowering.lower(gm)
    return gm


# --- GEMMs ----------------------------------------------------------------------------------------


def _check_gemm(*texts: str, dtype: torch.dtype = torch.bfloat16) -> Check:
    """Check a GEMM whose operands have the quantizations `texts`."""

    def multiply(a: Tensor, b: Tensor, bias: Tensor, turned: bool = False) -> Tensor:
        a = a.t().contiguous().t() if turned else a  # the layout of wgrad's operands
        operands = (*quantize(a, texts[0]), *quantize(b, texts[1]))
        product: Tensor = fp8.scaled_mm(*operands, bias, dtype, False, *texts)
        return product

    def check(device: torch.device) -> Iterator[Comparison]:
        for m, n, k in ((128, 128, 128), (384, 640, 1152), (256, 512, 1024)):
            args = _random(m, k), _random(n, k, seed=1), _random(1, n, seed=2)[0].to(dtype)
            on_device = [x.to(device) for x in args]
            a, b, bias = args
            want, terms = multiply(*args), multiply(a.abs(), b.abs(), bias.abs())
            for turned in (False, True):
                run = partial(multiply, turned=turned)
                got = trace_and_lower(run, *on_device)(*on_device)
                case = f"{m}×{n}×{k}" + ", transposed" * turned
                yield Comparison(case, [got], [want], [_allowed(want, terms)])

    return check


def _allowed(want: Tensor, terms: Tensor) -> Tensor:
    return GEMM_ERROR * want.double().abs() + TERM_ERROR * terms.double().abs()


def _check_experts(device: torch.device) -> Iterator[Comparison]:
    counts = [0, 7, 33, 16, 1]
    offsets = torch.tensor(counts).cumsum(0).int()
    x, y = _random(sum(counts), 64), _random(sum(counts), 48, seed=1)
    weights = _random(len(counts) * 48, 64, seed=2)

    def multiply(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        operands = *quantize(x, "e4m3 row"), *quantize(weights, "e4m3 row")
        return fp8.scaled_grouped_mm(*operands, offsets, torch.bfloat16)

    def contract(y: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        operands: list[Tensor] = []
        for matrix in (y, x):
            amax = fp8.segment_amax(fp8.amax(matrix, "row"), offsets)
            scale = fp8.scale(amax, "e4m3 row")
            operands += [fp8.transpose_segments(matrix, scale, offsets, "e4m3"), scale]
        return fp8.scaled_grouped_outer(*operands, fp8.padded_ends(offsets), torch.bfloat16)

    runs: list[tuple[str, Callable[..., Tensor], tuple[Tensor, Tensor]]]
    runs = [("forward", multiply, (x, weights)), ("wgrad", contract, (y, x))]
    for name, run, args in runs:
        on_device = [t.to(device) for t in (*args, offsets)]
        got, want = trace_and_lower(run, *on_device)(*on_device), run(*args, offsets)
        terms = run(*map(torch.abs, args), offsets)
        yield Comparison(name, [got], [want], [_allowed(want, terms)])


def _why_no_rows(device: torch.device) -> str | None:
    lacking = hardware.why_no_fp8_gemm(device) or hardware.why_no_row_scales(device)
    return lacking and f"this GPU uses one scale per tensor: {lacking}"


CHECKS: dict[str, tuple[Callable[[torch.device], str | None], Check]] = {
    "row kernel": (hardware.why_no_triton_kernels, _check_rows),
    "tile kernel": (hardware.why_no_triton_kernels, _check_tiles),
    "expert transpose": (hardware.why_no_triton_kernels, _check_expert_transpose),
    "frozen weights": (hardware.why_no_triton_kernels, _check_weights),
    "communication": (hardware.why_no_triton_kernels, _check_wire),
    "AdamW": (hardware.why_no_triton_kernels, _check_optimizer),
    "generated casts": (hardware.why_no_fp8_gemm, _check_generated),
    "GEMM, one scale": (hardware.why_no_fp8_gemm, _check_gemm("e4m3 tensor", "e4m3 tensor")),
    "GEMM, e5m2": (hardware.why_no_fp8_gemm, _check_gemm("e5m2 tensor", "e4m3 tensor")),
    "GEMM, FP32 result": (
        hardware.why_no_fp8_gemm,
        _check_gemm("e4m3 tensor", "e4m3 tensor", dtype=torch.float32),
    ),
    "GEMM, FP32 result of blocks": (
        hardware.why_no_fp8_gemm,
        _check_gemm("e4m3 1×128 fp32", "e4m3 128×128 fp32", dtype=torch.float32),
    ),
    "GEMM, row scales": (_why_no_rows, _check_gemm("e4m3 row", "e4m3 row")),
    "GEMM, blocks": (
        hardware.why_no_fp8_gemm,
        _check_gemm("e4m3 1×128 fp32", "e4m3 128×128 fp32"),
    ),
    "GEMM, blocks of rows": (
        hardware.why_no_fp8_gemm,
        _check_gemm("e4m3 1×128 fp32", "e4m3 1×128 fp32"),
    ),
    "GEMM, MX": (hardware.why_no_fp8_gemm, _check_gemm("e4m3 1×32 e8m0", "e4m3 1×32 e8m0")),
    "GEMMs of experts": (hardware.why_no_grouped_gemm, _check_experts),
}
