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
    """Return the process group of the replicas of a module that has not run yet."""
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
    """Return the tensor on which FSDP2 looks up its extensions. `to_local()` may not return it."""
    return parameter._local_tensor


def use_new_shards(model: nn.Module) -> None:
    """Let FSDP2 use parameters that were assigned to modules, and free the shards of earlier ones.

    FSDP2 looks for new parameters itself, but before that it reads the addresses of their memory,
    which quantized weights do not have.
    """
    for module in model.modules():
        for group in _list_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                new = getattr(each._module_info.module, each._module_info.param_name)
                if new is not each.sharded_param:
                    each.sharded_param, each._sharded_param_data = new, get_shard(new)


def find_factor(op: Any, ranks: int) -> float | None:
    """Return the factor that turns a sum over ranks into `op`: 1/8 for an average over 8 ranks.

    Return None if there is no such factor, as for a maximum. FSDP2's `set_gradient_divide_factor`
    makes NCCL multiply terms by a factor.
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
    """Let FSDP2 reduce new gradients without adding the gradients that it has accumulated.

    On exit, the accumulated gradients are restored.
    """
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _list_groups(m)]
    parameters = [p for group in groups for p in group.fsdp_params]
    # A parameter has this attribute only after the first forward.
    unsharded = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
    changes: list[Attribute] = [
        *((g, "reduce_grads", True) for g in groups),
        *((g, "all_reduce_grads", True) for g in groups),
        *((g, "_partial_reduce_output", None) for g in groups),
        *((p, "unsharded_accumulated_grad", None) for p in parameters),
        # The sums of `replace_accumulation` stay where they are.
        *((p, "accumulate_unsharded_grad_if_needed", lambda: None) for p in parameters),
        *((x, "grad", None) for x in unsharded),
    ]
    return set_attributes(changes)


# A function of the index of a parameter, the gathered parameter, and whether FSDP2 reduces its
# gradient. It returns the gradient that FSDP2 reduces.
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


# Gets a buffer of gradients, the number of elements of each gradient, a process group and a factor.
# Replaces the gradients by their sum over the ranks of the group, times the factor.
AllReduce = Callable[[Tensor, tuple[int, ...], Any, float], None]


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Whether a function runs after FSDP2's all-reduce between replicas."""
    return any(group._all_reduce_hook for group in _groups_with_replicas(module))


def replace_all_reduce(module: FSDPModule, all_reduce: AllReduce) -> None:
    """Call `all_reduce` instead of FSDP2's all-reduce between the replicas of HSDP or `replicate`.

    Without replicas, FSDP2 runs a hook after the reduce-scatter (`set_all_reduce_hook`). So the
    replicas are hidden while FSDP2 reduces gradients.
    """
    for group in _groups_with_replicas(module):
        hook = SumOfReplicas(group, all_reduce)
        group._all_reduce_hook = hook
        group.post_backward = partial(_reduce_with, hook, group.post_backward)


def _groups_with_replicas(module: FSDPModule) -> list[Any]:
    groups = [g for g in _list_groups(module) if isinstance(g.mesh_info, DDPMeshInfo)]
    return [g for g in groups if g.mesh_info.replicate_process_group.size() > 1]


def _reduce_with(hook: SumOfReplicas, post_backward: Callable[..., None], *args: Any) -> None:
    if hook.group._all_reduce_hook is not hook:
        raise RuntimeError(
            "set_all_reduce_hook has replaced the reduction of compress. Remove the call, or pass "
            "gradients='none' to compress."
        )
    hide = [(hook.group, "mesh_info", hook.shards)] if hook.group.all_reduce_grads else []
    with set_attributes(hide):
        post_backward(*args)


class SumOfReplicas:
    """A hook on FSDP2's reduce-scattered gradients, which sums the gradients over replicas."""

    def __init__(self, group: Any, all_reduce: AllReduce) -> None:
        self.group, self.all_reduce = group, all_reduce
        self.replicas = group.mesh_info.replicate_process_group
        is_sharded = isinstance(group.mesh_info, FSDPMeshInfo)
        self.shards: Any = copy.copy(group.mesh_info)
        self.shards.__class__ = FSDPMeshInfo if is_sharded else DataParallelMeshInfo

    def __call__(self, gradients: Tensor) -> None:
        assert isinstance(gradients, GradientBuffer)
        terms, earlier = gradients.plain(), self.group._partial_reduce_output
        for x in (terms, earlier):  # FSDP2 allocated and frees `x` on another stream
            if x is not None and x.is_cuda:
                x.record_stream(torch.cuda.current_stream(x.device))
        if earlier is not None:  # the sums of backwards under `set_requires_all_reduce(False)`
            if terms.dtype is torch.float16:  # FSDP2 has divided `earlier` by another factor
                raise RuntimeError(
                    "compress does not support set_requires_all_reduce(False) with gradients in "
                    "FP16. Use MixedPrecisionPolicy(reduce_dtype=torch.float32), or "
                    "set_requires_gradient_sync(False) instead."
                )
            terms.add_(earlier)
        sizes = gradients.compute_sizes(getattr(self.shards, "shard_mesh_size", 1))
        is_mean = self.group.gradient_divide_factor is None
        self.all_reduce(terms, sizes, self.replicas, 1 / self.replicas.size() if is_mean else 1.0)


class GradientBuffer(Tensor):
    """A buffer to which FSDP2 copies gradients, or the part of their sum that this rank receives.

    FSDP2 passes only buffers to a custom reduce-scatter and to hooks. Parameters without a gradient
    have no shape and no memory in the buffer.
    """

    shapes: list[torch.Size]  # shapes of whole gradients, also in the part of a rank

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

    The writes are safe, because FSDP2 gathers the weights again for the backward.
    """
    tracked = tuple(x for x in tensors if not x.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(tracked) if tracked else nullcontext()


def same_placements(like: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the placements of `like` and the shard `local`, on any device."""
    # `copy.deepcopy` fails for a DTensor that was made of a tensor with a storage offset.
    first = local.as_strided(local.shape, local.stride(), 0) if local.storage_offset() else local
    found = DTensor(first, like._spec, requires_grad=False)
    found._local_tensor = local
    return found


@dataclass(frozen=True)
class GatheredParameter:
    # The module that has the parameter, or the first module if several modules share it.
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
