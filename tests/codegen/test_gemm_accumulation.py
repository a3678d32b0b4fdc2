"""GEMM kernels receive the accumulation option, and accumulate like the emulation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.codegen.lowering import lower
from fp8pass.dialect.accumulation import accumulate
from fp8pass.graph.nodes import aten

fp8 = torch.ops.fp8pass
F8 = torch.float8_e4m3fn
SAMPLE = 48
EXPERTS = 4
LENGTHS = [64, 256, 768, 1024, 4096, 16384]
each_accumulation = pytest.mark.parametrize("fast", [False, True])
each_length = pytest.mark.parametrize("length", LENGTHS)


def plain(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    one = torch.ones((), device=a.device)
    return fp8.scaled_mm(a, one, b, one, None, torch.bfloat16, fast, "e4m3 tensor", "e4m3 tensor")


def by_row(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    of_a, of_b = (torch.ones(len(x), 1, device=a.device) for x in (a, b))
    return fp8.scaled_mm(a, of_a, b, of_b, None, torch.bfloat16, fast, "e4m3 row", "e4m3 row")


def grouped(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """Give all rows of the sample to the first expert."""
    of_a, of_b = (torch.ones(len(x), 1, device=a.device) for x in (a, b))
    ends = torch.linspace(len(a) / EXPERTS, len(a), EXPERTS, device=a.device).int()
    return fp8.scaled_grouped_mm(a, of_a, b, of_b, ends, torch.bfloat16, fast)


def outer(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """Give all contracted tokens to one expert."""
    one = torch.ones(1, 1, device=a.device)
    ends = torch.full((1,), a.shape[1], dtype=torch.int32, device=a.device)
    return fp8.scaled_grouped_outer(a, one, b, one, ends, torch.bfloat16, fast)


PRODUCTS = [plain, by_row, grouped, outer]
each_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda f: f.__name__)


def operands(rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """Return correlated operands."""
    torch.manual_seed(0)
    a, b = ((torch.randn(rows, length) + 0.5).to(F8).to(device) for _ in range(2))
    return a, b


@each_product
@each_accumulation
def test_every_gpu_gemm_receives_the_option(product, fast):
    with FakeTensorMode():
        a, b = (torch.empty(64, 64, dtype=F8, device="cuda") for _ in range(2))
        gm = make_fx(lambda a, b: product(a, b, fast=fast))(a, b)
        lower(gm)
    gemms = {aten._scaled_mm.default, aten._scaled_grouped_mm.default}
    (gemm,) = (n for n in gm.graph.nodes if n.target in gemms)
    assert (gemm.args[-1] is True) is fast  # FX omits trailing arguments that are defaults


@pytest.mark.gpu
@each_product
@each_accumulation
@each_length
def test_tensor_cores_match_the_emulation(product, fast, length):
    """Bit for bit, after rounding to BF16. With this many rows cuBLASLt does not split the sum."""
    a, b = operands(2048, length, "cuda")
    gm = make_fx(lambda a, b: product(a, b, fast=fast), tracing_mode="fake")(a, b)
    lower(gm)
    found = gm(a, b)
    found = (found[0] if found.ndim == 3 else found)[:SAMPLE, :SAMPLE]
    want = accumulate(a[:SAMPLE], b[:SAMPLE], fast=fast).bfloat16()
    assert (found == want).float().mean() >= 0.999
    assert within_an_ulp(found, want).float().mean() >= 0.999


def within_an_ulp(x: Tensor, y: Tensor) -> Tensor:
    """Whether BF16 numbers are equal or adjacent."""
    largest = torch.maximum(x.abs(), y.abs()).float()
    ulp = torch.exp2((torch.frexp(largest)[1] - 8).float())
    return (x.float() - y.float()).abs() <= ulp


@pytest.mark.gpu
@each_accumulation
def test_triton_templates_receive_the_option(fast):
    """Under max-autotune Inductor may choose its own GEMMs."""
    a, b = operands(1024, 16384, "cuda")

    def function(a: Tensor, b: Tensor) -> Tensor:
        one = torch.ones((), device="cuda")
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    choices = {"max_autotune_gemm_backends": "TRITON", "fx_graph_cache": False}
    with inductor_config.patch(choices):
        torch._dynamo.reset()
        found = torch.compile(function, mode="max-autotune-no-cudagraphs")(a, b)
    exact = a[:SAMPLE].double() @ b[:SAMPLE].double().T
    error = (found[:SAMPLE, :SAMPLE].double() - exact).norm() / exact.norm()
    assert (error > 0.03) if fast else (error < 0.003)
