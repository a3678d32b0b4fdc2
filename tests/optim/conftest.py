"""Fixtures of the optimizer's tests."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import KERNEL_CHUNK

from fp8pass import hardware
from fp8pass.optim import fused, kernel


@pytest.fixture(params=["reference", "kernel"])
def path(request, monkeypatch):
    """Run updates in PyTorch, and in the kernel with Triton's interpreter."""
    if request.param == "kernel":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("has a GPU: the interpreter is off")
        monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
        for module in (fused, kernel):  # the interpreter computes whole chunks
            monkeypatch.setattr(module, "CHUNK", kernel.TILE)
    kernel.kernel.cache_clear()
    yield request.param
    kernel.kernel.cache_clear()


@pytest.fixture
def everything_is_fused(monkeypatch):
    """Run all updates in kernels, on a GPU or in Triton's interpreter."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    for module in (fused, kernel):
        monkeypatch.setattr(module, "CHUNK", KERNEL_CHUNK)
    kernel.kernel.cache_clear()
    yield
    kernel.kernel.cache_clear()
