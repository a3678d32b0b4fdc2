"""Muon with matrices that are distributed over two and four ranks, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from optim_helpers import parameters, set_gradients
from parallel import full
from ranks import Ranks, ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8pass import hardware
from fp8pass.optim import Muon, fused, kernel, muon, offload
from fp8pass.optim.newton_schulz import newton_schulz

# The first dimension is odd, shorter than four, and long; columns of 48 can be divided.
MATRICES = ((33, 48), (3, 48), (48, 96), (96, 48), (1, 48), (64, 48), (5, 48))


@pytest.fixture(scope="module", params=[2, 4])
def some(request, tmp_path_factory) -> Iterator[Ranks]:
    """Two or four processes that run functions of tests."""
    with ranks(tmp_path_factory.mktemp("ranks"), "cpu", request.param) as started:
        yield started


def update(params: list[nn.Parameter], steps: range, **options: Any) -> Muon:
    """Train with gradients that are equal on all ranks."""
    optimizer = Muon(params, lr=0.02, **options)
    step_all(params, optimizer, steps)
    return optimizer


def step_all(params: list[nn.Parameter], optimizer: Muon, steps: range) -> None:
    plain = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for p in params]
    for step in steps:
        set_gradients(plain, step)
        for p, q in zip(params, plain, strict=True):
            p.grad = q.grad
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)
        optimizer.step()


def distribute(mesh: DeviceMesh, placements: Any, dtype: torch.dtype) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None))
        for p in parameters(MATRICES, dtype)
    ]


# --- functions of ranks -------------------------------------------------------------------------


def equals_one_rank(device: str, dtype: torch.dtype, weights: str) -> None:
    """Updates without random bits are bit-equal, whatever the placements are."""
    options = {"momentum_format": "fp32", "weights": weights}
    whole = parameters(MATRICES, dtype)
    update(whole, range(3), **options)
    world = dist.get_world_size()
    line = init_device_mesh(device, (world,))
    places: list[tuple[DeviceMesh, list[Any]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
    ]
    if world == 4:
        square = init_device_mesh(device, (2, 2))
        places += [
            (square, [Replicate(), Shard(0)]),
            (square, [Shard(0), Shard(1)]),
            (square, [Shard(0), Shard(0)]),
            (init_device_mesh(device, (4, 1)), [Shard(1), Shard(0)]),
        ]
    for mesh, placements in places:
        for most in (muon.ROUND, 64):
            params = distribute(mesh, placements, dtype)
            with mock.patch.object(muon, "ROUND", most):
                optimizer = update(params, range(3), **options)
            for p, q in zip(params, whole, strict=True):
                assert torch.equal(full(p), q), placements
                state = optimizer.state[p]["momentum_buffer"]
                assert state.placements == p.placements
        assert isinstance(state, DTensor)


def equals_one_rank_in_kernels(device: str) -> None:
    """The same in Triton's interpreter. Some ranks have empty shards."""
    with (
        mock.patch.object(hardware, "why_no_triton_kernels", return_value=None),
        mock.patch.object(muon, "EagerRound", None),
        mock.patch.object(fused, "CHUNK", kernel.TILE),
        mock.patch.object(kernel, "CHUNK", kernel.TILE),
    ):
        equals_one_rank(device, torch.bfloat16, "nearest")


def spreads_the_work(device: str, alone: bool) -> list[int]:
    """Return the numbers of the matrices that this rank orthogonalizes."""
    params = distribute(
        init_device_mesh(device, (dist.get_world_size(),)), [Shard(0)], torch.float32
    )
    optimizer, found = Muon(params, lr=0.02), []

    def record(matrix: Tensor, **options: Any) -> Tensor:
        found.append(next(i for i, shape in enumerate(MATRICES) if shape == matrix.shape))
        return newton_schulz(matrix, **options)

    with mock.patch.object(muon, "newton_schulz", record):
        for only in [[p] for p in params] if alone else [params]:
            for p in params:
                p.grad = torch.ones_like(p) if any(p is x for x in only) else None
            optimizer.step()
    return found


def shards_in_fp8(device: str) -> None:
    """Groups within rows give the same FP8 momentum on one rank, and nearly the same weights."""
    options = {"momentum_format": "e4m3", "state_rounding": "nearest", "group_size": 16}
    whole = parameters(MATRICES)
    expected = update(whole, range(3), **options)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    params = distribute(mesh, [Shard(0)], torch.float32)
    optimizer = update(params, range(3), **options)
    for p, q in zip(params, whole, strict=True):
        assert torch.equal(full(p), q)
        ours, theirs = optimizer.state[p], expected.state[q]
        assert torch.equal(full(ours["momentum_buffer:e4m3"]), theirs["momentum_buffer:e4m3"])
    with mock.patch.object(offload, "SMALLEST_OFFLOADED", 64):  # on some ranks shards are smaller
        params = distribute(mesh, [Shard(0)], torch.float32)
        update(params, range(3), offload=("states",), **options)
    for p, q in zip(params, whole, strict=True):
        assert torch.equal(full(p), q)


def trains_with_fsdp_and_tensor_parallelism(device: str) -> None:
    """Gradients of FSDP2 with tensor parallelism, summed and clipped, train as on one rank."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("data", "tensor"))

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False)
        )

    plain, model = new_model(), new_model()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizers = [Muon(m.parameters(), lr=0.02, momentum_format="fp32") for m in (model, plain)]
    for step in range(3):
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            for _ in range(2):
                m(x).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()
    for p, q, start in zip(*(m.parameters() for m in (model, plain, new_model())), strict=True):
        assert (full(p) - q).norm() < 0.05 * (q - start).norm()


class Saved:
    """A list of matrices on a mesh, with an optimizer and its distributed checkpoint."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        self.mesh, self.model = mesh, nn.Module()
        for i, p in enumerate(distribute(mesh, [Shard(0)], torch.bfloat16)):
            self.model.register_parameter(f"p{i}", p)
        self.optimizer = Muon(self.model.parameters(), lr=0.02, **options)

    def train(self, steps: range) -> None:
        step_all(list(self.model.parameters()), self.optimizer, steps)

    def save(self, folder: Path) -> None:
        if self.mesh.get_coordinate() is not None and 0 in self.mesh.mesh.tolist():
            content = {"o": get_optimizer_state_dict(self.model, self.optimizer)}
            content |= {"m": self.model.state_dict()}
            dcp.save(content, checkpoint_id=folder, **self._ranks())
        dist.barrier()

    def load(self, folder: Path) -> None:
        content = {"o": get_optimizer_state_dict(self.model, self.optimizer)}
        content |= {"m": self.model.state_dict()}
        dcp.load(content, checkpoint_id=folder, **self._ranks())
        set_optimizer_state_dict(self.model, self.optimizer, content["o"])

    def _ranks(self) -> dict[str, Any]:
        if self.mesh.size() == 1:
            return {"no_dist": True}
        return {"process_group": self.mesh.get_group()}

    def everything(self) -> list[Tensor]:
        found = []
        for p in self.model.parameters():
            found += [full(p), *(full(x) for x in self.optimizer.state[p].values())]
        return found


def checkpoints_move(device: str, folder: Path, options: dict[str, Any]) -> None:
    """Load on any number of ranks what any other number of ranks saved; resume bit by bit."""
    world = dist.get_world_size()
    meshes = [
        init_device_mesh(device, (world // n, n), mesh_dim_names=("copies", "shards"))["shards"]
        for n in (1, 2, 4)
        if n <= world
    ]
    for i, mesh in enumerate(meshes):
        saved = Saved(mesh, **options)
        saved.train(range(2))
        saved.save(folder / str(i))
        want = saved.everything()
        for other in meshes:
            loaded = Saved(other, **options)
            loaded.load(folder / str(i))
            for x, y in zip(loaded.everything(), want, strict=True):
                assert torch.equal(x, y)
            if other is mesh:
                saved.train(range(2, 4))
                loaded.train(range(2, 4))
                for x, y in zip(loaded.everything(), saved.everything(), strict=True):
                    assert torch.equal(x, y)


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("weights", ["nearest", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_placements(some, dtype, weights):
    some(equals_one_rank, dtype, weights)


@pytest.mark.long
def test_results_in_kernels_do_not_depend_on_the_ranks(some):
    pytest.importorskip("triton")
    some(equals_one_rank_in_kernels)


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
def test_each_rank_orthogonalizes_a_part_of_the_matrices(some, alone):
    found = some(spreads_the_work, alone)
    assert sorted(i for each in found for i in each) == list(range(len(MATRICES)))
    counts = [len(each) for each in found]
    assert max(counts) - min(counts) <= 1


@pytest.mark.long
def test_shards_in_fp8(some):
    some(shards_in_fp8)


@pytest.mark.long
def test_fsdp_with_tensor_parallelism(some):
    some(trains_with_fsdp_and_tensor_parallelism)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"momentum_format": "e4m3", "weights": "fp16"}, {"momentum_format": "fp32"}]
)
def test_checkpoints_move_between_numbers_of_ranks(some, options, tmp_path):
    some(checkpoints_move, tmp_path, options)
