"""Operators of expert GEMMs: references, lowered graphs, the kernel, and GPUs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import both_devices
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8pass.codegen.lowering import lower
from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE
from fp8pass.graph.nodes import aten

fp8 = torch.ops.fp8pass
F8 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
# Tokens of each expert: none, few, many, none at the end.
COUNTS = [[0, 7, 33, 16, 1], [20], [0, 0, 48, 0], [0, 0]]
each_count = pytest.mark.parametrize("counts", COUNTS, ids=str)
counts_of_experts = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def tokens(counts: list[int], columns: int, left_over: int = 3) -> Tensor:
    """Return BF16 rows of very different magnitudes; the last ones belong to no expert."""
    rows = sum(counts) + left_over
    torch.manual_seed(rows)
    return (torch.randn(rows, columns) * torch.logspace(-2, 2, rows).unsqueeze(1)).bfloat16()


def kernel() -> Any:
    """Import the kernel's module, or skip without Triton."""
    pytest.importorskip("triton")
    return importlib.import_module("fp8pass.codegen.kernels.expert_transpose")


def of_segments(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the quantized, padded, transposed tokens and the scales of expert groups."""
    scale = fp8.scale(fp8.segment_amax(fp8.amax(x, "row"), offsets), "e4m3 row")
    return fp8.transpose_segments(x, scale, offsets, "e4m3"), scale


def of_rows(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return quantized, padded, transposed rows `x[rows]`."""
    scale = fp8.scale(fp8.segment_amax(fp8.amax(x, "row")[rows], offsets), "e4m3 row")
    return fp8.transpose_segments(x, scale, offsets, "e4m3", rows)


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = fp8.scale(fp8.amax(x, "row"), "e4m3 row")
    return fp8.quantize(x, scale, "e4m3 tensor"), scale


def lowered(function, *args) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*args)
    lower(gm)
    return gm


def product(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply tokens by the weights [E, N, K] of their experts."""
    flat = weights.reshape(-1, weights.shape[-1])
    return fp8.scaled_grouped_mm(*by_row(x), *by_row(flat), offsets, torch.bfloat16)


def outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Contract the tokens of each expert."""
    operands = *of_segments(x, offsets), *of_segments(y, offsets)
    return fp8.scaled_grouped_outer(*operands, fp8.padded_ends(offsets), torch.bfloat16)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


# --- references ---------------------------------------------------------------------------------


@given(counts_of_experts)
def test_groups_are_padded(counts):
    offsets = ends(counts)
    lengths = fp8.padded_ends(offsets).diff(prepend=torch.zeros(1, dtype=torch.int32))
    for count, length in zip(counts, lengths.tolist(), strict=True):
        assert length % CONTRACTION_MULTIPLE == 0
        assert max(count, 1) <= length < max(count, 1) + CONTRACTION_MULTIPLE


@given(counts_of_experts)
def test_products_are_those_of_each_expert(counts):
    x, y, offsets = tokens(counts, 64), tokens(counts, 48), ends(counts)
    weights = torch.randn(len(counts), 48, 64).bfloat16()
    got, of_tokens = product(x, weights, offsets), outer(y, x, offsets)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start := start + count)
        want = x[rows].double() @ weights[expert].double().t()
        assert relative_error(got[rows], want) < 0.05
        want = y[rows].double().t() @ x[rows].double()
        assert relative_error(of_tokens[expert], want) < 0.05
        if not count:
            assert not of_tokens[expert].any()


def test_rows_without_an_expert_have_no_effect():
    counts = [5, 0, 11]
    x, y, offsets = tokens(counts, 32), tokens(counts, 32), ends(counts)
    weights = torch.randn(3, 16, 32).bfloat16()
    clean = product(x, weights, offsets), outer(y, x, offsets)
    x[16:], y[16:] = NAN, INF
    assert torch.equal(product(x, weights, offsets), clean[0])
    assert torch.equal(outer(y, x, offsets), clean[1])


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_inf_stay_in_their_expert_group(value):
    counts = [5, 9, 4]
    x, y, offsets = tokens(counts, 32), tokens(counts, 32), ends(counts)
    x[7, 3] = value
    weights = torch.randn(3, 16, 32).bfloat16()
    finite = product(x, weights, offsets).isfinite().all(1)
    assert finite.tolist() == [i != 7 for i in range(len(x))]
    finite = outer(y, x, offsets).isfinite()
    assert finite[0].all()
    assert finite[2].all()
    assert not finite[1].any()


# --- lowered graphs and the kernel --------------------------------------------------------------


@each_count
def test_lowered_quantization_equals_the_reference(counts):
    x, offsets = tokens(counts, 48), ends(counts)
    gm = lowered(of_segments, x, offsets)
    for got, want in zip(gm(x, offsets), of_segments(x, offsets), strict=True):
        assert torch.equal(got.float(), want.float())
    rows = torch.randint(len(x), (len(x),))
    gm = lowered(of_rows, x, rows, offsets)
    assert torch.equal(gm(x, rows, offsets).float(), of_segments(x[rows], offsets)[0].float())
    gm = lowered(fp8.padded_ends, offsets)
    assert torch.equal(gm(offsets), fp8.padded_ends(offsets))


@each_count
def test_lowered_products_are_rounded_once_more(counts):
    """The error is two roundings to BF16, and the summation order of GEMMs."""
    x, y, offsets = tokens(counts, 64), tokens(counts, 48), ends(counts)
    weights = torch.randn(len(counts), 48, 64).bfloat16()
    for function, *args in ((product, x, weights), (outer, y, x)):
        got, want = lowered(function, *args, offsets)(*args, offsets), function(*args, offsets)
        if function is product:  # other rows belong to no expert and are undefined
            got, want = got[: sum(counts)], want[: sum(counts)]
        assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-4 * sum(counts))


@pytest.mark.long
def test_dynamic_number_of_tokens():
    """One graph is correct for several numbers of tokens."""
    counts = [0, 7, 33, 16, 1]
    args = tokens(counts, 48), tokens(counts, 32), ends(counts)
    varies, stays = DimDynamic.DYNAMIC, DimDynamic.STATIC
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher():
        sizes = ([varies, stays], [varies, stays], [stays])
        contexts = [StatelessSymbolicContext(dynamic_sizes=dims) for dims in sizes]
        fakes = (
            mode.from_tensor(x, symbolic_context=context)
            for x, context in zip(args, contexts, strict=True)
        )
        gm = make_fx(outer)(*fakes)
        lower(gm)
    for counts in ([0, 7, 33, 16, 1], [3, 0, 0, 41, 2]):
        args = tokens(counts, 48), tokens(counts, 32), ends(counts)
        assert torch.allclose(gm(*args).float(), outer(*args).float(), rtol=2**-7, atol=1e-2)


@both_devices
@each_count
def test_kernel_equals_the_reference(counts, device):
    """Also with columns that are not a multiple of the tile."""
    for columns in (16, 80, 528):
        x, offsets = tokens(counts, columns).to(device), ends(counts).to(device)
        scale = of_segments(x, offsets)[1]
        want = fp8.transpose_segments(x.cpu(), scale.cpu(), offsets.cpu(), "e4m3")
        got = kernel().transpose_segments(x, scale, offsets, "e4m3")
        assert got.stride() == want.stride()
        assert torch.equal(got.cpu().float(), want.float())
        rows = torch.arange(-1, len(x) - 1, device=device).flip(0)
        got = kernel().transpose_segments(x.roll(1, 0).flip(0), scale, offsets, "e4m3", rows)
        assert torch.equal(got.cpu().float(), want.float())


@both_devices
@each_count
def test_the_kernel_reads_fp8_data(counts, device):
    x, offsets = tokens(counts, 80), ends(counts)
    row_scales = fp8.scale(fp8.amax(x, "row"), "e4m3 row")
    rows = torch.arange(-1, len(x) - 1).flip(0)
    args = fp8.quantize(x, row_scales, "e4m3 row"), of_segments(x, offsets)[1], offsets
    on_device = [y.to(device) for y in args]
    for selected in (None, rows):
        want = fp8.transpose_segments(*args, "e4m3", selected, row_scales)
        given = None if selected is None else selected.to(device)
        got = kernel().transpose_segments(*on_device, "e4m3", given, row_scales.to(device))
        assert torch.equal(got.cpu().float(), want.float())


def test_the_kernel_refuses_other_formats():
    with pytest.raises(ValueError, match="quantizes to e4m3, not e5m2"):
        kernel().transpose_segments(tokens([4], 16), torch.ones(1, 1), ends([4]), "e5m2")


def test_cuda_accepts_the_layouts():
    """PyTorch checks layouts and scales of fake tensors, too. Lowering does not read offsets."""
    with FakeTensorMode():
        x, y = (torch.empty(50, n, device="cuda", dtype=torch.bfloat16) for n in (32, 64))
        weights = torch.empty(4, 64, 32, device="cuda", dtype=torch.bfloat16)
        offsets = torch.empty(4, device="cuda", dtype=torch.int32)
        for function, *args in ((product, x, weights, offsets), (outer, y, x, offsets)):
            gm = make_fx(function)(*args)
            lower(gm)
            (gemm,) = (n for n in gm.graph.nodes if n.target in (aten._scaled_grouped_mm.default,))
            assert gemm.meta["val"].is_contiguous()


@pytest.mark.gpu
@each_count
def test_gpu_products_are_close_to_the_reference(counts):
    """Tensor cores truncate addends 13 bits below the largest one."""
    x, y, offsets = tokens(counts, 64), tokens(counts, 48), ends(counts)
    weights = torch.randn(len(counts), 48, 64).bfloat16()
    owned = sum(counts)
    for function, *args in ((product, x, weights), (outer, y, x)):
        on_gpu = [t.cuda() for t in (*args, offsets)]
        got = lowered(function, *on_gpu)(*on_gpu).cpu()
        want, terms = (function(*values, offsets) for values in (args, map(torch.abs, args)))
        if function is product:  # other rows belong to no expert and are undefined
            got, want, terms = got[:owned], want[:owned], terms[:owned]
        allowed = want.float().abs() * 2**-6 + terms.float() * 2**-10
        assert ((got.float() - want.float()).abs() <= allowed).all()
