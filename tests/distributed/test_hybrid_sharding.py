"""`compress` between replicas: HSDP, and `replicate` of FSDP2."""

from __future__ import annotations

import parallel
import pytest
import torch
from ranks import ranks
from test_compression import (
    a_nonfinite_gradient_reaches_all_ranks,
    compressed_training,
    other_factors_than_the_mean,
)
from test_parallel import assert_replicas_are_equal, backward, distributed, gradients
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8pass

# --- functions of ranks -------------------------------------------------------------------------


def replicas_reduce_last(device: str, way: str) -> None:
    """Gradients of micro-batches wait on each replica for the all-reduce, in FP32 and BF16."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)):
        found = []
        for compresses in (False, True):
            torch.manual_seed(0)
            model = parallel.Decoder().to(device)
            shards = dist.get_world_size() // 2
            mesh = init_device_mesh(device, (2, shards), mesh_dim_names=("replicas", "shards"))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            if compresses:
                compression = fp8pass.distributed.compress(model, weights="none")
            for seed in range(6):
                last = seed in (2, 5)
                model.set_requires_all_reduce(last)
                before = compression.gradients.bytes if compresses else 0
                backward(way, device, model, seed=seed)
                assert seed > 2 or all((p.grad is not None) == last for p in model.parameters())
                if compresses and shards == 1:
                    assert (compression.gradients.bytes > before) == last
            found.append(torch.cat([g.flatten() for g in gradients(model)]))
            assert_replicas_are_equal(model)
        want, got = found
        assert 0 < float((got - want).norm() / want.norm()) <= 0.05


def steps_wait_for_replicas(device: str, way: str) -> None:
    """Backwards under `set_requires_all_reduce(False)` change no weight, also before `compress`."""
    found = []
    for compresses in (False, True):
        model = distributed(way, device, "exact")
        model.set_requires_all_reduce(False)
        backward(way, device, model, seed=0)
        if compresses:
            fp8pass.distributed.compress(model, weights="none")
        # With a large eps, the first update is proportional to the gradient.
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=0.1, eps=10.0, weight_decay=0.0)
        fp8pass.optim.step_in_backward(model, optimizer)
        initial = [parallel.full(p) for p in model.parameters()]
        backward(way, device, model, seed=1)
        assert all(map(torch.equal, map(parallel.full, model.parameters()), initial))
        model.set_requires_all_reduce(True)
        backward(way, device, model, seed=2)
        after = map(parallel.full, model.parameters())
        found.append([x - y for x, y in zip(after, initial, strict=True)])
    want, got = (torch.cat([x.flatten() for x in each]) for each in found)
    assert float((got - want).norm() / want.norm()) < 0.1


def unsupported_sums_of_replicas(device: str) -> None:
    model = distributed("hsdp", device, "exact")
    fp8pass.distributed.compress(model)
    model.set_all_reduce_hook(lambda gradients: None)
    with pytest.raises(RuntimeError, match="set_all_reduce_hook has replaced the reduction"):
        backward("hsdp", device, model)
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(parallel.Decoder().to(device), mesh=mesh, mp_policy=policy)
    fp8pass.distributed.compress(model)
    model.set_requires_all_reduce(False)
    backward("fsdp blocks", device, model)
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match="with gradients in FP16"):
        backward("fsdp blocks", device, model)


def four_ranks_are_close(device: str, way: str) -> None:
    """Two replicas of two shards round three times."""
    found = []
    for compresses in (False, True):
        model = distributed(way, device, "exact")
        if compresses:
            fp8pass.distributed.compress(model, weights="none")
        backward(way, device, model)
        found.append(torch.cat([g.flatten() for g in gradients(model)]))
    want, got = found
    assert 0 < float((got - want).norm() / want.norm()) <= 0.047
    assert_replicas_are_equal(model)


# --- tests --------------------------------------------------------------------------------------


def test_replicas_reduce_last(two):
    two(replicas_reduce_last, "hsdp")


@pytest.mark.long
@pytest.mark.parametrize("way", ["hsdp", "fsdp replicate"])
def test_steps_wait_for_replicas(two, way):
    two(steps_wait_for_replicas, way)


@pytest.mark.long
def test_unsupported_sums_of_replicas(two):
    two(unsupported_sums_of_replicas)


@pytest.mark.long
def test_hybrid_sharding_on_four_ranks(tmp_path):
    with ranks(tmp_path, "cpu", world=4) as four:
        four(four_ranks_are_close, "hsdp")
        four(other_factors_than_the_mean, "hsdp")
        four(replicas_reduce_last, "hsdp")
        four(steps_wait_for_replicas, "hsdp")
        four(compressed_training, "hsdp")
        four(a_nonfinite_gradient_reaches_all_ranks, "hsdp")
