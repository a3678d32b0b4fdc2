"""Parameters that are distributed over ranks: local shards, gradients, and layout of the states.

A quantization group of a DTensor never contains elements of two rows, so any number of ranks can
load a distributed checkpoint. If columns are sharded, a group never crosses a shard boundary, and
groups may be smaller. States of vectors, and of matrices with a row length that no group size
divides, are FP32.

    parameter [M, ...] with N elements a row    placements: shards of rows or columns, replicas
    scales    [M, N / G]                        the placements of the parameter
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.optim.group_options import SMALLEST_GROUP, Storage
from fp8pass.weights.quantized_parameter import QuantizedWeight

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, distribute_tensor

    from fp8pass.compat.data_parallel import get_shard, same_placements, use_new_shards
else:  # a build without torch.distributed has no DTensor

    class DTensor:  # type: ignore[no-redef]
        """For isinstance checks."""


# FSDP2 looks up these attributes on a shard.
GATHER_FUNCTIONS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def storage_of(group: Mapping[str, Any], parameter: Tensor) -> Storage:
    storage = Storage.of(group)
    if not isinstance(parameter, DTensor):
        return storage
    size = _group_size(parameter, storage.group_size)
    return Storage.of(group, size if size >= SMALLEST_GROUP else 0)


def _group_size(parameter: DTensor, largest: int) -> int:
    """Return the largest power of two up to `largest` that divides a shard's row length.

    Return 0 if groups are impossible.
    """
    if parameter.ndim < 2:
        return 0
    shards = 1
    for dimension, placement in enumerate(parameter.placements):
        sharded = getattr(placement, "dim", 0)
        if sharded > 1:  # the elements of a row are not consecutive in a shard
            return 0
        shards *= parameter.device_mesh.size(dimension) if sharded == 1 else 1
    if parameter.shape[1] % shards:
        return 0
    return math.gcd(_row_size(parameter) // shards, largest)


def _row_size(x: Tensor) -> int:
    return math.prod(x.shape[1:])


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def assign_sharded(model: nn.Module, weights: Mapping[nn.Linear, nn.Parameter]) -> None:
    """Replace the sharded weights of layers of a model."""
    for layer, weight in weights.items():
        layer.weight = weight
    if weights:
        use_new_shards(model)


def gather_extension(x: Tensor) -> dict[str, Any]:
    """Return the functions that `compress` has attached to a shard, by name. FSDP2 calls them."""
    found = vars(get_shard(x)) if isinstance(x, DTensor) else {}
    return {name: function for name, function in found.items() if name in GATHER_FUNCTIONS}


def set_gather_extension(x: Tensor, functions: Mapping[str, Any]) -> None:
    """Attach functions of `gather_extension` to the shard of a DTensor."""
    assert isinstance(x, DTensor)
    vars(get_shard(x)).update(functions)


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def find_quantized(x: Tensor) -> QuantizedWeight | None:
    """Return `x`, or the local shard of a DTensor, if it is a quantized weight."""
    shard = get_shard(x) if isinstance(x, DTensor) else x
    return shard if isinstance(shard, QuantizedWeight) else None


def local(x: Tensor) -> Tensor:
    """Return the source of an offloaded weight, the local shard of another DTensor, or else `x`."""
    if (weight := find_quantized(x)) is not None:
        return weight if weight.source is None else weight.source
    return x.to_local() if isinstance(x, DTensor) else x


def sharding_groups(parameter: Tensor) -> tuple[Any, ...]:
    """Return the process groups over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    sharded = (i for i, placement in enumerate(parameter.placements) if placement.is_shard())
    return tuple(mesh.get_group(i) for i in sharded)


def whole(x: Tensor) -> Tensor:
    """Gather a DTensor (a collective operation); return a plain tensor unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def with_local(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to a tensor or to the local shard of a DTensor.

    The result of `change` may be in host memory.
    """
    return same_placements(x, change(get_shard(x))) if isinstance(x, DTensor) else change(x)


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the local shard of a parameter's gradient, with the placements of the parameter.

    Before this redistribution, the gradient may be a partial sum over ranks, or replicated.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(parameter, DTensor):
        return local(gradient)
    if not isinstance(gradient, DTensor):
        raise RuntimeError(
            f"A parameter of shape {tuple(parameter.shape)} is a DTensor, but its gradient is a "
            "plain tensor. Assign a DTensor to the gradient, because a plain tensor may be a shard "
            "or a partial sum."
        )
    return gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()


def zeros_like_shard(parameter: Tensor) -> Tensor:
    """Return zeros in the shape and dtype of a parameter's local shard."""
    return torch.zeros(local(parameter).shape, dtype=parameter.dtype, device=parameter.device)


def like_parameter(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor with the placements of `parameter`, or the shard if `parameter` is plain."""
    if not isinstance(parameter, DTensor):
        return shard
    return _distribute(shard, parameter, parameter.shape)


def like_groups(groups: Tensor, parameter: Tensor, group_size: int) -> Tensor:
    """Wrap local `groups` [R], one value for each group, in a DTensor if `parameter` is one."""
    if not isinstance(parameter, DTensor):
        return groups
    shard = parameter.to_local()
    rows = groups.view(shard.shape[0], _row_size(shard) // group_size)
    shape = torch.Size([parameter.shape[0], _row_size(parameter) // group_size])
    return _distribute(rows, parameter, shape)


def _distribute(shard: Tensor, like: DTensor, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
