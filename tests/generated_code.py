"""Print the code that Inductor generates for an H200, on a machine without GPUs, as JSON.

The tests of this code (`codegen/test_generated_code.py`) run this script in another process,
because they use Triton's interpreter, which cannot compile kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from gpu_lowering import LoweredError, lowered_for_gpus, refuse_to_run
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.dynamo import Backend

H200 = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=140 << 30,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "get_device_properties": lambda *args: H200,
    "get_device_capability": lambda *args: (9, 0),
    "get_device_name": lambda *args: H200.name,
    "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *args: None,
    "synchronize": lambda *args: None,
}


class GeneratedError(Exception):
    """Raised instead of loading generated code."""


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let Inductor and Triton find an H200."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = mock.MagicMock()
    driver.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    capability = staticmethod(lambda *args: 90)
    with ExitStack() as stack:
        for name, function in FUNCTIONS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for interface in (CudaInterface, CudaInterface.Worker):
            for name in ("current_device", "get_device_properties"):
                static = staticmethod(FUNCTIONS[name])
                stack.enter_context(mock.patch.object(interface, name, static))
        stack.enter_context(mock.patch.object(CudaInterface, "get_compute_capability", capability))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        yield


def generate(model: Callable[..., Any], *args: Tensor, **options: Any) -> list[str]:
    """Return Inductor's code for the forward and for the backward."""
    codes: list[str] = []
    compile_inner = compat.compile_fx_inner

    def record(graph: GraphLowering) -> Any:
        code = graph.codegen()[0]
        codes.append(getattr(code, "value", code))
        raise GeneratedError

    def compile_half(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with mock.patch.object(GraphLowering, "_compile_to_module", record), fake_gpu():
            try:
                compile_inner(gm, values, **options)
            except Exception as error:  # PyTorch raises another error from a GeneratedError
                if not is_caused_by(error, GeneratedError):
                    raise
        return compat.box(refuse_to_run)

    torch._dynamo.reset()
    backend = Backend(Config(fp8_gemms="all", compact_saves="all", **options))
    alone = inductor_config.patch(compile_threads=1, force_disable_caches=True)
    with lowered_for_gpus(compile_half), alone, suppress(LoweredError):
        torch.compile(model, backend=backend)(*args)
    return codes


def is_caused_by(error: BaseException | None, kind: type[Exception]) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels)


def head(**options: Any) -> list[str]:
    x, labels = torch.randn(256, 64), torch.randint(4096, (256,))
    return generate(Head().bfloat16(), x.bfloat16().requires_grad_(), labels, **options)


class Blocks(nn.Module):
    """A row kernel adds the result `h` of a GEMM to the residual stream, and quantizes the norm."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.shares, self.norm = shares, nn.RMSNorm(256)
        self.first, self.second = (nn.Linear(256, 256, bias=False) for _ in range(2))

    def forward(self, x):
        h = self.first(x)
        stream = x + h
        y = stream + self.second(self.norm(stream))
        return (y, h) if self.shares else y


def residual_sum(*, shares: bool) -> list[str]:
    x = torch.randn(256, 256).bfloat16().requires_grad_()
    return generate(Blocks(shares=shares).bfloat16(), x)


class Modulated(nn.Module):
    """A modulated LayerNorm, as in DiT. No kernel of fp8pass computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(768, elementwise_affine=False)
        self.up, self.down = nn.Linear(768, 3072), nn.Linear(3072, 768)

    def forward(self, x, scale):
        h = self.norm(x) * (1 + scale[:, None])
        return self.down(F.gelu(self.up(h))) * (1 + scale[:, None])


def modulated_norms() -> list[str]:
    first, second = (Modulated().bfloat16() for _ in range(2))
    scale, x = torch.randn(8, 768).bfloat16(), torch.randn(8, 256, 768).bfloat16()
    return generate(lambda x: second(first(x, scale), scale), x)


def norms_in_loops() -> list[str]:
    with mock.patch.object(compat, "hold_dequantized_rows", nullcontext):
        return modulated_norms()


CASES: dict[str, Callable[[], list[str]]] = {
    "head": head,
    "head in chunks": lambda: head(head_chunks=4),
    "residual sum": lambda: residual_sum(shares=False),
    "shared residual sum": lambda: residual_sum(shares=True),
    "norms": modulated_norms,
    "norms in loops": norms_in_loops,
}

if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items()}))
