"""Parameters that are distributed over ranks: local shards, gradients, and layout of the states.

No group of a DTensor contains elements of two rows. Therefore groups do not depend on the number of
ranks among which the rows are divided, and any number of ranks can load a distributed checkpoint.
If columns are sharded too, no group crosses the boundary of a shard, and the group size is reduced
if a shard's rows are shorter than a group. States of vectors are FP32. States of a matrix are FP32
if no supported group size divides its row length.

    parameter [M, ...] with N elements a row    placements: shards of rows or columns, replicas
    scales    [M, N / G]                        the placements of the parameter
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.group_options import SMALLEST_GROUP, Storage
from fp8pass.weights.quantized_parameter import QuantizedWeight

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, distribute_tensor

    from fp8pass.compat.data_parallel import same_placements
else:  # a build without torch.distributed has no DTensor

    class DTensor:  # type: ignore[no-redef]
        """Stand-in class without instances, for isinstance checks."""


def storage_of(group: Mapping[str, Any], parameter: Tensor) -> Storage:
    """Return the storage of a parameter's states, given the options of its group."""
    storage = Storage.of(group)
    if not isinstance(parameter, DTensor):
        return storage
    size = _group_size(parameter, storage.group_size)
    return Storage.of(group, size if size >= SMALLEST_GROUP else 0)


def _group_size(parameter: DTensor, largest: int) -> int:
    """Return the largest power of two up to `largest` that divides a shard's row length.

    Return 0 if no group size is possible.
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


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def local(x: Tensor) -> Tensor:
    """Return the local shard of a DTensor, the source of an offloaded weight, or `x` itself."""
    if isinstance(x, QuantizedWeight):
        return x if x.source is None else x.source
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective operation), or `x` itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def with_local(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `x` with its local shard replaced by `change(shard)`.

    The new shard may be in host memory.
    """
    return same_placements(x, change(x.to_local())) if isinstance(x, DTensor) else change(x)


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the local shard of a parameter's gradient, redistributed like the parameter.

    Gradients of tensor and sequence parallel layers may be partial sums over ranks, or replicated.

    Raises:
        RuntimeError: the parameter is a DTensor, but its gradient is a plain tensor.
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


def like_parameter(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return the DTensor with this local shard and the placements of `parameter`.

    If `parameter` is not a DTensor, return `shard`.
    """
    return _distribute(shard, parameter, tuple(parameter.shape))


def like_groups(groups: Tensor, parameter: Tensor, group_size: int) -> Tensor:
    """Return the DTensor whose local shard has the values `groups` [R], one for each group.

    Its placements are the placements of `parameter`. If `parameter` is not a DTensor, return
    `groups`.
    """
    if not isinstance(parameter, DTensor):
        return groups
    shard = parameter.to_local()
    rows = groups.view(shard.shape[0], _row_size(shard) // group_size)
    return _distribute(rows, parameter, (parameter.shape[0], _row_size(parameter) // group_size))


def _distribute(shard: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements, size = parameter.device_mesh, parameter.placements, torch.Size(shape)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=size, stride=stride)
