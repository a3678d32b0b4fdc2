"""Two ranks that all tests of a process share: with gloo on CPUs, with NCCL on two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks, ranks

on_two_gpus = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ],
)


@pytest.fixture(scope="session", params=["cpu", on_two_gpus])
def two(request, tmp_path_factory) -> Iterator[Ranks]:
    """Two processes that run functions of tests."""
    with ranks(tmp_path_factory.mktemp("ranks"), request.param) as started:
        yield started
