"""Distributing a model whose frozen experts, or weights of an FP8 checkpoint, exist only in FP8."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import fp8pass
from fp8pass.weights.quantized_parameter import QuantizedWeight


class FP8Linear(nn.Linear):
    """A layer as loaders of FP8 checkpoints leave it."""


class Experts(nn.Module):
    """Frozen experts, or a frozen layer of a checkpoint, and a trained layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(2, 128, 128, generator=generator) / 8
        self.last = nn.Linear(128, 16).bfloat16()
        if kind == "experts":
            self.up = nn.Parameter(weight.bfloat16(), requires_grad=False)
        else:
            self.layer = FP8Linear(128, 128, bias=False)
            scale = weight[0].abs().amax(1, keepdim=True) / 448
            data = (weight[0] / scale).to(torch.float8_e4m3fn)
            self.layer.weight = nn.Parameter(data, requires_grad=False)
            self.layer.register_buffer("weight_scale", scale)
        fp8pass.quantize_frozen(self)

    @property
    def frozen(self) -> Tensor:
        return self.up if hasattr(self, "up") else self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.up[1] if hasattr(self, "up") else self.layer.weight
        return self.last(x @ matrix.t())


def ddp_keeps_data(device: str, kind: str) -> None:
    """DDP writes the weights of rank 0 to all ranks."""
    torch.manual_seed(0)
    model = Experts(kind).to(device)
    assert isinstance(model.frozen, QuantizedWeight)
    want = model.frozen.fp8_data.view(torch.uint8).clone(), model.frozen.scales.clone()
    replica = nn.parallel.DistributedDataParallel(model)
    x = torch.full((32, 128), 1.0 + dist.get_rank(), dtype=torch.bfloat16, device=device)
    replica(x).float().sum().backward()
    assert torch.equal(model.frozen.fp8_data.view(torch.uint8), want[0])
    assert torch.equal(model.frozen.scales, want[1])
    total = model.last.weight.grad.clone()
    dist.all_reduce(total)
    assert torch.equal(total, dist.get_world_size() * model.last.weight.grad)


def fsdp_shards_values(device: str, kind: str) -> None:
    """Shards are in 16 bits: `quantize_frozen` does not quantize them."""
    torch.manual_seed(0)
    model = Experts(kind).to(device)
    x = torch.ones(32, 128, dtype=torch.bfloat16, device=device)
    values, want = model.frozen.dequantize(), model(x)
    fully_shard(model)
    assert torch.equal(model.frozen.full_tensor(), values)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize("kind", ["experts", "checkpoint"])
@pytest.mark.parametrize("claim", [ddp_keeps_data, fsdp_shards_values])
def test_frozen_weights_are_distributed(two, claim, kind):
    two(claim, kind)


@pytest.mark.parametrize("kind", ["experts", "checkpoint"])
def test_averages_of_models_keep_frozen_data(kind):
    model = Experts(kind)
    average = torch.optim.swa_utils.AveragedModel(model)
    want = copy.deepcopy(model.frozen)
    for _ in range(3):
        average.update_parameters(model)
    found = average.module.frozen
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.fp8_data.view(torch.uint8), want.fp8_data.view(torch.uint8))
    assert torch.equal(found.scales, want.scales)
