"""Training on two ranks in all ways of PyTorch: right gradients and equal replicas."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import parallel
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8pass
from fp8pass import Config


def distributed(
    way: str,
    device: str,
    recipe: str | None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> nn.Module:
    """Return a distributed model with equal weights on all ranks. It is eager without a recipe."""
    torch.manual_seed(0)
    model = parallel.Decoder(**changes).to(device)
    options = {"compiler": "eager", **(options or {})}
    backend = recipe and fp8pass.backend(Config.recipe(recipe, **options))
    return parallel.WAYS[way](model, backend or None)


def backward(way: str, device: str, model: nn.Module, seed: int = 0) -> Tensor:
    """Run forward and backward, and return the loss. Gradients are accumulated."""
    ids = parallel.batch(device, seed, of_rank=way not in parallel.SPLITS_THE_MODEL)
    loss = parallel.loss_of(model(ids), ids)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parallel.full(p.grad) for p in model.parameters()]


def clip(model: nn.Module) -> None:
    """Clip to a norm of one. PyTorch does not support mixed DTensors and tensors."""
    for distributed in (False, True):
        chosen = [p for p in model.parameters() if isinstance(p, DTensor) == distributed]
        assert not chosen or bool(parallel.full(nn.utils.clip_grad_norm_(chosen, 1.0)) > 0)


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-12


def assert_replicas_are_equal(model: nn.Module) -> None:
    """Check that replicated and gathered parameters are equal on all ranks."""
    for name, p in model.named_parameters():
        mine = parallel.full(p) if isinstance(p, DTensor) else p.detach().cpu()
        local = p.to_local().detach() if isinstance(p, DTensor) else p.detach()
        copies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(copies, mine)
        assert all(torch.equal(mine, copy) for copy in copies), name
        if isinstance(p, DTensor) and all(x.is_replicate() for x in p.placements):
            dist.all_gather_object(copies, local.cpu())
            assert all(torch.equal(copies[0], copy) for copy in copies), name


# --- functions of ranks -------------------------------------------------------------------------


def exact_equals_eager(device: str, way: str) -> None:
    """Compare one backward, and two backwards with one reduction at the end."""
    found = []
    for recipe in (None, "exact"):
        model = distributed(way, device, recipe)
        found.append([backward(way, device, model), *gradients(model)])
        model.zero_grad()
        with parallel.no_sync(model):
            backward(way, device, model, seed=1)
        backward(way, device, model, seed=2)
        found[-1] += gradients(model)
    assert_near(found[1], found[0], 4e-5)


def coat_trains_and_replicas_stay_equal(
    device: str, way: str, options: dict[str, Any] | None = None, recipe: str = "coat"
) -> None:
    """Train with fp8pass's AdamW, clipping, and an evaluation in between."""
    model = distributed(way, device, recipe, options, blocks=1)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        losses.append(backward(way, device, model, seed=step % 2))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            model.eval()
            with torch.no_grad():
                ids = parallel.batch(device, of_rank=way not in parallel.SPLITS_THE_MODEL)
                assert model(ids).isfinite().all()
            model.train()
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
    assert_replicas_are_equal(model)


def checkpointed_blocks_equal_eager(device: str, way: str) -> None:
    found = []
    for recipe in (None, "exact"):
        model = distributed(way, device, recipe, blocks=1)
        getattr(model, "module", model).checkpoints = True
        backward(way, device, model)
        found.append(gradients(model))
    assert_near(found[1], found[0], 4e-5)


def gathered_data_changes_no_bit(device: str, way: str, recipe: str) -> None:
    """Loss and gradients of each rank are the same bits without `gather_quantized`."""
    found = []
    for left_out in ("", "gather_quantized"):
        torch._dynamo.reset()
        with mock.patch.dict(os.environ, FP8PASS_DISABLE_PASSES=left_out):
            model = distributed(way, device, recipe, blocks=1, dtype=torch.bfloat16)
            found.append([backward(way, device, model), *gradients(model)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(parallel.full(a), parallel.full(b))


def a_nan_of_one_rank_reaches_all(device: str) -> None:
    """All ranks share a scale, which must be the scale of the whole tensor."""
    mesh = init_device_mesh(device, (2,))
    layer = nn.Linear(32, 16, bias=False).to(device)

    def product(x: Tensor) -> Tensor:
        part = DTensor.from_local(x.sin(), mesh, [Shard(0)], run_check=False)
        return layer(part.redistribute(placements=[Replicate()]).to_local())

    x = torch.randn(16, 32, device=device)
    x[3, 5] = torch.nan if dist.get_rank() == 1 else 0
    program = torch.compile(product, backend="fp8pass", options=LINEAR)
    assert program(x).isnan().all()


def diagnose_errors(device: str, way: str) -> None:
    """Errors of all layers are measured although FSDP2 has freed the gathered weights."""
    model = distributed(way, device, None, blocks=1)
    ids = parallel.batch(device, of_rank=way not in parallel.SPLITS_THE_MODEL)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return parallel.loss_of(model(ids), ids)

    found = fp8pass.diagnose(model, loss, ids, config=Config(compiler="eager"))
    assert len(found.layers) >= 6
    assert all(0 <= layer.relative < 0.3 for layer in found.layers)


def updates_in_the_backward_equal_a_step(device: str, way: str) -> None:
    """Updates in the backward equal updates after it."""
    found = []
    for attaches in (False, True):
        model = distributed(way, device, "exact", blocks=1)
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
        if attaches:
            fp8pass.optim.step_in_backward(model, optimizer)
        for seed in range(3):
            backward(way, device, model, seed)
            assert all(p.grad is None for p in model.parameters()) == attaches
            optimizer.step()
            optimizer.zero_grad()
        found.append([parallel.full(p) for p in model.parameters()])
        assert_replicas_are_equal(model)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def updates_in_the_backward_with_sums_train(device: str, way: str) -> None:
    """Sums of two backwards are in 8 bits."""
    model = distributed(way, device, "coat", blocks=1)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-3)
    fp8pass.optim.step_in_backward(model, optimizer, accumulate=2)
    losses = [backward(way, device, model, seed % 2) for seed in range(16)]
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
    assert_replicas_are_equal(model)


def clipping_in_the_backward_equals_clipping_before_a_step(device: str, way: str) -> None:
    """The norm is the norm of all shards on all ranks."""
    found, norms = [], []
    for attaches in (False, True):
        model = distributed(way, device, "exact", blocks=1)
        optimizer = fp8pass.optim.AdamW(
            model.parameters(), lr=3e-3, first_moment="fp32", second_moment="fp32"
        )
        if attaches:
            attached = fp8pass.optim.step_in_backward(
                model, optimizer, max_norm=0.01, buffer="fp16"
            )
        norms.append([])
        for seed in range(3):
            backward(way, device, model, seed)
            if attaches:
                norms[-1].append(attached.norm.item())
                continue
            squares = [parallel.full(p.grad).float().square().sum() for p in model.parameters()]
            total = torch.stack(squares).sum().sqrt()
            norms[-1].append(total.item())
            for p in model.parameters():
                p.grad.mul_((0.01 / total).clamp(max=1))
            optimizer.step()
            optimizer.zero_grad()
        found.append([parallel.full(p) for p in model.parameters()])
        assert_replicas_are_equal(model)
    assert min(norms[0]) > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)
    assert_near(found[1], found[0], 2e-3)


def zero_redundancy_optimizer_shares_tensors(device: str) -> None:
    """ZeroRedundancyOptimizer assigns whole tensors to ranks, as Algorithm 1 of FP8-LM does."""
    found = []
    for shares in (False, True):
        model = distributed("ddp", device, "exact")
        parameters = list(model.parameters())
        if shares:
            optimizer = ZeroRedundancyOptimizer(parameters, fp8pass.optim.AdamW, lr=3e-3)
        else:
            optimizer = fp8pass.optim.AdamW(parameters, lr=3e-3)
        for seed in range(3):
            backward("ddp", device, model, seed)
            optimizer.step()
            optimizer.zero_grad()
        assert_replicas_are_equal(model)
        found.append([parallel.full(p) for p in parameters])
    assert_near(found[1], found[0], 2e-3)  # random rounding follows the order of parameters
    loads = [0] * dist.get_world_size()
    for size in sorted((p.numel() for p in parameters), reverse=True):
        loads[loads.index(min(loads))] += size
    mine = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    assert mine == loads[dist.get_rank()]


def ddp_with_options(device: str) -> None:
    """Small buckets, gradients as views of buckets, and a static graph; also compressed."""
    options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True, "static_graph": True}
    found = []
    for arguments, compresses in (({}, False), (options, False), (options, True)):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(parallel.Decoder().to(device), **arguments)
        model.compile(backend=fp8pass.backend(Config.recipe("exact", compiler="eager")))
        if compresses:
            fp8pass.distributed.compress(model)
            assert not model._forward_pre_hooks  # a hook would break the graph
        for seed in range(2):
            model.zero_grad()
            backward("ddp", device, model, seed)
        found.append(gradients(model))
    assert_near(found[1], found[0], 4e-5)
    compressed, exact = (torch.cat([g.flatten() for g in each]) for each in (found[2], found[0]))
    assert 0 < (compressed - exact).norm() < 0.04 * exact.norm()
    assert_replicas_are_equal(model)


# --- tests --------------------------------------------------------------------------------------

LINEAR = {"recipe": "linear", "compiler": "eager"}
CLAIMS = (exact_equals_eager, coat_trains_and_replicas_stay_equal, checkpointed_blocks_equal_eager)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("way", parallel.WAYS)
def test_every_way_trains_on_two_ranks(two, way, claim):
    two(claim, way)


@pytest.mark.long
@pytest.mark.parametrize(
    "claim", [zero_redundancy_optimizer_shares_tensors, ddp_with_options], ids=lambda c: c.__name__
)
def test_ddp_with_other_optimizers_and_options(two, claim):
    two(claim)


# `make test-long` includes scales of tensors in the forward.
GATHERED = [("sequence", "coat"), ("simple fsdp", "coat"), ("sequence", "linear")]
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@pytest.mark.long
@pytest.mark.parametrize(("way", "recipe"), GATHERED if LONG else GATHERED[:2])
def test_gathering_quantized_tensors(two, way, recipe):
    two(gathered_data_changes_no_bit, way, recipe)


@pytest.mark.long
def test_a_nan_of_one_rank_reaches_all(two):
    two(a_nan_of_one_rank_reaches_all)


@pytest.mark.long
@pytest.mark.parametrize("way", ["fsdp blocks", "sequence"])
def test_diagnose_measures_distributed_models(two, way):
    two(diagnose_errors, way)


@pytest.mark.long
@pytest.mark.parametrize(
    "claim",
    [
        updates_in_the_backward_equal_a_step,
        updates_in_the_backward_with_sums_train,
        clipping_in_the_backward_equals_clipping_before_a_step,
    ],
    ids=lambda claim: claim.__name__,
)
@pytest.mark.parametrize("way", ["fsdp blocks", "sequence"])
def test_updates_in_the_backward(two, way, claim):
    two(claim, way)
