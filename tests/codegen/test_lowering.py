"""Lowered graphs compute the results of the references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import interpret_halves
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8pass import compat
from fp8pass.codegen.lowering import lower
from fp8pass.codegen.tuned_lowerings import LOWERINGS
from fp8pass.dialect.formats import FORMATS

fp8 = torch.ops.fp8pass
FORMAT_NAMES = ["e4m3", "e5m2", "e4m3_bytes", "exact"]
PACKED = ["e2m1", "e2m2", "e2m3"]
ROW = "e4m3 row"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NOT_FINITE = torch.tensor([float("nan"), float("inf"), -float("inf")])


@pytest.fixture(params=["fake", "symbolic"])
def tracing(request) -> str:
    return request.param


def lowered(function, *args, tracing: str) -> fx.GraphModule:
    """Trace and lower `function`.

    With "symbolic" all sizes except the last are symbolic, as for dynamic batch and length.
    """
    if tracing == "symbolic":
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [mode.from_tensor(x, symbolic_context=_varying(x)) for x in args]
        # AOTAutograd traces and compiles with this dispatcher.
        with mode, enable_python_dispatcher():
            return _lowered(make_fx(function, tracing_mode="real")(*fakes))
    return _lowered(make_fx(function, tracing_mode="fake")(*args))


def _varying(x: Tensor) -> StatelessSymbolicContext:
    sizes = [DimDynamic.STATIC if n == 1 else DimDynamic.DYNAMIC for n in x.shape]
    return StatelessSymbolicContext(
        dynamic_sizes=[*sizes[:-1], *[DimDynamic.STATIC] * (x.ndim > 0)]
    )


def _lowered(gm: fx.GraphModule) -> fx.GraphModule:
    before = [n.target for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fp8pass"]
    lower(gm)
    after = [n.target for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fp8pass"]
    assert before
    assert not after
    gm.graph.lint()
    return gm


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.itemsize == 1:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def check(function, *args, tracing: str, others: tuple[tuple, ...] = ()) -> fx.GraphModule:
    """Compare the lowered graph with the reference, also on `others` if sizes are symbolic."""
    gm = lowered(function, *args, tracing=tracing)
    for batch in (args, *(others if tracing == "symbolic" else ())):
        got, want = gm(*batch), function(*batch)
        assert same_bits(got, want)
        if tracing == "fake" and want.ndim == 2 and want.dtype.itemsize == 1:
            assert got.stride() == want.stride()
    return gm


def poisoned(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[:3] = NOT_FINITE
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype, tracing):
    for columns in (256, 48, 7):
        x, y = (torch.randn(rows, columns).to(dtype) for rows in (17, 40))
        check(
            lambda x: fp8.amax(x, "tensor"),
            x,
            tracing=tracing,
            others=((y,), (x * 1000,), (poisoned(y),)),
        )


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_scale(format, tracing):
    amax = torch.tensor(3.0)
    gm = check(lambda a: fp8.scale(a, f"{format} tensor"), amax, tracing=tracing)
    for value in (0.0, 1e-45, 1e-38, 3e-36, 448.0, 3.4e38, *NOT_FINITE[:2].tolist()):
        a = torch.tensor(value)
        if format != "exact":
            assert same_bits(gm(a), fp8.scale(a, f"{format} tensor")), value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_quantize(format, dtype, tracing):
    x, y = (torch.randn(rows, 48).to(dtype) for rows in (17, 32))

    def function(x, scale):
        return fp8.quantize(x, scale, f"{format} tensor")

    scale = torch.tensor(0.01)
    others = ((y, scale), (poisoned(y), scale), (y, scale * 1e-30), (y, torch.tensor(torch.inf)))
    check(function, x, scale, tracing=tracing, others=others)
    check(function, y.t().contiguous().t(), scale, tracing=tracing)
    check(function, y[:1].expand(32, 48), scale, tracing=tracing)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "exact"])
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_transpose_pads_rows(format, rows, tracing):
    def data(rows: int) -> Tensor:
        x = torch.randn(rows, 48)
        return x if format == "exact" else x.to(FORMATS[format].dtype)

    others = tuple((data(r),) for r in (2, 15, 16, 17, 31, 33) if rows > 1)
    check(lambda x: fp8.transpose(x), data(rows), tracing=tracing, others=others)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("exact", "exact")])
def test_scaled_mm(formats, with_bias, out, tracing):
    dtypes = [FORMATS[f].dtype or out for f in formats]
    a, b = (torch.randn(rows, 32).to(d) for rows, d in zip((17, 48), dtypes, strict=True))
    scales = torch.tensor(0.5), torch.tensor(0.03)
    bias = torch.randn(48).to(out) if with_bias else None

    def function(a, b, a_scale, b_scale):
        return fp8.scaled_mm(a, a_scale, b, b_scale, bias, out, False, "e4m3 tensor", "e4m3 tensor")

    taller = torch.randn(33, 32).to(dtypes[0])
    if bias is None:
        check(function, a, b, *scales, tracing=tracing, others=((taller, b, *scales),))
    else:
        check(
            lambda a, b, s, t, bias: fp8.scaled_mm(
                a, s, b, t, bias, out, False, "e4m3 tensor", "e4m3 tensor"
            ),
            *(a, b, *scales, bias),
            tracing=tracing,
            others=((taller, b, *scales, bias),),
        )


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("tracing", "dtype"),
    [("fake", torch.float32), ("fake", torch.float16), ("symbolic", torch.bfloat16)],
)
@pytest.mark.parametrize("format", [*FORMAT_NAMES, *PACKED])
def test_groups(format, dtype, tracing):
    planes = range(len(FORMATS[format].planes))

    def scale(x):
        return fp8.scale(fp8.amax(x, "1×16"), f"{format} 1×16")

    def quantize(plane):
        return lambda x, scales: fp8.quantize(x, scales, f"{format} 1×16", plane)

    def dequantize(scales, *codes):
        return fp8.dequantize(codes, scales, f"{format} 1×16", dtype)

    def batch(rows: int) -> Tensor:
        x = torch.randn(3, rows, 48) * 10.0 ** torch.randint(-4, 4, (3, rows, 48))
        x[:, 0, :16] = 0
        return x.to(dtype)

    x, y, z = batch(5), batch(8), poisoned(batch(6))
    if format != "exact":
        check(scale, x, tracing=tracing, others=((y,), (z,)))
    pairs = [(t, scale(t)) for t in (x, y, z)]
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    for i in planes:
        check(quantize(i), *pairs[0], tracing=tracing, others=tuple(pairs[1:]))
        check(quantize(i), transposed, pairs[0][1], tracing=tracing)
    coded = [(p[1], *(quantize(i)(*p) for i in planes)) for p in pairs]
    check(dequantize, *coded[0], tracing=tracing, others=tuple(coded[1:]))


def test_every_byte_decodes_as_in_torch():
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.ones(4, 4, dtype=torch.bfloat16)
    gm = lowered(
        lambda c, s: fp8.dequantize([c], s, "e4m3_bytes 1×16", torch.float32),
        *(codes, scales),
        tracing="fake",
    )
    want = codes.view(torch.float8_e4m3fn).float()
    got = gm(codes, scales)
    assert same_bits(got, want)
    assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())


def test_encoding_rounds_as_in_torch():
    """All E4M3 numbers, ties between them, and adjacent numbers; denormals; NaN; random numbers."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, ties])
    near = torch.cat(
        [points, *(torch.nextafter(points, torch.tensor(to)) for to in (0.0, torch.inf))]
    )
    tiny = torch.tensor([1e-45, 1e-38, 2.0**-10, 2.0**-11, 2.0**-9, 2.0**-6])
    random = torch.randn(4096) * torch.linspace(-20, 6, 4096).exp2()
    x = torch.cat([near, tiny, random, NOT_FINITE[:1]])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 16).clamp(-448, 448)
    ones = torch.ones(len(x), 1, dtype=torch.bfloat16)
    gm = lowered(lambda x, s: fp8.quantize(x, s, "e4m3_bytes 1×16"), x, ones, tracing="fake")
    got, want = gm(x, ones), x.to(torch.float8_e4m3fn).view(torch.uint8)
    nan = x.isnan()
    assert torch.equal(got[~nan], want[~nan])
    assert ((got[nan] & 0x7F) == 0x7F).all()


def test_a_graph_without_the_dialect_does_not_change():
    gm = make_fx(lambda x: x.relu() @ x.t(), tracing_mode="fake")(torch.randn(16, 16))
    code = gm.code
    lower(gm)
    assert gm.code == code


def with_inductor(gm, inputs):
    """Backend that lowers the dialect in an inference graph and generates code."""

    def inner(graph, example_inputs, **kwargs):
        lower(graph)
        return compat.compile_fx_inner(graph, example_inputs, **kwargs)

    return compat.compile_fx(gm, inputs, inner_compile=inner)


@pytest.mark.long
@pytest.mark.parametrize("format", ["e4m3", "e5m2", "e4m3_bytes"])
def test_generated_code_uses_the_scales_that_it_stores(format):
    """Values are divided by the bf16 scale that is stored, not by the fp32 number before it."""

    def function(x):
        scales = fp8.scale(fp8.amax(x, "1×16"), f"{format} 1×16")
        codes = fp8.quantize(x, scales, f"{format} 1×16")
        # Views: FP8 tensors cannot be compared.
        return (
            codes.view(torch.uint8),
            scales,
            fp8.dequantize([codes], scales, f"{format} 1×16", x.dtype),
        )

    x = poisoned(torch.randn(40, 48))
    codes, scales, back = torch.compile(function, backend=with_inductor)(x)
    want_codes, want_scales, want_back = function(x)
    assert torch.equal(scales[1:], want_scales[1:])
    assert torch.equal(codes[1:], want_codes[1:])
    assert torch.allclose(back[1:], want_back[1:], rtol=1e-6, atol=0)
    # NaN and Inf stay in their group.
    assert not back[0, :3].isfinite().any()
    assert back[1:].isfinite().all()
    assert torch.allclose(back[1:], x[1:], rtol=0.26, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("format", [*PACKED, "e2m5"])
def test_generated_code_packs_like_the_reference(format):
    """Bit for bit: all dtypes, odd and strided shapes; huge, tiny, zero, NaN and Inf values."""
    x = torch.randn(3, 5, 96) * 10.0 ** torch.tensor([-37.0, -6.0, 0.0, 4.0, 37.0])[:, None]
    x[2, :, 16:32] = 0
    x = poisoned(x)
    xs = (
        x,
        x.bfloat16().transpose(0, 1).contiguous().transpose(0, 1),
        x.half().repeat_interleave(2, -1)[..., ::2],
    )

    def pack(*xs):
        scales = [fp8.scale(fp8.amax(x, "1×32"), f"{format} 1×32") for x in xs]
        planes = [
            [fp8.quantize(x, s, f"{format} 1×32", i) for i in range(len(FORMATS[format].planes))]
            for x, s in zip(xs, scales, strict=True)
        ]
        return planes, scales

    def unpack(planes, scales):
        return [
            fp8.dequantize(p, s, f"{format} 1×32", dtype)
            for p, s, dtype in zip(planes, scales, DTYPES, strict=True)
        ]

    want = pack(*xs)
    for got, reference in (
        (torch.compile(pack, backend=with_inductor)(*xs), want),
        (torch.compile(unpack, backend=with_inductor)(*want), unpack(*want)),
    ):
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (got, reference)), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)
    assert not unpack(*want)[0][0, 0, :32].isfinite().any()


@pytest.mark.long
def test_packing_in_generated_code_with_dynamic_shapes():
    format = "e2m2"  # of two planes

    def function(x):
        scales = fp8.scale(fp8.amax(x, "1×16"), f"{format} 1×16")
        planes = [
            fp8.quantize(x, scales, f"{format} 1×16", i) for i in range(len(FORMATS[format].planes))
        ]
        return fp8.dequantize(planes, scales, f"{format} 1×16", x.dtype)

    compiles = torch._dynamo.testing.CompileCounterWithBackend(with_inductor)
    program = torch.compile(function, backend=compiles)
    for rows in (5, 8, 33):
        x = torch.randn(2, rows, 48)
        torch._dynamo.mark_dynamic(x, 1)
        assert same_bits(program(x), function(x))
    assert compiles.frame_count == 1


def test_lowering_for_a_gpu_keeps_dynamic_rows_dynamic():
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    rows = mode.from_tensor(torch.empty(32, 64), symbolic_context=_varying(torch.empty(32, 64)))
    with mode:
        x, w = (torch.empty(n, 64, device="cuda").bfloat16() for n in (rows.shape[0], 128))

    def forward(x, w):
        (a, a_scale), (b, b_scale) = ((fp8.quantize(y, s, ROW), s) for y, s in scaled(x, w))
        product = fp8.scaled_mm(a, a_scale, b, b_scale, None, x.dtype, True, ROW, ROW)
        return product, fp8.transpose(a)

    def scaled(*values):
        return [(y, fp8.scale(fp8.amax(y, "row"), ROW)) for y in values]

    with mode:
        gm = make_fx(forward, tracing_mode="real")(x, w)
    _lowered(gm)
    assert not shape_env.guards


def test_lowering_keeps_a_dynamic_number_of_tiles_dynamic():
    """A narrow matrix of dynamic rows may have a single tile of amaxes."""
    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    rows = mode.from_tensor(torch.empty(32, 64), symbolic_context=_varying(torch.empty(32, 64)))
    with mode:
        amaxes = torch.empty(compat.ceil_div(rows.shape[0], 64), 1)
    amax = LOWERINGS[fp8.amax.default].function
    compat.trace(lambda x: amax(x, "tensor", True, 1), [amaxes])
    assert not shape_env.guards


def test_lowered_graphs_of_one_group_run_op_by_op(monkeypatch):
    """Eager shifts give packed data other strides than the traced view of the result expects."""
    interpret_halves(monkeypatch)
    x, gain = torch.randn(1, 2, 16), torch.randn(16, requires_grad=True)

    def run(x):
        return (x * gain) @ (x.mT @ x)

    (want,) = torch.autograd.grad(run(x).sum(), gain)
    compiled = torch.compile(run, backend="fp8pass", options={"recipe": "agoq"})
    (got,) = torch.autograd.grad(compiled(x).sum(), gain)
    assert (got - want).norm() < 0.2 * want.norm()


# --- masks --------------------------------------------------------------------------------------

MASKS = [("e8m3", True, True), ("e5m2", True, True), ("e4m3", False, True), ("e6m9", True, False)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(mask, dtype, tracing):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    x = (values * 1.01).to(dtype).view(-1, 16)

    def function(x):
        return fp8.mask_format(x, *mask)

    gm = lowered(function, x, tracing=tracing)
    assert same_bits(gm(x), function(x))


@pytest.mark.long
def test_generated_masks_round_16_bit_results_first():
    """A fused mask gives the same result as a mask of the value in memory."""
    x = torch.randn(64, 64) * torch.logspace(-30, 30, 64)

    def function(x):
        narrow = [(x * 1.01).to(dtype) for dtype in DTYPES]
        return [fp8.mask_format(y, *mask) for y in narrow for mask in MASKS]

    gm = lowered(function, x, tracing="fake")
    want = function(x)
    compiled = torch.compile(gm, backend="inductor")
    for got, expected in zip(compiled(x), want, strict=True):
        assert same_bits(got, expected)
