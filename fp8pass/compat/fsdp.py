"""What is private of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def fsdp_has_run(module: FSDPModule) -> bool:
    """Whether FSDP2 has seen a forward, and so knows how to gather each parameter."""
    return module._get_fsdp_state()._is_root is not None


def shard_of(parameter: DTensor) -> Tensor:
    """The tensor itself that FSDP2 asks how it is gathered; `to_local` makes another object."""
    return parameter._local_tensor


def factor_of(op: Any, ranks: int) -> float | None:
    """What a sum over ranks is multiplied by to be this reduction of FSDP2's; None: it is no sum.

    `set_gradient_divide_factor` has NCCL multiply the terms before it adds them up.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()  # which its copies and pickles are made of
    return float(factor)


def writing_to_what_autograd_saved(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """While gathered weights are written that a forward saved; the backward reads the same again.

    Autograd would take them for others.
    """
    tracked = tuple(x for x in tensors if not x.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(tracked) if tracked else nullcontext()


def same_placements(like: DTensor, local: Tensor) -> DTensor:
    """A DTensor with another local shard, which may be on the host."""
    return DTensor(local, like._spec, requires_grad=False)


@dataclass(frozen=True)
class Gathered:
    """A parameter that FSDP2 gathers.

    Attributes:
        module, name: whose it is; of a shared one, the first.
        dtype: of what is gathered.
        group: a number that those that are gathered together share.
        is_kept_in_parts: whether a part of what was gathered is kept after the forward, on fewer
            ranks than have the shards (`reshard_after_forward` is a number).
    """

    module: nn.Module
    name: str
    dtype: torch.dtype
    group: int
    is_kept_in_parts: bool


def gathered_parameters(module: FSDPModule) -> Iterator[Gathered]:
    """The parameters that FSDP2 gathers for a module itself, in their order."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before there were several
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    for group in groups:
        in_parts = group.post_forward_mesh_info not in (None, group.mesh_info)
        for each in group.fsdp_params:
            info = each._module_info
            dtype = each.mp_policy.param_dtype or each.sharded_param.dtype
            yield Gathered(info.module, info.param_name, dtype, id(group), in_parts)
