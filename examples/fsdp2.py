"""FSDP2 that sends gradients and the weights of linear layers in 8 bits.

torchrun --nproc_per_node 2 examples/fsdp2.py       # without GPUs: on CPUs, with gloo
"""

from __future__ import annotations

import os

import torch
from common import BATCH, CUDA, RATE, llama, rows
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8pass


def main() -> None:
    """Set up the ranks, and train."""
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    train()
    dist.destroy_process_group()


def train() -> list[float]:
    """Train on this rank's share of the data, and return its losses."""
    device = "cuda" if CUDA else "cpu"
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (world,))
    model = llama().to(device)
    for layer in model.model.layers:
        layer.compile(backend="fp8pass")
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fp8pass.distributed.compress(model)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in torch.utils.data.DataLoader(rows()[rank::world], batch_size=BATCH, drop_last=True):
        loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
