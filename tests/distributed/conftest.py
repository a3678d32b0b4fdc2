"""Two ranks for all tests of a process: on CPUs with gloo, and on two GPUs with NCCL."""

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
    """Two processes that run what tests send them."""
    with ranks(tmp_path_factory.mktemp("ranks"), request.param) as started:
        yield started
