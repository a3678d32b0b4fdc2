"""`offload_weights` under FSDP2: exact shards in host memory, FP8 data on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp8pass
from fp8pass.optim.shards import find_quantized
from fp8pass.option_checks import ConfigError
from fp8pass.weights.quantized_parameter import QuantizedWeight

WIDTH, VOCABULARY = 64, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(
    device: str, *, offload: bool = True, keeps: bool = False, replicas: int = 1, meta: bool = False
) -> Model:
    """Return a model with equal weights on all ranks. Its blocks are compiled and sharded."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Model().bfloat16()
    if not meta:
        model.to(device)
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    if replicas > 1:
        mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("r", "s"))
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": not keeps,
    }
    for block in model.blocks:
        block.compile(backend="fp8pass", options={} if device == "cuda" else {"compiler": "eager"})
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    fp8pass.distributed.compress(model)
    if offload:
        with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
            fp8pass.optim.offload_weights(model, device)
    return model


def batches(device: str, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (count, 8, 16), generator=generator)
    return list(ids.to(device))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def new_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return fp8pass.optim.AdamW(model.parameters(), lr=3e-3, offload=("states",))


def new_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, _ = fp8pass.optim.split_parameters(model)
    return fp8pass.optim.Muon(matrices, lr=3e-3, offload=("states",))


def train(
    model: nn.Module, device: str, new_optimizer: Callable[[nn.Module], Any], steps: int = 3
) -> list[Tensor]:
    """Train with clipping. Return the losses."""
    with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
        optimizer, losses = new_optimizer(model), []
        for ids in batches(device, steps):
            loss = loss_of(model, ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def offloaded_weights(model: nn.Module) -> list[QuantizedWeight]:
    found = [find_quantized(p) for p in model.parameters()]
    return [x for x in found if x is not None]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights, on the CPU."""
    options = StateDictOptions(full_state_dict=True)
    return {k: x.cpu() for k, x in get_model_state_dict(model, options=options).items()}


def assert_equal_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def shards_are_in_host_memory(device: str) -> None:
    model = sharded(device)
    weights = offloaded_weights(model)
    assert len(weights) == 4
    for weight in weights:
        assert weight.source is not None
        assert weight.source.device.type == "cpu"
        assert weight.fp8_data.device.type == device
    with patch.object(QuantizedWeight, "wait_for_source", side_effect=AssertionError("was read")):
        loss_of(model, batches(device, 1)[0]).backward()
    assert {type(p.grad) for p in model.parameters()} == {DTensor}
    assert len(offloaded_weights(model)) == 4


def training_is_equal(device: str, keeps: bool, replicas: int, new_optimizer: Any) -> None:
    """Offloading changes no bit of losses and weights."""
    found = []
    for offload in (False, True):
        torch._dynamo.reset()
        model = sharded(device, offload=offload, keeps=keeps, replicas=replicas)
        before = weights_of(model)
        losses = train(model, device, new_optimizer)
        assert len(offloaded_weights(model)) == 4 * offload
        found.append((losses, weights_of(model)))
        assert not torch.equal(before["blocks.0.up.weight"], found[-1][1]["blocks.0.up.weight"])
    (losses, weights), (same_losses, same_weights) = found
    assert torch.equal(torch.stack(losses), torch.stack(same_losses))
    assert_equal_weights(same_weights, weights)


def updates_in_the_backward_are_equal(device: str) -> None:
    found = []
    for offload in (False, True):
        torch._dynamo.reset()
        model = sharded(device, offload=offload)
        with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
            optimizer = fp8pass.optim.AdamW(
                model.parameters(), lr=3e-3, offload=("states", "gradients")
            )
            fp8pass.optim.step_in_backward(model, optimizer, accumulate=2)
            for ids in batches(device, 4):
                loss_of(model, ids).backward()
            optimizer.join()
        found.append(weights_of(model))
    assert_equal_weights(*found)


def weights_on_meta_are_created_in_host_memory(device: str) -> None:
    """A model that exists on no rank as a whole can be loaded."""
    want = weights_of(sharded(device, offload=False))
    model = sharded(device, meta=True)
    assert len(offloaded_weights(model)) == 4
    assert not any(p.is_meta for p in model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if dist.get_rank() else dict(want), options=options)
    assert_equal_weights(weights_of(model), want)
    same = sharded(device, offload=False)
    ids = batches(device, 1)[0]
    assert torch.equal(loss_of(model, ids), loss_of(same, ids))


def weights_can_be_initialized(device: str) -> None:
    model = sharded(device, meta=True)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.02)
    whole = weights_of(model)["blocks.0.up.weight"].float()
    assert 0.019 < whole.std() < 0.021
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().fill_(0.5)
    assert bool((weights_of(model)["blocks.0.up.weight"] == 0.5).all())
    assert loss_of(model, batches(device, 1)[0]).isfinite()


def checkpoints_are_equal(device: str, folder: str) -> None:
    """Distributed checkpoints of both kinds can be exchanged."""
    plain, model = sharded(device, offload=False), sharded(device)
    train(plain, device, new_adamw)
    want = weights_of(plain)
    checkpoint.save(get_model_state_dict(plain), checkpoint_id=f"{folder}/plain")
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=f"{folder}/plain")
    set_model_state_dict(model, state)
    assert_equal_weights(weights_of(model), want)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=f"{folder}/offloaded")
    other = sharded(device, offload=False)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=f"{folder}/offloaded")
    set_model_state_dict(other, state)
    assert_equal_weights(weights_of(other), want)
    assert torch.equal(*(loss_of(m, batches(device, 1)[0]) for m in (model, plain)))


def state_dicts_can_be_copied(device: str) -> None:
    """Tensors in host memory share blocks of memory, also the states of optimizers."""
    model = sharded(device)
    with patch("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1):
        optimizer = new_adamw(model)
        loss_of(model, batches(device, 1)[0]).backward()
        optimizer.step()
    for state in (model.state_dict(), optimizer.state_dict()["state"][2]):
        for name, x in copy.deepcopy(state).items():
            same = x.full_tensor() == state[name].full_tensor() if isinstance(x, DTensor) else None
            assert same is None or bool(same.all()), name


def operators_read_the_exact_weights(device: str) -> None:
    """As averages of weights and penalties on weights do."""
    model = sharded(device)
    with torch.no_grad():
        for p in model.blocks[0].parameters():
            average = torch.zeros_like(p)
            average.copy_(p)
            average.lerp_(p.detach() + 1, 0.5)
            want = p.full_tensor() + 0.5
            torch.testing.assert_close(average.full_tensor(), want, rtol=0.02, atol=0.01)


def weights_are_gathered_in_fp8_before_the_first_forward(device: str) -> None:
    model = sharded(device)
    model.blocks[0].unshard()
    assert isinstance(model.blocks[0].up.weight, QuantizedWeight)
    model.blocks[0].reshard()
    assert loss_of(model, batches(device, 1)[0]).isfinite()


def a_nan_reaches_the_loss(device: str) -> None:
    model = sharded(device)
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(float("nan"))
    assert loss_of(model, batches(device, 1)[0]).isnan()


def errors_name_the_fix(device: str) -> None:
    model = Model().bfloat16().to(device)
    for block in model.blocks:
        fully_shard(block)
    with pytest.raises(ConfigError, match=r"sharded.*call fp8pass\.distributed\.compress\(model\)"):
        fp8pass.optim.offload_weights(model, device)
    model = sharded(device)
    loss_of(model, batches(device, 1)[0])
    with pytest.raises(ConfigError, match="it is already quantized or offloaded"):
        fp8pass.optim.offload_weights(model, device)
    with torch.no_grad(), pytest.raises(RuntimeError, match="part or a view"):
        model.blocks[0].up.weight.to_local().view(-1).zero_()


CLAIMS = [
    (shards_are_in_host_memory,),
    (training_is_equal, False, 1, new_adamw),
    (training_is_equal, True, 1, new_muon),
    (updates_in_the_backward_are_equal,),
    (weights_on_meta_are_created_in_host_memory,),
    (weights_can_be_initialized,),
    (state_dicts_can_be_copied,),
    (operators_read_the_exact_weights,),
    (weights_are_gathered_in_fp8_before_the_first_forward,),
    (a_nan_reaches_the_loss,),
    (errors_name_the_fix,),
]


@pytest.mark.parametrize(
    ("claim", "args"), [(x[0], x[1:]) for x in CLAIMS], ids=lambda x: getattr(x, "__name__", None)
)
def test_two_ranks(two, claim, args):
    two(claim, *args)


def test_checkpoints(two, tmp_path):
    two(checkpoints_are_equal, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_four_ranks(tmp_path, replicas):
    with ranks(tmp_path, "cpu", 4) as four:
        four(training_is_equal, False, replicas, new_adamw)
