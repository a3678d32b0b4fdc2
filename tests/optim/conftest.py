"""Fixtures that several modules of tests of the optimizer share."""

from __future__ import annotations

import pytest
import torch

from fp8pass.optim import fused, kernel


@pytest.fixture(params=["reference", "kernel"])
def path(request, monkeypatch):
    """Whether updates run in PyTorch, or in the kernel by Triton's interpreter."""
    if request.param == "kernel":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("has a GPU: the interpreter is off")
        monkeypatch.setattr(fused, "why_not", lambda device: None)
        for module in (fused, kernel):  # the interpreter computes whole chunks
            monkeypatch.setattr(module, "CHUNK", kernel.TILE)
    kernel.kernel.cache_clear()
    yield request.param
    kernel.kernel.cache_clear()
