"""What is private of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@contextmanager
def reducing_anew(model: nn.Module) -> Iterator[None]:
    """Set aside the gradients that FSDP2 has accumulated without a reduction, and have it reduce.

    Afterwards the gradients are put back, and FSDP2 reduces or accumulates as before.
    """
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _groups_of(m)]
    parameters = [p for group in groups for p in group.fsdp_params]
    # Whole parameters exist from the first forward on.
    whole = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
    held = [
        *((g, "reduce_grads", True) for g in groups),
        *((g, "all_reduce_grads", True) for g in groups),
        *((g, "_partial_reduce_output", None) for g in groups),
        *((p, "unsharded_accumulated_grad", None) for p in parameters),
        *((x, "grad", None) for x in whole),
    ]
    before = [getattr(holder, name) for holder, name, _ in held]
    for holder, name, meanwhile in held:
        setattr(holder, name, meanwhile)
    try:
        yield
    finally:
        for (holder, name, _), value in zip(held, before, strict=True):
            setattr(holder, name, value)


class GradientBuffer(Tensor):
    """Memory that FSDP2 copies gradients to, which remembers their sizes.

    A reduce-scatter gets the buffer alone, and parameters without a gradient are not in it.
    """

    shapes: list[torch.Size]

    @classmethod
    def empty(cls, *size: int, dtype: torch.dtype, device: torch.device) -> GradientBuffer:
        """A buffer that is not initialized."""
        buffer = torch.empty(*size, dtype=dtype, device=device).as_subclass(cls)
        buffer.shapes = []
        return buffer

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        return self.as_subclass(Tensor)

    def sizes_of(self, ranks: int) -> tuple[int, ...]:
        """Elements of each parameter in one rank's part.

        Raises:
            RuntimeError: the buffer was filled by other operators than `fsdp.chunk_cat`.
        """
        sizes = tuple(-(-shape[0] // ranks) * shape[1:].numel() for shape in self.shapes)
        if sum(sizes) * ranks != self.numel():
            raise RuntimeError(
                "compress does not recognize how this version of FSDP2 collects gradients: leave "
                "gradients as they are, with compress(model, gradients='none')."
            )
        return sizes

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if func is Tensor.view:
            found = found.as_subclass(cls)
            found.shapes = args[0].shapes
        elif func is torch.ops.fsdp.chunk_cat:
            kwargs["out"].shapes[:] = [x.shape for x in args[0]]
        return found


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


def _groups_of(module: FSDPModule) -> Sequence[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before there were several
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return groups


def gathered_parameters(module: FSDPModule) -> Iterator[Gathered]:
    """The parameters that FSDP2 gathers for a module itself, in their order."""
    for group in _groups_of(module):
        in_parts = group.post_forward_mesh_info not in (None, group.mesh_info)
        for each in group.fsdp_params:
            info = each._module_info
            dtype = each.mp_policy.param_dtype or each.sharded_param.dtype
            yield Gathered(info.module, info.param_name, dtype, id(group), in_parts)
