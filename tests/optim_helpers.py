"""Helpers of the optimizer's tests: parameters, gradients, steps, and comparison of states."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.optim import kernel
from fp8pass.optim.group_options import Storage
from fp8pass.optim.slots import state_key, to_rows
from fp8pass.optim.state_formats import Quantized, dequantize

# Devices on which kernels are compared with PyTorch: a GPU, or Triton's interpreter.
KERNEL_DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
# Two tiles for the interpreter, which is slow.
KERNEL_CHUNK = kernel.CHUNK if torch.cuda.is_available() else 2 * kernel.TILE
EXACT_STATES = {"first_moment": "fp32", "second_moment": "fp32"}
SHAPES = ((), (1,), (127,), (128,), (3, 5), (129,), (2, 64, 3))


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    """Return parameters of many sizes, which are equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params, step: int, scale: float = 1e-3) -> None:
    """Set gradients of random size, which are equal for equal steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        size = scale * torch.rand((), generator=generator)
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def run(params, optimizer, steps: range) -> None:
    """Take these steps, each with its own gradients."""
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def all_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Check that parameters and states are equal bit for bit."""
    for p, q in zip(all_parameters(a), all_parameters(b), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key, x in a.state[p].items():
            y = b.state[q][key]
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def moment_values(optimizer, number: int, name: str) -> Tensor:
    """Return the values of a moment of the parameter with index `number`, flat."""
    p = all_parameters(optimizer)[number]
    (group,) = optimizer.param_groups
    format, size = Storage.of(group).moments[name], group["group_size"]
    state = optimizer.state[p]
    parts = [state[state_key(name, format, part)] for part in format.parts]
    rows_ = to_rows(state[state_key(name, format)], size, format.storage_dtype)
    return dequantize(Quantized(rows_, *parts), format).reshape(-1)[: p.numel()]


def reload_from_file(state_dict: Any) -> Any:
    """Save a checkpoint or a tensor to a file, and load it."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@contextmanager
def single_process(folder: Path) -> Iterator[None]:
    """Create a process group of one process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def small_model(dtype=torch.float32) -> nn.Module:
    """Return a model that uses a weight twice."""
    torch.manual_seed(0)
    first, last = nn.Linear(40, 40), nn.Linear(40, 40)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), last).to(dtype)


def losses(model: nn.Module, backwards: int) -> Iterator[Tensor]:
    """Yield one loss for each backward."""
    for step in range(backwards):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 40, generator=generator).to(next(model.parameters()).dtype)
        yield model(x).square().mean()
