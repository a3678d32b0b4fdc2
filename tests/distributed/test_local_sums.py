"""`compress(sums=...)`: gradients that are not reduced are summed in 8 bits, and reduced once."""

from __future__ import annotations

import math
from typing import Any

import parallel
import pytest
import torch
from ranks import ranks
from test_parallel import assert_replicas_are_equal, backward, distributed, gradients
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8pass

WAYS = "ddp", "fsdp blocks", "fsdp whole", "hsdp", "fsdp replicate"


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def accumulate(way: str, device: str, model: nn.Module, micro_batches: int) -> None:
    """Run backwards. Only the last backward reduces gradients."""
    with parallel.no_sync(model):
        for seed in range(micro_batches - 1):
            backward(way, device, model, seed=seed)
    backward(way, device, model, seed=micro_batches - 1)


# --- functions of ranks -------------------------------------------------------------------------


def sums_are_close(device: str, way: str, format: str, tolerance: float) -> None:
    """The gradient has the error of the sums, besides the error of one compressed reduction."""
    found, traffic = [], []
    for sums in ("none", format):
        model = distributed(way, device, "exact")
        compression = fp8pass.distributed.compress(model, weights="none", sums=sums)
        accumulate(way, device, model, 8)
        found.append(flat(gradients(model)))
        traffic.append(compression.gradients.bytes)
        assert_replicas_are_equal(model)
    assert relative(found[1], found[0]) < tolerance
    assert traffic[0] == traffic[1]  # one reduction


def micro_batches_leave_no_gradients(device: str, way: str) -> None:
    model = distributed(way, device, "coat")
    compression = fp8pass.distributed.compress(model, sums="e4m3")
    with parallel.no_sync(model):
        for seed in range(3):
            backward(way, device, model, seed=seed)
    assert all(p.grad is None for p in model.parameters())
    sums = compression.sums._sums.values()
    assert len(sums) == len(list(model.parameters()))
    pieces = [piece.stored for each in sums for piece in each.pieces]
    count = sum(x.numel() * x.itemsize for stored in pieces for x in stored[:2])
    elements = 2 * sum(p.numel() for p in model.parameters()) if "fsdp" in way else 0
    assert count <= (elements or sum(p.numel() for p in model.parameters())) * 1.2
    backward(way, device, model)
    assert all(not each.count for each in sums)
    assert all(p.grad is not None for p in model.parameters())


def training_with_clipping(device: str, way: str, checkpoints: bool) -> None:
    losses: list[list[float]] = []
    for sums in ("none", "e4m3"):
        model = distributed(way, device, "coat")
        model.checkpoints = checkpoints
        if sums != "none":
            fp8pass.distributed.compress(model, sums=sums)
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
        losses.append([])
        for _ in range(5):
            accumulate(way, device, model, 4)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(backward(way, device, model)))
            optimizer.zero_grad()
        assert_replicas_are_equal(model)
    assert losses[1][-1] < 0.95 * losses[1][0]
    assert abs(losses[1][-1] - losses[0][-1]) < 0.03 * losses[0][-1]


def training_is_reproducible(device: str, way: str) -> None:
    found = []
    for _ in range(2):
        model = distributed(way, device, "coat")
        fp8pass.distributed.compress(model, sums="e4m3")
        for _ in range(2):
            accumulate(way, device, model, 3)
        found.append(flat(gradients(model)))
    assert torch.equal(*found)


def tools_leave_the_sums(device: str, way: str) -> None:
    """Tools run backwards of their own in the middle of an accumulation."""
    found = []
    for measures in (False, True):
        model = distributed(way, device, "coat")
        fp8pass.distributed.compress(model, sums="e4m3")
        with parallel.no_sync(model):
            backward(way, device, model, seed=0)
        if measures:
            ids = parallel.batch(device, 5, of_rank=True)
            fp8pass.diagnose(model, lambda m, x: parallel.loss_of(m(x), x), ids)
        backward(way, device, model, seed=1)
        found.append(flat(gradients(model)))
    assert torch.equal(*found)


class Branches(nn.Module):
    """Uses its second layer only if asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        y = self.first(x)
        return y + self.second(x) if uses_second else y


def sums_of_unused_parameters_are_reduced(device: str, way: str) -> None:
    found = []
    for sums in ("none", "fp16"):
        base = Branches().to(device)
        model: Any = base
        if way == "ddp":
            model = DistributedDataParallel(base, find_unused_parameters=True)
        else:
            fully_shard(base, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        fp8pass.distributed.compress(model, weights="none", sums=sums)
        x = torch.randn(8, 64, device=device, generator=torch.Generator(device).manual_seed(1))
        with parallel.no_sync(model):
            model(x, True).square().mean().backward()
        # DDP does not reduce the gradients of parameters that no rank used in the last backward.
        model(x, way == "ddp" and dist.get_rank() == 1).square().mean().backward()
        found.append([parallel.full(p.grad) for p in model.parameters()])
    assert found[0][2].any()
    for a, b in zip(*found, strict=True):
        assert relative(b, a) < 0.04, relative(b, a)


def a_nan_reaches_the_gradients(device: str, way: str) -> None:
    model = distributed(way, device, "coat")
    compression = fp8pass.distributed.compress(model, sums="e4m3")
    with parallel.no_sync(model):
        ids = parallel.batch(device, 0, of_rank=True)
        (parallel.loss_of(model(ids), ids) * math.nan).backward()
    backward(way, device, model)
    assert not flat(gradients(model)).isfinite().all()
    model.zero_grad()
    with parallel.no_sync(model):
        (parallel.loss_of(model(ids), ids) * math.nan).backward()
    compression.sums.drop()
    backward(way, device, model)
    assert flat(gradients(model)).isfinite().all()


def other_layouts_under_ddp(device: str) -> None:
    found = []
    for sums in ("none", "fp16"):
        torch.manual_seed(0)
        conv = nn.Conv2d(8, 16, 3).to(device, memory_format=torch.channels_last)
        model = DistributedDataParallel(conv)
        fp8pass.distributed.compress(model, sums=sums)
        x = torch.randn(2, 8, 6, 6, device=device)
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        found.append(flat(gradients(model)))
    assert relative(found[1], found[0]) < 0.06, relative(found[1], found[0])


def mixed_precision_of_fsdp(device: str) -> None:
    found = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for sums in ("none", "fp16"):
        torch.manual_seed(0)
        model = parallel.Decoder().to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        fp8pass.distributed.compress(model, weights="none", sums=sums)
        accumulate("fsdp blocks", device, model, 4)
        found.append(flat(gradients(model)))
    assert relative(found[1], found[0]) < 0.02


def hybrid_sharding(device: str) -> None:
    found = []
    for sums in ("none", "fp16"):
        torch.manual_seed(0)
        model = parallel.Decoder().to(device)
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "shards"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fp8pass.distributed.compress(model, weights="none", sums=sums)
        accumulate("fsdp blocks", device, model, 4)
        found.append(flat(gradients(model)))
        assert_replicas_are_equal(model)
    assert relative(found[1], found[0]) < 0.02


def arguments_are_checked(device: str) -> list[str]:
    found = []
    for way, arguments in (
        ("ddp", {"sums": "e4m3", "gradients": "none"}),
        ("replicate", {"sums": "e4m3"}),
        ("ddp", {"sums": "int3"}),
    ):
        with pytest.raises(fp8pass.ConfigError) as error:
            fp8pass.distributed.compress(distributed(way, device, None), **arguments)
        found.append(str(error.value))
    return found


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("format", "tolerance"), [("fp16", 0.02), ("de8", 0.06), ("e4m3", 0.1)])
def test_sums_are_close(two, way, format, tolerance):
    two(sums_are_close, way, format, tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_leave_no_gradients(two, way):
    two(micro_batches_leave_no_gradients, way)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp blocks"])
def test_training_with_clipping(two, way, checkpoints):
    two(training_with_clipping, way, checkpoints)


@pytest.mark.parametrize("way", ["ddp", "fsdp blocks"])
@pytest.mark.parametrize(
    "function",
    [
        training_is_reproducible,
        tools_leave_the_sums,
        sums_of_unused_parameters_are_reduced,
        a_nan_reaches_the_gradients,
    ],
)
def test_sums(two, function, way):
    two(function, way)


def test_other_layouts_under_ddp(two):
    two(other_layouts_under_ddp)


def test_mixed_precision_of_fsdp(two):
    two(mixed_precision_of_fsdp)


@pytest.mark.long
def test_hybrid_sharding(tmp_path):
    with ranks(tmp_path, "cpu", world=4) as four:
        four(hybrid_sharding)


def test_arguments_are_checked(two):
    for messages in two(arguments_are_checked):
        assert "leave out gradients='none'" in messages[0]
        assert "not replicate" in messages[1]
        assert "sums is one of 'e4m3'" in messages[2]
