"""What a parameter that is distributed over ranks adds: its local shard, gradient and states.

Groups of a DTensor do not depend on how many ranks share its rows, so that a distributed checkpoint
can be loaded by any number of them: none lies in two rows. None lies in two columns' shards either,
and where these are shorter than a group, groups are smaller. Where rows have none of a size that
kernels take, states are FP32: vectors, and matrices of odd sizes.

    parameter [M, ...] with N elements a row    placements: any of rows and columns
    scales    [M, N / G]                        the same
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.options import SMALLEST_GROUP, Storage
from fp8pass.weights.quantized_parameter import CodedWeight

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, distribute_tensor

    from fp8pass.compat.data_parallel import same_placements
else:  # a build without torch.distributed has no DTensor

    class DTensor:  # type: ignore[no-redef]
        """A class without instances."""


def storage_of(group: Mapping[str, Any], parameter: Tensor) -> Storage:
    """How the states of a parameter of `group` are stored."""
    storage = Storage.of(group)
    if not isinstance(parameter, DTensor):
        return storage
    size = _group_size(parameter, storage.group_size)
    return replace(storage, group_size=size) if size >= SMALLEST_GROUP else storage.exact()


def _group_size(parameter: DTensor, largest: int) -> int:
    """The largest power of two, up to `largest`, that divides a shard's rows; 0 without rows."""
    if parameter.ndim < 2:
        return 0
    shards = 1
    for dimension, placement in enumerate(parameter.placements):
        sharded = getattr(placement, "dim", 0)
        if sharded > 1:  # elements of a row do not follow one another in a shard
            return 0
        shards *= parameter.device_mesh.size(dimension) if sharded == 1 else 1
    if parameter.shape[1] % shards:
        return 0
    return math.gcd(_row(parameter) // shards, largest)


def _row(x: Tensor) -> int:
    """The number of elements of a row, in all but the first dimension."""
    return math.prod(x.shape[1:])


def is_distributed(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(x, DTensor)


def shard_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as it has one of `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def local(x: Tensor) -> Tensor:
    """The local shard of a DTensor, the weight behind codes if any; other tensors as they are."""
    if isinstance(x, CodedWeight):
        return x if x.source is None else x.source
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All of a DTensor, which every rank has to ask for; other tensors as they are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def with_local(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with its local shard changed, which may be on the host."""
    return same_placements(x, change(x.to_local())) if isinstance(x, DTensor) else change(x)


def local_gradient(parameter: Tensor) -> Tensor:
    """The local shard of a parameter's gradient, brought to the parameter's placements.

    Tensor and sequence parallel layers leave gradients that are still to be summed over ranks, and
    others that every rank has whole.

    Raises:
        RuntimeError: the parameter is distributed, and its gradient is not.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(parameter, DTensor):
        return local(gradient)
    if not isinstance(gradient, DTensor):
        raise RuntimeError(
            f"A parameter of shape {tuple(parameter.shape)} is a DTensor and its gradient a plain "
            "tensor, of which nobody knows if it is a shard or a sum: assign it as a DTensor."
        )
    return gradient.redistribute(parameter.device_mesh, parameter.placements).to_local()


def like_parameter(codes: Tensor, parameter: Tensor) -> Tensor:
    """Codes of the local shard, as a DTensor distributed like the parameter."""
    return _distributed(codes, parameter, tuple(parameter.shape))


def like_groups(groups: Tensor, parameter: Tensor, group_size: int) -> Tensor:
    """Values of the local shard's groups, [R], as a DTensor distributed like the parameter."""
    if not isinstance(parameter, DTensor):
        return groups
    shard = parameter.to_local()
    rows = groups.view(shard.shape[0], _row(shard) // group_size)
    return _distributed(rows, parameter, (parameter.shape[0], _row(parameter) // group_size))


def _distributed(shard: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A shard as a DTensor of `shape` with the placements of `parameter`, if that is one."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
