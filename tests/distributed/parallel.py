"""A small decoder, and ways to distribute it over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 64, 4, 96, 2, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # The width of the shard determines the number of heads on this rank.
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """Computes logits of tokens. With `checkpoints` the backward recomputes each block."""

    def __init__(self, blocks: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.checkpoints = False
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross entropy for the previous token, which a model can learn."""
    return nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, :-1].flatten())


def batch(device: str, seed: int = 0, *, of_rank: bool) -> Tensor:
    """Return tokens, different on each rank or equal on all."""
    offset = 100 * dist.get_rank() if of_rank else 0
    generator = torch.Generator().manual_seed(seed + offset)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)


# --- ways to distribute a model -------------------------------------------------------------------

Backend = Callable[..., Any] | None


def compile_in_place(module: nn.Module, backend: Backend) -> None:
    """Compile a module in place if there is a backend."""
    if backend is not None:
        module.compile(backend=backend)


def ddp(model: nn.Module, backend: Backend) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(model)
    compile_in_place(model, backend)
    return model


def replicated(model: nn.Module, backend: Backend) -> nn.Module:
    """DDP by `replicate`, with blocks compiled in place, as in torchtitan."""
    for block in model.blocks:
        compile_in_place(block, backend)
    return replicate(model, device_mesh=mesh_of(model))


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_blocks(model: nn.Module, backend: Backend) -> nn.Module:
    for block in model.blocks:
        compile_in_place(block, backend)
    return _fully_sharded(model, mesh_of(model))


def fsdp_whole(model: nn.Module, backend: Backend) -> nn.Module:
    model = _fully_sharded(model, mesh_of(model))
    compile_in_place(model, backend)
    return model


def hsdp(model: nn.Module, backend: Backend) -> nn.Module:
    """HSDP with two replicas. With two ranks, each replica has one shard."""
    for block in model.blocks:
        compile_in_place(block, backend)
    sizes = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(device_of(model), sizes, mesh_dim_names=("replicate", "shard"))
    return _fully_sharded(model, mesh)


def fsdp_replicate(model: nn.Module, backend: Backend) -> nn.Module:
    """`replicate` of FSDP2: every rank has whole parameters."""
    for block in model.blocks:
        compile_in_place(block, backend)
        replicate_with_fsdp(block, mesh=mesh_of(model))
    return replicate_with_fsdp(model, mesh=mesh_of(model))


def tensor_parallel(model: nn.Module, backend: Backend) -> nn.Module:
    split: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh_of(model), split)
    compile_in_place(model, backend)
    return model


def sequence_parallel(model: nn.Module, backend: Backend) -> nn.Module:
    mesh, rows = mesh_of(model), Shard(1)
    gather = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
    split: dict[str, ParallelStyle] = {
        "first": SequenceParallel(),
        "attention": gather,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=rows),
        "second": SequenceParallel(),
        "mlp": gather,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, split)
    around: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, around)
    compile_in_place(model, backend)
    return model


class Gathered(nn.Module):
    """Gathers a sharded parameter. Its gradient is the mean over ranks."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )


def simple_fsdp(model: nn.Module, backend: Backend) -> nn.Module:
    """SimpleFSDP: a parametrization gathers parameters."""
    mesh = mesh_of(model)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    compile_in_place(model, backend)
    return model


WAYS = {
    "ddp": ddp,
    "replicate": replicated,
    "fsdp blocks": fsdp_blocks,
    "fsdp whole": fsdp_whole,
    "hsdp": hsdp,
    "fsdp replicate": fsdp_replicate,
    "tensor": tensor_parallel,
    "sequence": sequence_parallel,
    "simple fsdp": simple_fsdp,
}
SPLITS_THE_MODEL = ("tensor", "sequence")


def device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def mesh_of(model: nn.Module) -> DeviceMesh:
    """Return a mesh of all ranks in one dimension."""
    return init_device_mesh(device_of(model), (dist.get_world_size(),))


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not reduce gradients within, if the model supports that."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2 and replicate
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
        return
    with getattr(model, "no_sync", nullcontext)():
        yield


def full(x: Any) -> Tensor:
    """Return all shards of a tensor, detached, on the CPU."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()
