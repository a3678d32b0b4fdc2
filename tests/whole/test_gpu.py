"""Tests that need a GPU: tensor cores, Inductor's Triton code, allocator readings, CUDA graphs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from helpers import (
    MLP,
    TrainingStep,
    assert_same_step,
    benchmark_models,
    compiled,
    identical,
    pad_gemms,
    relative,
    sqnr,
    step,
)
from torch import nn

from fp8pass import compat, hardware
from fp8pass.codegen.lowering import lower
from fp8pass.config import Config
from fp8pass.dialect.formats import FORMATS
from fp8pass.optim import AdamW

fp8 = torch.ops.fp8pass

pytestmark = pytest.mark.gpu
HIDDEN, HEADS, FFN, BATCH, SEQ = 512, 8, 1408, 2, 512


def layer(dtype=torch.bfloat16, batch=BATCH, seq=SEQ, layers=1):
    """Return decoder layers and their batch."""
    torch.manual_seed(0)
    models = benchmark_models()
    model = models.Stack(layers, HIDDEN, HEADS, FFN)
    models.init_weights(model)
    device = torch.device("cuda")
    cos, sin = models.rope_tables(seq, HIDDEN // HEADS, device)
    x = torch.randn(batch, seq, HIDDEN).to(device, dtype).requires_grad_()
    return model.to(device, dtype), (x, cos.to(dtype), sin.to(dtype))


def reference(model: nn.Module, args) -> TrainingStep:
    """Run the step in fp32."""
    wide = copy.deepcopy(model).float()
    x, *rest = args
    return step(wide, wide, (x.detach().float().requires_grad_(), *(r.float() for r in rest)))


def assert_close(got: TrainingStep, want: TrainingStep, decibel: float = 20) -> None:
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert sqnr(a, b) >= decibel
    for name, b in want.gradients.items():
        assert sqnr(got.gradients[name], b) >= decibel, f"{name}: {sqnr(got.gradients[name], b)}"


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_agree_with_generated_code(recipe, dynamic, monkeypatch):
    model, args = layer(layers=2, seq=500)
    config = Config.recipe(recipe)
    program, _ = compiled(model, config, dynamic=dynamic)
    got = step(program, model, args)
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_rows,fuse_norms,fuse_tiles")
    torch._dynamo.reset()
    program, _ = compiled(model, config, dynamic=dynamic)
    assert_close(got, step(program, model, args), decibel=17)  # torchao's bound for wgrad
    assert_close(got, reference(model, args), decibel=8)


def agree(got: TrainingStep, want: TrainingStep, tolerance: float) -> None:
    """Check that outputs and gradients agree within a relative error."""
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert relative(a, b) < tolerance
    for name, b in want.gradients.items():
        assert relative(got.gradients[name], b) < tolerance, name


def requested_bytes() -> int:
    """Return the bytes that the program requested, without the allocator's rounding."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def with_inductor(gm, inputs):
    """Backend that lowers the dialect in an inference graph and compiles it with Inductor."""

    def inner(graph, example_inputs, **kwargs):
        lower(graph)
        return compat.compile_fx_inner(graph, example_inputs, **kwargs)

    return compat.compile_fx(gm, inputs, inner_compile=inner)


def test_coat_is_close_to_fp32():
    model, args = layer()
    program, spy = compiled(model, Config())
    assert_close(step(program, model, args), reference(model, args))
    assert all(len(y.fp8) == 3 for y in spy.plan.linears)


def test_generated_code_agrees_with_the_reference_kernels():
    model, args = layer()
    steps = []
    for compiler in ("eager", "inductor"):
        torch._dynamo.reset()
        steps.append(step(compiled(model, Config(compiler=compiler))[0], model, args))
    # The reference rounds every intermediate to bf16, which can change the rounding to FP8.
    agree(steps[1], steps[0], 0.07)


@pytest.mark.parametrize("recipe", ["coat", "linear"])
def test_the_allocator_agrees_with_the_plan(recipe):
    model, args = layer(batch=8, seq=1024, layers=2)
    program, spy = compiled(model, Config.recipe(recipe))
    step(program, model, args)
    for p in model.parameters():
        p.grad = None
    args[0].grad = None
    gc.collect()
    torch.cuda.synchronize()
    before = requested_bytes()
    y = program(*args)
    torch.cuda.synchronize()
    saved = requested_bytes() - before - y.untyped_storage().nbytes()
    # The rotary tables are in the plan, but the caller owns their memory.
    tables = sum(s.bytes for s in spy.plan.saved if s.op == "placeholder")
    planned = spy.plan.saved_bytes - tables
    assert abs(saved - planned) <= 0.02 * planned, (saved, planned)
    del y


def test_coat_saves_fewer_bytes_than_stock():
    model, args = layer()
    program, spy = compiled(model, Config())
    program(*args)
    assert spy.plan.saved_bytes < 0.65 * spy.plan.stock_bytes


def peak_bytes(config: Config) -> int:
    """Return the peak memory of a step of eight layers.

    The first step may free memory of other tests, so the second step is measured.
    """
    torch._dynamo.reset()
    model, args = layer(batch=16, seq=1024, layers=8)
    program, _ = compiled(model, config)
    for _ in range(2):
        step(program, model, args)
        for p in model.parameters():
            p.grad = None
        args[0].grad = None
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes()
        program(*args).sum().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        model.zero_grad()
        args[0].grad = None
    return peak - before


def test_the_peak_falls_with_the_budget():
    peaks = [peak_bytes(Config(memory_budget=b)) for b in (None, 0.75, 0.5)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.8 * peaks[0]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_all_modes_agree(mode):
    model = MLP((64, 128, 64)).cuda().bfloat16()
    args = (torch.randn(48, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True),)
    plain = step(torch.compile(model, backend="fp8pass"), model, args)
    torch._dynamo.reset()
    program = torch.compile(model, backend="fp8pass", mode=mode)
    for _ in range(3):  # warm-up, recording, replay
        torch.compiler.cudagraph_mark_step_begin()
        found = step(program, model, args)
        found = TrainingStep(
            [y.clone() for y in found.outputs],
            {n: g.clone() for n, g in found.gradients.items() if g is not None},
            {},
        )
    agree(found, plain, 0.05)


def blocks(mode) -> tuple[nn.Module, nn.Module]:
    """Return two equal blocks, compiled one by one."""
    model = nn.ModuleList(MLP((64, 128, 64)) for _ in range(2)).cuda()
    parts = [torch.compile(m, backend="fp8pass", mode=mode) for m in model]
    return model, lambda x: parts[1](parts[0](x))


def whole(mode) -> tuple[nn.Module, nn.Module]:
    """Return a model that is compiled as a whole."""
    model = MLP((64, 128, 64)).cuda()
    return model, torch.compile(model, backend="fp8pass", mode=mode)


def trained(make, mode, counts, *, keeps: bool = False) -> torch.Tensor:
    """Return the change of all weights after steps with `counts` micro-batches each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, program = make(mode)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    if keeps:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    for count in counts:
        for _ in range(count):
            x = torch.randn(48, 64, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = (program(x) - x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps)
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


# CUDA graphs are warmed up and recorded before or while gradients are accumulated.
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (3, 3, 3, 3), (1, 1, 1, 3, 1, 2)])
@pytest.mark.parametrize("make", [whole, blocks])
def test_cuda_graphs_train_like_eager_code(make, counts):
    """Replays overwrite gradients, which must not change their sums."""
    want = trained(make, None, counts)
    assert relative(trained(make, "reduce-overhead", counts), want) < 0.05


def test_cuda_graphs_accumulate_gradients_that_are_not_dropped():
    want = trained(whole, None, (3, 3, 3))
    assert relative(trained(whole, "reduce-overhead", (3, 3, 3), keeps=True), want) < 0.05


def test_the_exact_recipe_agrees_with_stock():
    """Bits are equal op by op. Generated code is close, because fusion changes roundings."""
    model, args = layer()
    eager = step(compiled(model, Config.recipe("exact", compiler="eager"))[0], model, args)
    torch._dynamo.reset()
    from helpers import stock_eager

    assert_same_step(eager, step(torch.compile(model, backend=stock_eager), model, args))
    torch._dynamo.reset()
    agree(step(compiled(model, Config.recipe("exact"))[0], model, args), eager, 0.02)


def test_without_fp8_hardware_saves_stay_low_bit(monkeypatch):
    """Before sm89 GEMMs run in bf16, and integer arithmetic quantizes activations to E4M3."""
    model, args = layer()
    # The results of native conversions with the same GEMMs.
    monkeypatch.setattr(hardware, "why_no_fp8_gemm", lambda device: "an old GPU")
    monkeypatch.setattr(hardware, "has_fp8_casts", lambda device: True)
    native, native_spy = compiled(model, Config())
    want = step(native, model, args)

    torch._dynamo.reset()
    monkeypatch.setattr(hardware, "has_fp8_casts", lambda device: False)
    program, spy = compiled(model, Config())
    got = step(program, model, args)
    agree(got, want, 0.01)
    assert {y.reason for y in spy.plan.linears} == {"an old GPU"}
    assert any(s.saved_as.startswith("e4m3_bytes") for s in spy.plan.saved)
    assert not any("float8" in t.dtype for s in spy.plan.saved for t in s.tensors)
    assert spy.plan.saved_bytes == native_spy.plan.saved_bytes < 0.75 * spy.plan.stock_bytes
    assert_close(got, reference(model, args))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e4m3_bytes"])
def test_values_are_quantized_with_the_stored_scales(fmt):
    """Invariant 4 in Triton, which computes bf16 intermediates in fp32 registers."""

    def function(x):
        scales = fp8.scale(fp8.amax(x, "1×128"), f"{fmt} 1×128")
        return fp8.quantize(x, scales, f"{fmt} 1×128").view(torch.uint8), scales

    x = torch.randn(512, 512, device="cuda")
    data, scales = torch.compile(function, backend=with_inductor)(x)
    want, want_scales = function(x)
    assert torch.equal(scales, want_scales)
    assert torch.equal(data, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", ["e2m1", "e2m2", "e2m3"])
def test_packing_in_triton_agrees_with_the_reference(fmt, dtype):
    """Each plane has one kernel, and values differ only for ties.

    Triton's division may be off in the last bit. Values and scales with few significant bits have
    many exact ties, and that bit decides their rounding.
    """
    from torch._inductor import metrics

    planes = range(len(FORMATS[fmt].planes))

    def pack(x):
        scales = fp8.scale(fp8.amax(x, "1×128"), f"{fmt} 1×128")
        return scales, *(fp8.quantize(x, scales, f"{fmt} 1×128", i) for i in planes)

    def unpack(scales, *planes):
        return fp8.dequantize(planes, scales, f"{fmt} 1×128", dtype)

    x = (torch.randn(512, 512, device="cuda") * torch.logspace(-7, 4, 512, device="cuda")).to(dtype)
    x[0, 0], x[1, 0], x[2] = torch.nan, torch.inf, 0
    metrics.reset()
    scales, *packed = torch.compile(pack, backend=with_inductor)(x)
    assert metrics.generated_kernel_count == len(planes)
    want_scales, *want_planes = pack(x)
    assert identical(scales, want_scales)

    def distance(planes):
        values = fp8.dequantize(planes, scales, f"{fmt} 1×128", torch.float32)
        return (x.double() - values).abs()[2:]

    excess = distance(packed) - distance(want_planes)
    assert (excess <= x[2:].double().abs() * 2.0**-20).all()
    assert identical(
        torch.compile(unpack, backend=with_inductor)(scales, *packed), unpack(scales, *packed)
    )
    assert not unpack(scales, *packed)[:2, :128].isfinite().any()


@pytest.mark.parametrize("fmt", ["e2m1", "e2m2", "e2m3"])
def test_packed_saves(fmt):
    model, args = layer()
    results = {}
    for format in ("e4m3", fmt):
        torch._dynamo.reset()
        program, spy = compiled(model, Config(save_format=format))
        results[format] = step(program, model, args), spy.plan.saved_bytes
    (got, less), (want, more) = results[fmt], results["e4m3"]
    assert less < more
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert relative(a, b) < 0.02
    for name, b in want.gradients.items():
        assert relative(got.gradients[name], b) < 0.3, name


def test_fp16():
    model, args = layer(torch.float16)
    program, spy = compiled(model, Config())
    assert_close(step(program, model, args), reference(model, args))
    assert all(y.fp8 for y in spy.plan.linears)


def test_fp32_with_autocast():
    model, args = layer(torch.float32)
    program, spy = compiled(model, Config())

    def run(*batch):
        with torch.autocast("cuda", torch.bfloat16):
            return program(*batch)

    assert_close(step(run, model, args), reference(model, args), decibel=19)
    assert all(len(y.fp8) == 3 for y in spy.plan.linears)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_bias(bias_dtype):
    model = MLP((64, 128, 64)).cuda().to(bias_dtype)
    x = torch.randn(48, 64, device="cuda", dtype=bias_dtype, requires_grad=True)
    want = step(model, model, (x,))
    agree(step(compiled(model, Config())[0], model, (x,)), want, 0.12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 1000])
def test_rows_that_are_not_multiples_of_16(monkeypatch, rows, padded):
    """Inductor may pad them; it decides by timing."""
    pad_gemms(monkeypatch, padded)
    model = MLP((64, 128, 64)).cuda().bfloat16()
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    want = step(model, model, (x,))
    program, spy = compiled(model, Config())
    agree(step(program, model, (x,)), want, 0.12)
    assert all(y.fp8 for y in spy.plan.linears)


@pytest.mark.parametrize("dynamic", [False, True])
def test_transposed_rows_that_are_not_multiples_of_16(dynamic):
    """Each row is a column of the gradient of the input."""
    model = MLP((64, 128, 64)).cuda().bfloat16()
    x = torch.randn(64, 17, device="cuda", dtype=torch.bfloat16).t().requires_grad_()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    program, spy = compiled(model, Config())
    agree(step(program, model, (x,)), step(model, model, (x,)), 0.12)
    assert all(y.fp8 for y in spy.plan.linears)


def test_dynamic_rows():
    model = MLP((64, 128, 64)).cuda().bfloat16()
    program, spy = compiled(model, Config())
    for rows in (32, 17, 48, 1000, 33):
        x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        agree(step(program, model, (x,)), step(model, model, (x,)), 0.12)
    assert len(spy.plans) == 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["input", "weight", "gradient"])
def test_nonfinite_values_are_not_hidden(place, poison):
    model = MLP((64, 128, 64)).cuda().bfloat16()
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    incoming = torch.ones(32, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        {"input": x, "weight": model.up.weight, "gradient": incoming}[place][3, 5] = poison
    x.requires_grad_()
    y = compiled(model, Config())[0](x)
    gradients = torch.autograd.grad(y, [x, model.up.weight, model.down.weight], incoming)
    assert y.isfinite().all() == (place == "gradient")
    assert not gradients[0].isfinite().all()
    assert not gradients[2].isfinite().all()


def test_attention_with_a_learned_mask_of_odd_length():
    """Its kernels need rows of whole words, so PyTorch allocates the mask with wider rows."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.bias = nn.Linear(64, 64), nn.Linear(16, 4)

        def forward(self, x, features):
            mask = self.bias(features).permute(2, 0, 1).tanh()
            heads = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask).sin()

    model = Attention().to("cuda", torch.bfloat16)
    x = torch.randn(2, 77, 64, device="cuda", dtype=torch.bfloat16)
    features = torch.randn(77, 77, 16, device="cuda", dtype=torch.bfloat16)
    want = step(model, model, (x, features))
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="fp8pass"), model, (x, features))
    assert_close(got, want, decibel=15)


# --- simulated formats --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e8m3", "e5m2", "e4m3", "e6m9"])
def test_generated_simulated_formats_are_bit_equal_to_the_reference(name):
    """Simulated formats give equal bits if they are fused with the producer of a value."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float().cuda()

    @torch.compile(backend=compiled_dialect)
    def masked(x):
        return [fp8.mask_format((x * 1.01).to(d), name, True, True) for d in MASKED_DTYPES]

    narrow = [(values * 1.01).to(d) for d in MASKED_DTYPES]
    for got, x in zip(masked(values), narrow, strict=True):
        assert identical(got, fp8.mask_format(x, name, True, True))


MASKED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compiled_dialect(gm, inputs):
    """Backend that lowers a graph of the dialect and compiles it with Inductor."""

    def inner(graph, example_inputs, **kwargs):
        lower(graph)
        return compat.compile_fx_inner(graph, example_inputs, **kwargs)

    return compat.compile_fx(gm, list(inputs), inner_compile=inner)


def test_e8m7_is_bit_equal_to_exact():
    model, args = layer()
    exact, _ = compiled(model, Config.recipe("exact"))
    want = step(exact, model, args)
    torch._dynamo.reset()
    program, _ = compiled(model, Config(simulate="e8m7"))
    assert_same_step(step(program, model, args), want)
