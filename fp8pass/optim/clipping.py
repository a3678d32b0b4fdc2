"""Norms and buckets of quantized sums of gradients, for `step_in_backward(max_norm=...)`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.shards import local, sharding_groups
from fp8pass.optim.sums import GradientSum

BUCKET = 1 << 25  # elements that ranks send at once


def norm_of_sums(sums: Mapping[Tensor, GradientSum], parameters: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, fp32 [], on the device of the first parameter.

    All ranks must pass the same parameters: squares of shards are added over their process groups.
    """
    squares: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = zeros_like_shard(parameter)
        sums[parameter].add_into(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        squares.setdefault(sharding_groups(parameter), []).append(square)
    totals = []
    for groups, found in squares.items():
        device = found[0].device
        total = torch.stack([x.to(device) for x in found]).sum()
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack([x.to(totals[0].device) for x in totals]).sum().sqrt()


def split_into_buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive parameters of one dtype and device with at most `BUCKET` elements."""
    for _, same in groupby(parameters, lambda p: (p.dtype, p.device)):
        bucket: list[Tensor] = []
        for parameter in same:
            if bucket and sum(p.numel() for p in (*bucket, parameter)) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


def zeros_like_shard(parameter: Tensor) -> Tensor:
    """Return zeros in the shape and dtype of a parameter's local shard."""
    return torch.zeros(local(parameter).shape, dtype=parameter.dtype, device=parameter.device)
