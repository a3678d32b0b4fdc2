"""GEMMs with scales that vary along the contraction: the kernel, the libraries, and emulation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from kernel_helpers import both_devices
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import hardware
from fp8pass.codegen.block_scaled_mm import on_gpu, swizzle
from fp8pass.codegen.lowering import lower
from fp8pass.dialect.quantization import block_text, parse
from fp8pass.graph.nodes import aten

fp8 = torch.ops.fp8pass
VALUES, WEIGHTS, MX = "e4m3 1×128 fp32", "e4m3 128×128 fp32", "e4m3 1×32 e8m0"
NAN, INF = float("nan"), float("inf")
# Rows, columns and contraction; several tiles, rests of tiles, a single block.
SIZES = [(1, 16, 128), (130, 144, 384), (128, 256, 256), (300, 128, 128)]


def quantized(x: Tensor, text: str) -> tuple[Tensor, Tensor]:
    scale = fp8.scale(fp8.amax(x, block_text(parse(text).block)), text)
    return fp8.quantize(x, scale, text), scale


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return BF16 values whose blocks have very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, columns).roll(seed)
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, *texts: str) -> Tensor:
    operands = (*quantized(a, texts[0]), *quantized(b, texts[1]))
    return fp8.scaled_mm(*operands, bias, dtype, False, *texts)


def kernel() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("fp8pass.codegen.kernels.block_gemm")


@both_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("weights", [VALUES, WEIGHTS])
def test_the_kernel_equals_the_reference(sizes, weights, dtype, device):
    """It sums blocks in another order, and applies the scales to the sum of a block.

    FP8 tensor cores of Hopper keep 14 bits of a sum.
    """
    m, n, k = sizes
    if weights == WEIGHTS:
        n = n // 128 * 128 or 128
    a, b, bias = matrix(m, k), matrix(n, k, 1), matrix(1, n, 2)[0].to(dtype)
    (a_data, a_scale), (b_data, b_scale) = quantized(a, VALUES), quantized(b, weights)
    for given in (None, bias):
        want = fp8.scaled_mm(a_data, a_scale, b_data, b_scale, given, dtype, False, VALUES, weights)
        tensors = a_data, a_scale, b_data, b_scale
        args = [None if x is None else x.to(device) for x in (*tensors, given)]
        got = kernel().multiply_blocks(*args, dtype, 1, parse(weights).block[0]).cpu()
        assert got.dtype is dtype
        largest = want.abs().amax().item()
        sums = 2**-14 if device == "cpu" else 2**-11
        tolerance = 2**-8 if dtype is torch.bfloat16 else sums
        assert torch.allclose(got, want, rtol=2 * tolerance, atol=tolerance * largest)


@both_devices
def test_the_kernel_takes_scales_in_any_layout_and_two_square_operands(device):
    a, b = matrix(128, 256).to(device), matrix(256, 256, 1).to(device)
    (a_data, a_scale), (b_data, b_scale) = quantized(a, WEIGHTS), quantized(b, WEIGHTS)
    want = kernel().multiply_blocks(a_data, a_scale, b_data, b_scale, None, torch.float32, 128, 128)
    turned = [x.t().contiguous().t() for x in (a_scale, b_scale)]
    got = kernel().multiply_blocks(
        a_data, turned[0], b_data, turned[1], None, torch.float32, 128, 128
    )
    assert torch.equal(got, want)


@both_devices
@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_inf_reach_the_rows_of_their_block(value, device):
    a, b = matrix(40, 256), matrix(32, 256, 1)
    a[7, 3] = value
    operands = [x.to(device) for x in (*quantized(a, VALUES), *quantized(b, VALUES))]
    got = kernel().multiply_blocks(*operands, None, torch.bfloat16, 1, 1)
    assert got.isfinite().all(1).tolist() == [i != 7 for i in range(40)]


@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (1, 1), (200, 5), (256, 8), (384, 24)])
def test_swizzled_scales_are_where_tensor_cores_read_them(rows, groups):
    """The place of each scale, as the manual of cuBLAS describes it."""
    scales = torch.randint(1, 255, (rows, groups), dtype=torch.uint8)
    found = swizzle(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    across = -(-groups // 4)
    assert found.numel() == -(-rows // 128) * across * 512
    places = set()
    for r in range(rows):
        for g in range(groups):
            tile = r // 128 * across + g // 4
            place = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4
            assert found[place] == scales[r, g]
            places.add(place)
    rest = [i for i in range(found.numel()) if i not in places]
    assert not found[rest].any()


def lowered_for(
    capability: tuple[int, int], monkeypatch: Any, sizes: Any, *texts: str, turned: bool = False
) -> list:
    """Return the calls of a GEMM that is lowered for a GPU."""
    monkeypatch.setattr(hardware, "_capability", lambda index: capability)
    monkeypatch.setattr(hardware, "name_of", lambda device: "a GPU")
    m, n, k = sizes
    with FakeTensorMode():
        a, b = (torch.empty(r, k, device="cuda:0", dtype=torch.bfloat16) for r in (m, n))
        bias = torch.empty(n, device="cuda:0", dtype=torch.bfloat16)
        if turned:
            a = torch.empty(k, m, device="cuda:0", dtype=torch.bfloat16).t()
        gm = make_fx(lambda *x: multiply(*x, torch.bfloat16, *texts))(a, b, bias)
        lower(gm)
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def calls(nodes: list[fx.Node], target: Any) -> list[fx.Node]:
    return [n for n in nodes if n.target is target]


@pytest.mark.parametrize(
    ("capability", "sizes", "texts", "target"),
    [
        ((9, 0), (256, 256, 512), (VALUES, WEIGHTS), aten._scaled_mm.default),
        ((9, 0), (256, 256, 512), (WEIGHTS, VALUES), aten._scaled_mm.default),
        ((9, 0), (256, 256, 512), (VALUES, VALUES), aten._scaled_mm.default),
        ((9, 0), (255, 256, 512), (VALUES, WEIGHTS), on_gpu),  # rows of scales are not aligned
        ((9, 0), (256, 256, 384), (VALUES, WEIGHTS), on_gpu),
        ((9, 0), (256, 256, 128), (VALUES, VALUES), on_gpu),  # scales look like those of rows
        ((9, 0), (256, 256, 512), (WEIGHTS, WEIGHTS), on_gpu),
        ((8, 9), (256, 256, 512), (VALUES, WEIGHTS), on_gpu),
        ((10, 0), (256, 256, 512), (VALUES, WEIGHTS), on_gpu),
        ((10, 0), (200, 256, 96), (MX, MX), aten._scaled_mm.default),
        ((12, 0), (200, 256, 96), (MX, MX), aten._scaled_mm.default),
        ((9, 0), (200, 256, 96), (MX, MX), aten.addmm.default),
    ],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True])
def test_each_gpu_has_a_gemm(capability, sizes, texts, target, turned, monkeypatch):
    """PyTorch checks the layouts of fake tensors, too. Operands may be transposed in memory."""
    turned = turned and texts[0] != WEIGHTS  # weights are transposed after they are quantized
    nodes = lowered_for(capability, monkeypatch, sizes, *texts, turned=turned)
    (gemm,) = calls(nodes, target)
    if target is on_gpu:
        assert all(gemm.args[i].meta["val"].is_contiguous() for i in (0, 2))
    others = {aten._scaled_mm.default, on_gpu, aten.addmm.default} - {target}
    assert not any(calls(nodes, other) for other in others)
    if target is aten._scaled_mm.default and MX not in texts:
        scales = [n.meta["val"] for n in gemm.args[2:4]]
        wanted = [(1, 256) if text == VALUES else (4, 1) for text in texts]
        assert [scales[0].stride(), scales[1].t().stride()] == wanted


def test_mx_gemms_are_emulated_without_tensor_cores_for_them(monkeypatch):
    monkeypatch.setattr(hardware, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(hardware, "name_of", lambda device: "NVIDIA H100")
    device = torch.device("cuda:0")
    assert hardware.why_emulated(device, "e8m0") == (
        "NVIDIA H100 (sm90) has no tensor cores for MX formats: they need sm100 or sm120"
    )
    assert hardware.why_emulated(device, "fp32") is None
    assert hardware.why_emulated(torch.device("cpu"), "e8m0") is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "texts", [(VALUES, WEIGHTS), (WEIGHTS, VALUES), (VALUES, VALUES), (MX, MX)]
)
@pytest.mark.parametrize(
    "sizes", [(256, 384, 512), (256, 384, 384), (384, 128, 2048), (256, 256, 128)], ids=str
)
@pytest.mark.parametrize("turned", [False, True])
def test_gpu_products_are_close_to_the_reference(sizes, texts, dtype, turned):
    m, n, k = sizes
    a = matrix(m, k).cuda()
    args = a.t().contiguous().t() if turned else a, matrix(n, k, 1), matrix(1, n, 2)[0].to(dtype)
    args = [x.cuda() for x in args]
    gm = make_fx(lambda *x: multiply(*x, dtype, *texts), tracing_mode="fake")(*args)
    lower(gm)
    cpu = [x.cpu() for x in args]
    want, terms = multiply(*cpu, dtype, *texts), multiply(*map(torch.abs, cpu), dtype, *texts)
    got = gm(*args).cpu()
    allowed = want.float().abs() * 2**-7 + terms.float() * 2**-10
    assert ((got.float() - want.float()).abs() <= allowed).all()
