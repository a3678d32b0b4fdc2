"""`same_weights` under FSDP2: no codes of weights that were gathered before they changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def sharded(device: str, way: str) -> nn.Module:
    """Two compiled blocks, sharded each or as a whole."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    for block in model:
        block.compile(backend="fp8pass", options={"compiler": "eager", "weight_codes": "1MiB"})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model if way == "blocks" else ():
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=way != "stays gathered")
    return model


def load(model: nn.Module) -> None:
    model.load_state_dict({name: 0.5 * x for name, x in model.state_dict().items()})


def write_to_state_dict(model: nn.Module) -> None:
    for x in model.state_dict().values():
        x.mul_(0.5)


def swap(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(0.5 * p.data)


def write_to_one_shard(model: nn.Module) -> None:
    if dist.get_rank() == 1:
        for p in model.parameters():
            (p.to_local() if hasattr(p, "to_local") else p).mul_(0.5)


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 1.0).step()


CHANGES = (load, write_to_state_dict, swap, write_to_one_shard, step)


def codes_are_never_stale(device: str, way: str, change: Callable[[nn.Module], None]) -> None:
    torch._dynamo.reset()
    model = sharded(device, way)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def loss() -> Tensor:
        found = model(x).float().square().mean()
        found.backward()
        return found.detach()

    with fp8pass.same_weights():
        before = loss()
        with torch.no_grad():
            change(model)
        inside = loss()
    assert torch.equal(inside, loss())
    assert not torch.equal(inside, before)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_changes_between_gathers(two, way, change):
    two(codes_are_never_stale, way, change)


def test_weights_that_stay_gathered(two):
    two(codes_are_never_stale, "stays gathered", step)
