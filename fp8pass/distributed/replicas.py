"""Data parallelism without a wrapper: one 8-bit reduction of the sums of several micro-batches.

`step_in_backward(accumulate=N, max_norm=...)` adds the gradients of N micro-batches to quantized
sums. `average_sums` averages these sums over ranks, once for each update (section 5 of the paper
AGoQ). DistributedDataParallel would reduce only the gradient of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from fp8pass.distributed.gradient_sums import GradientSums, Traffic
from fp8pass.optim.backward import Attached
from fp8pass.option_checks import ConfigError
from fp8pass.weights.quantized_parameter import QuantizedWeight


class Replicas:
    """The ranks of a group that have copies of a model.

    Attributes:
        traffic: sent bytes; `traffic.ratio` is relative to BF16.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.traffic = group, Traffic()
        self._sums = GradientSums(self.traffic)

    def average(self, flat: Tensor, sizes: tuple[int, ...]) -> None:
        """Replace `flat` [N] by its average over ranks.

        `flat` contains the gradients of several parameters, which have `sizes` elements.
        """
        self._sums.all_reduce(flat, sizes, self.group, 1 / self.group.size())

    def any(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        found = torch.tensor(flags, dtype=torch.int32, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return [bool(x) for x in found.tolist()]


def average_sums(attached: Attached, group: Any = None) -> Replicas:
    """Average the sums of gradients over ranks before each update.

        attached = fp8pass.optim.step_in_backward(model, optimizer, accumulate=16, max_norm=1.0)
        fp8pass.distributed.average_sums(attached)

    Call it on all ranks. Each rank has a whole copy of the model, without DistributedDataParallel.
    The optimizers' parameters and the model's buffers are copied from the first rank of the group.
    All ranks must run the same number of backwards. Gradients are sent in E4M3 with a scale for
    each group of 128.

    Args:
        attached: the object that `step_in_backward` returned.
        group: process group; by default all ranks.

    Raises:
        ConfigError: `step_in_backward` was called without `max_norm` (`math.inf` does not clip), or
            a parameter is a DTensor or in host memory.
    """
    if attached.max_norm is None:
        raise ConfigError(
            "average_sums needs the sums of the gradients of all parameters at the end of a "
            "backward. So pass max_norm to step_in_backward; max_norm=math.inf does not clip."
        )
    if any(isinstance(p, (DTensor, QuantizedWeight)) for p in attached.owners):
        raise ConfigError(
            "average_sums supports plain parameters only. FSDP2 and tensor parallelism reduce "
            "gradients themselves, and offload_weights is not supported."
        )
    found = Replicas(dist.group.WORLD if group is None else group)
    with torch.no_grad():
        for x in (*attached.owners, *attached.buffers()):
            dist.broadcast(x, group=found.group, group_src=0)
    attached.replicas = found
    return found
