"""The optimizer with parameters or states that are sharded over ranks."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import EXACT_STATES, parameters, run, single_process
from torch import nn

from fp8pass.optim import AdamW


def sharded_training(rank: int, folder: str, world: int) -> None:
    """Train with FSDP2 on each rank, and resume bit by bit from a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = torch.distributed.init_device_mesh("cpu", (world,))

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        # 33 rows are not divided evenly, and one row is on one rank only.
        model = nn.Sequential(nn.Linear(48, 33), nn.Tanh(), nn.Linear(33, 1))
        return fully_shard(model, mesh=mesh)

    def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step + 10 * rank)
            model(torch.randn(8, 48)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = new_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    weight = model[0].weight
    state = optimizer.state[weight]
    assert isinstance(state["exp_avg:e4m3+expand"], DTensor)
    assert state["exp_avg:e4m3+expand"].to_local().shape == weight.to_local().shape
    assert state["exp_avg:e4m3+expand:scale"].shape == (33, 48 / 16)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    train(model, optimizer, range(2, 4))

    again = new_model()
    resumed = AdamW(again.parameters(), lr=0.5)
    loaded = {"optim": get_optimizer_state_dict(again, resumed)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(again, resumed, loaded["optim"])
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.copy_(weights[name])
    train(again, resumed, range(2, 4))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        for key, x in optimizer.state[p].items():
            y = resumed.state[q][key]
            x, y = (t.to_local() if isinstance(t, DTensor) else t for t in (x, y))
            assert torch.equal(x.float(), y.float()), key
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_sharded_parameters_and_distributed_checkpoints(tmp_path):
    torch.multiprocessing.spawn(sharded_training, (str(tmp_path), 2), nprocs=2)


def test_zero_redundancy(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with single_process(tmp_path):
        ours, sharded = parameters(), parameters()
        # It sorts parameters by size, which changes their indices and so the random bits.
        options = {"lr": 0.01, **EXACT_STATES}
        run(sharded, ZeroRedundancyOptimizer(sharded, AdamW, **options), range(3))
        run(ours, AdamW(ours, **options), range(3))
        for p, q in zip(ours, sharded, strict=True):
            assert torch.equal(p, q)
