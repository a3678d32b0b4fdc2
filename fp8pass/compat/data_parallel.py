"""Private APIs of FSDP2 and of `replicate`.

`fp8pass.compat` does not import this module, because some builds have no torch.distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._composable.replicate import DDP as Replicated
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.tensor import DTensor

from fp8pass.compat.attributes import Attribute, set_attributes

# PyTorch renamed this collective, and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def find_replicas(module: Replicated) -> Any:
    """Return the process group of a module that has not run yet."""
    arguments = replicate.state(cast(Any, module))._init_kwargs
    mesh = arguments.get("device_mesh")
    return arguments.get("process_group") or (mesh.get_group(0) if mesh else dist.group.WORLD)


def replicas_have_begun(module: Replicated) -> bool:
    """Whether a replicated module has run, and so accepts no gradient hooks."""
    return replicate.state(cast(Any, module)).has_initialized


def fsdp_has_run(module: FSDPModule) -> bool:
    """Whether a module has run. After that, FSDP2 does not change how it gathers parameters."""
    return module._get_fsdp_state()._is_root is not None


def get_shard(parameter: DTensor) -> Tensor:
    """Return the object on which FSDP2 looks up its extension methods, unlike `to_local()`."""
    return parameter._local_tensor


def find_factor(op: Any, ranks: int) -> float | None:
    """Return the factor that turns a sum over ranks into `op`: 1/8 for an average over 8 ranks.

    None for a maximum. FSDP2's `set_gradient_divide_factor` makes NCCL multiply terms by a factor.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / ranks
    if op != dist.ReduceOp.PREMUL_SUM:
        return None
    _, factor = op.__getstate__()  # only the pickled state has the factor
    return float(factor)


def reduce_separately(model: nn.Module) -> AbstractContextManager[None]:
    """Let FSDP2 reduce new gradients, but not those accumulated before, which return on exit."""
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _list_groups(m)]
    parameters = [p for group in groups for p in group.fsdp_params]
    hooks = [g._all_reduce_hook for g in groups if isinstance(g._all_reduce_hook, SumOfReplicas)]
    # A parameter has this attribute only after the first forward.
    unsharded = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
    changes: list[Attribute] = [
        *((g, "reduce_grads", True) for g in groups),
        *((g, "all_reduce_grads", True) for g in groups),
        *((g, "_partial_reduce_output", None) for g in groups),
        *((hook, "waiting", None) for hook in hooks),
        *((p, "unsharded_accumulated_grad", None) for p in parameters),
        # The sums of `replace_accumulation` stay where they are.
        *((p, "accumulate_unsharded_grad_if_needed", lambda: None) for p in parameters),
        *((x, "grad", None) for x in unsharded),
    ]
    return set_attributes(changes)


# Gets the number of a parameter, the gathered parameter, and whether FSDP2 reduces its gradient.
# Returns the gradient that FSDP2 reduces.
TakeGradient = Callable[[int, Tensor, bool], "Tensor | None"]


def replace_accumulation(module: FSDPModule, take: TakeGradient, numbers: Iterator[int]) -> None:
    """Call `take` after each backward, instead of adding up gradients that are not reduced."""
    for group in _list_groups(module):
        for each in group.fsdp_params:
            each.accumulate_unsharded_grad_if_needed = partial(
                _take_gradient, group, each, take, next(numbers)
            )


def _take_gradient(group: Any, parameter: Any, take: TakeGradient, number: int) -> None:
    gathered = getattr(parameter, "_unsharded_param", None)  # None before the first forward
    if gathered is not None:
        gathered.grad = take(number, gathered, group.reduce_grads)


# Replaces the gradients of parameters with these numbers of elements by their sum over the ranks of
# a group, times a factor.
AllReduce = Callable[[Tensor, tuple[int, ...], Any, float], None]


def replace_all_reduce(module: FSDPModule, all_reduce: AllReduce) -> None:
    """Call `all_reduce` instead of FSDP2's all-reduce between the replicas of HSDP or `replicate`.

    This hides the replicas from FSDP2, which then runs a hook after the reduce-scatter
    (`set_all_reduce_hook`), and no all-reduce.

    Raises:
        ValueError: the module has such a hook already.
    """
    for group in _list_groups(module):
        info = group.mesh_info
        if not isinstance(info, DDPMeshInfo) or info.replicate_process_group.size() == 1:
            continue
        if group._all_reduce_hook is not None:
            raise ValueError("set_all_reduce_hook was called")
        shards: Any = copy.copy(info)
        shards.__class__ = FSDPMeshInfo if isinstance(info, FSDPMeshInfo) else DataParallelMeshInfo
        if group.post_forward_mesh_info == info:
            group.post_forward_mesh_info = shards
        group.mesh_info = shards
        group._all_reduce_hook = SumOfReplicas(group, info.replicate_process_group, all_reduce)


class SumOfReplicas:
    """FSDP2's hook on reduce-scattered gradients, which adds them up over replicas."""

    def __init__(self, group: Any, replicas: Any, all_reduce: AllReduce) -> None:
        self.group, self.replicas, self.all_reduce = group, replicas, all_reduce
        # The sum of gradients under `set_requires_all_reduce(False)`, and the gradients' shapes.
        self.waiting: tuple[Tensor, list[torch.Size]] | None = None

    def __call__(self, gradients: Tensor) -> None:
        assert isinstance(gradients, GradientBuffer)
        terms = gradients.plain()
        if terms.is_cuda:  # FSDP2 frees this memory on another stream
            terms.record_stream(torch.cuda.current_stream(terms.device))
        if self.waiting is not None:
            earlier, shapes = self.waiting
            if shapes != gradients.shapes:
                raise RuntimeError(
                    "The backwards of one step gave gradients to different parameters, which "
                    "set_requires_all_reduce(False) does not support: let every backward reduce "
                    "its gradients, or use set_requires_gradient_sync(False)."
                )
            terms.add_(earlier)
            self.waiting = None
        if not self.group.all_reduce_grads:
            self.waiting = terms.clone(), gradients.shapes
            terms.zero_()
            return
        shards = getattr(self.group.mesh_info, "shard_mesh_size", 1)
        is_mean = self.group.gradient_divide_factor is None
        factor = 1 / self.replicas.size() if is_mean else 1.0
        self.all_reduce(terms, gradients.compute_sizes(shards), self.replicas, factor)


class GradientBuffer(Tensor):
    """A buffer to which FSDP2 copies gradients, or the part of their sum that this rank receives.

    FSDP2 passes only buffers to a custom reduce-scatter and to hooks. Parameters without a gradient
    have no shape and no memory in the buffer.
    """

    shapes: list[torch.Size]  # of whole gradients, in both cases

    @classmethod
    def empty(cls, *size: int, dtype: torch.dtype, device: torch.device) -> GradientBuffer:
        buffer = torch.empty(*size, dtype=dtype, device=device).as_subclass(cls)
        buffer.shapes = []
        return buffer

    def plain(self) -> Tensor:
        """View the memory as a plain tensor."""
        return self.as_subclass(Tensor)

    def compute_sizes(self, ranks: int) -> tuple[int, ...]:
        """Return the number of elements of each gradient that one rank receives."""
        sizes = tuple(-(-shape[0] // ranks) * shape[1:].numel() for shape in self.shapes)
        if self.numel() not in (sum(sizes), sum(sizes) * ranks):
            raise RuntimeError(
                "compress does not support the gradient buffers of this FSDP2 version. Send "
                "gradients in high precision: compress(model, gradients='none')."
            )
        return sizes

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if func in (Tensor.view, Tensor.div, Tensor.__truediv__):
            found = found.as_subclass(cls)
            found.shapes = args[0].shapes
        elif func is Tensor.copy_ and isinstance(args[1], cls):  # without shards
            args[0].shapes = args[1].shapes
        elif func is torch.ops.fsdp.chunk_cat:
            kwargs["out"].shapes[:] = [x.shape for x in args[0]]
        return found


def allow_writes_to_saved(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Allow in-place writes to gathered weights that autograd saved.

    FSDP2 gathers the weights again for the backward.
    """
    tracked = tuple(x for x in tensors if not x.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(tracked) if tracked else nullcontext()


def same_placements(like: DTensor, local: Tensor) -> DTensor:
    """Wrap the shard `local`, on any device."""
    return DTensor(local, like._spec, requires_grad=False)


@dataclass(frozen=True)
class GatheredParameter:
    # If several modules share the parameter, the first of them.
    module: nn.Module
    name: str
    dtype: torch.dtype  # of the gathered tensor
    group: int  # FSDP2 gathers parameters with the same number together
    resharded_to_fewer_ranks: bool  # whether `reshard_after_forward` is a number of ranks


def _list_groups(module: FSDPModule) -> Sequence[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions have at most one group
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return groups


def gathered_parameters(module: FSDPModule) -> Iterator[GatheredParameter]:
    """Yield the parameters of `module` itself, in FSDP2's order."""
    for group in _list_groups(module):
        fewer = group.post_forward_mesh_info not in (None, group.mesh_info)
        for each in group.fsdp_params:
            info = each._module_info
            dtype = each.mp_policy.param_dtype or each.sharded_param.dtype
            yield GatheredParameter(info.module, info.param_name, dtype, id(group), fewer)
