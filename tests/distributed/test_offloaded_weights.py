"""Distributing a model with offloaded weights (`offload_weights`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8pass
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows


def offloaded(device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with offloaded weights, and its exact weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256), nn.Linear(256, 16))
    model.bfloat16()
    before = copy.deepcopy(model.state_dict())
    fp8pass.optim.offload_weights(model, device)
    assert isinstance(model[0].weight, QuantizedWeight)
    return model, before


def check_exact(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, x in model.state_dict().items():
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        assert torch.equal(whole.cpu(), before[name]), name


def ddp_broadcasts_exact_weights(device: str) -> None:
    model, before = offloaded(device)
    if dist.get_rank():
        with torch.no_grad():
            model[0].weight.zero_()
    nn.parallel.DistributedDataParallel(model)
    check_exact(model, before)
    codes, _ = quantize_rows(before["0.weight"].to(device), torch.bfloat16)
    assert torch.equal(model[0].weight.fp8_data.view(torch.uint8), codes.view(torch.uint8))


def fsdp_shards_exact_weights(device: str) -> None:
    model, before = offloaded(device)
    fully_shard(model[0])
    fully_shard(model)
    check_exact(model, before)


def tensor_parallelism_shards_exact_weights(device: str) -> None:
    model, before = offloaded(device)
    mesh = init_device_mesh(device, (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert isinstance(model[0].weight, DTensor)
    check_exact(model, before)


def collectives_that_write_are_refused(device: str) -> None:
    model, before = offloaded(device)
    for collective in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
        with pytest.raises(RuntimeError, match=r"cannot change a quantized weight.*weight.clone"):
            collective(model[0].weight.data)
    check_exact(model, before)


@pytest.mark.parametrize(
    "claim",
    [
        ddp_broadcasts_exact_weights,
        fsdp_shards_exact_weights,
        tensor_parallelism_shards_exact_weights,
        collectives_that_write_are_refused,
    ],
)
def test_distribution_uses_exact_weights(two, claim):
    two(claim)
