"""`diagnose`, `bisect` and `calibrate` on a model of which each rank has a shard."""

from __future__ import annotations

import parallel
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import fp8pass
from fp8pass import Config

EAGER = Config(compiler="eager")


class Stack(nn.Module):
    """Two equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parallel.MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sharded(device: str) -> tuple[nn.Module, Tensor]:
    """A model, and the batch of this rank."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Stack().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    return model, torch.randn(32, parallel.WIDTH, device=device)


def names(device: str) -> tuple[list[str], list[str]]:
    """What `diagnose` and `calibrate` call the layers."""
    model, x = sharded(device)
    found = fp8pass.diagnose(model, loss, x, config=EAGER)
    values = fp8pass.calibrate(model, loss, x, config=EAGER)
    return sorted({y.module for y in found.layers}), [name for name, *_ in values]


def what_bisect_says(device: str, broken: bool) -> str:
    """Its text, or that of the error that it ends with if a shard of one rank has a NaN."""
    model, x = sharded(device)
    if broken and dist.get_rank():
        with torch.no_grad():
            next(model.parameters()).to_local()[:1] = torch.nan
    try:
        return str(fp8pass.bisect(model, loss, x, config=EAGER, most=1))
    except ValueError as wrong:
        return str(wrong)


def guarded(device: str) -> int:
    """Alarms in some steps of which the gradient's norm is as PyTorch gives it: distributed."""
    model, x = sharded(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = fp8pass.Guard(None, optimizer, model=model, every=1)
    for _ in range(3):
        value = loss(model, x)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        guard.step(value.detach(), gradient_norm=norm)
        optimizer.zero_grad()
    return len(guard.events)


def test_a_guard_takes_distributed_norms(two):
    assert two(guarded) == [0, 0]


@pytest.mark.long
def test_layers_are_named_by_their_block(two):
    """What FSDP2 gathers are other parameters than those of the model."""
    (first, values), second = two(names)
    assert (first, values) == second
    assert {f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")} <= {*first}
    assert any(name.startswith("up:") for name in values)  # names start at what is compiled


@pytest.mark.parametrize("broken", [False, True])
def test_bisect_decides_alike_on_all_ranks(two, broken):
    """By gradients of all shards: else one rank looks for more than the other, which waits."""
    first, second = two(what_bisect_says, broken)
    assert first == second
    assert ("not finite" if broken else "linear layers and saved tensors in low bits") in first
