"""Quantized sums of the gradients that DDP and FSDP2 do not reduce yet.

Under `no_sync()` (DDP) and `set_requires_gradient_sync(False)` (FSDP2), PyTorch adds up whole
gradients on each rank. `LocalSums` stores quantized sums instead. It adds the sum of a parameter to
the parameter's gradient in the next backward that reduces gradients (section 5 of the paper AGoQ).
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fp8pass import compat
from fp8pass.compat.data_parallel import replace_accumulation
from fp8pass.optim.shards import local
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.sums import GradientSum


class LocalSums:
    """The sums of a model's gradients on this rank. Each parameter has a number."""

    def __init__(self, format: StateFormat) -> None:
        self.format = format
        self._next = count()
        # The numbers of DDP's parameters. Hooks of the parameters refer to this object, so the
        # object must not have strong references to the parameters.
        self._numbers = compat.WeakIdKeyDictionary()
        self._sums: dict[int, GradientSum] = {}  # by the number of the parameter
        # Number of reductions so far, fp32 [], for the random bits of stochastic rounding.
        self._reductions: dict[torch.device, Tensor] = {}
        self._moved: set[int] = set()  # numbers of the parameters in the current reduction

    def watch_fsdp(self, module: FSDPModule) -> None:
        """Take the gradients of a module's own parameters, before FSDP2 accumulates them."""
        replace_accumulation(module, self._take, self._next)

    def watch_ddp(self, module: DistributedDataParallel) -> None:
        """Take the gradients of backwards under `no_sync()`."""
        # The garbage collector does not see references of hooks, so they must not form a cycle.
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._numbers[parameter] = next(self._next)
                hook = partial(_take_unreduced, ref(module), self)
                parameter.register_post_accumulate_grad_hook(torch.compiler.disable(hook))

    def add(self, number: int, gradient: Tensor) -> None:
        dense = local(gradient).contiguous()
        if dense.device not in self._reductions:
            self._reductions[dense.device] = torch.zeros((), device=dense.device)
        if number not in self._sums:
            self._sums[number] = GradientSum(self.format, number=number)
        self._sums[number].add(dense, seed=0, step=self._reductions[dense.device])

    def move_to(self, number: int, gradient: Tensor) -> None:
        """Add the sum of a parameter to its gradient in place, and start a new sum."""
        found = self._sums.get(number)
        if found is None or not found.count:
            return
        if not self._moved or number in self._moved:
            self._moved.clear()
            for reductions in self._reductions.values():
                reductions.add_(1)
        self._moved.add(number)
        shard = local(gradient)
        dense = shard.contiguous()
        found.move_to(dense)
        if dense is not shard:
            shard.copy_(dense)

    def add_to_bucket(self, bucket: Any) -> None:
        """Add the sums of the parameters in a bucket of DDP to their gradients."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # Tools disable the hooks during their backwards, which must not change the sums.
            if parameter in self._numbers and compat.runs_gradient_hooks(parameter):
                # The memory of `gradient` has the parameter's layout, but its strides are
                # contiguous.
                placed = gradient.as_strided(parameter.size(), parameter.stride())
                self.move_to(self._numbers[parameter], placed)

    def take(self, parameter: Tensor) -> None:
        """Add the gradient of a parameter of DDP to its sum, and drop the gradient."""
        assert parameter.grad is not None
        self.add(self._numbers[parameter], parameter.grad)
        parameter.grad = None

    def drop(self) -> None:
        """Drop all sums, for example after a micro-batch that must not count."""
        self._sums.clear()

    @torch.no_grad()
    def _take(self, number: int, parameter: Tensor, reduces: bool) -> Tensor | None:
        """Return the gradient that FSDP2 should reduce, or None if it should reduce nothing."""
        gradient = parameter.grad
        if not reduces:
            if gradient is not None:
                self.add(number, gradient)
            return None
        if number not in self._sums or not self._sums[number].count:
            return gradient
        gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
        self.move_to(number, gradient)
        return gradient


@torch.no_grad()
def _take_unreduced(
    module: ref[DistributedDataParallel], sums: LocalSums, parameter: Tensor
) -> None:
    wrapper = module()
    if wrapper is not None and not wrapper.require_backward_grad_sync:
        sums.take(parameter)
