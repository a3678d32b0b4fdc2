"""The optimizer in the backward: each parameter is updated as soon as its gradient is final.

The gradient is freed before the next one is computed, so that gradients never take memory together.
Gradients of several backwards are accumulated in a buffer of 8 bits an element (AGoQ 5): decoded,
added in fp32, and encoded again in groups, rounded stochastically. Rounded to nearest, the sum
would lose gradients smaller than half the distance of two codes. The price of its mean being right
is noise that grows with every gradient: many are accumulated in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8pass.config import ConfigError
from fp8pass.optim import rounding
from fp8pass.optim.adamw import AdamW
from fp8pass.optim.groups import Stored, decode, encode
from fp8pass.optim.shards import like_parameter, local_gradient
from fp8pass.optim.slots import from_rows, to_rows
from fp8pass.optim.state_formats import StateFormat, moment_format
from fp8pass.optim.update import batch_size

GROUP_SIZE = 128
# The formats of sums: 8 bits for up to so many gradients, then 16.
FEW = 8
BUFFERS = ("e4m3", "e5m2", "de8", "fp16")


@dataclass
class Accumulated:
    """A sum of gradients, stored in groups, and the number of backwards that it sums."""

    format: StateFormat
    stored: Stored | None = None
    count: int = 0

    def add(self, gradient: Tensor) -> Tensor:
        """The sum including `gradient`, in fp32 rows."""
        rows = to_rows(gradient, GROUP_SIZE, torch.float32)
        if self.stored is not None:
            rows += decode(self.stored, self.format)
        self.count += 1
        return rows

    def keep(self, rows: Tensor, key: Tensor) -> None:
        """Store a sum, rounded by the random bits of `key`, int32 [1]."""
        key = rounding.key_of_sum(key, self.count)
        size = batch_size(rows.device) // GROUP_SIZE
        # In pieces: random bits and what else encoding needs would be larger than the sum.
        self.stored = _joined(
            [
                encode(piece, self.format, rounding.random_bits(key, _elements(piece, i * size)))
                for i, piece in enumerate(rows.split(size))
            ]
        )

    def clear(self) -> None:
        """Start a new sum."""
        self.stored, self.count = None, 0


def _elements(rows: Tensor, first: int) -> Tensor:
    """The positions of elements in a tensor, int64 [R, G], from row `first` on."""
    begin = first * GROUP_SIZE
    return torch.arange(begin, begin + rows.numel(), device=rows.device).view_as(rows)


def _joined(pieces: list[Stored]) -> Stored:
    """Pieces of a sum as one."""
    codes, *groups = zip(*pieces, strict=True)
    return Stored(torch.cat(codes), *(None if x[0] is None else torch.cat(x) for x in groups))


@dataclass(frozen=True, eq=False)
class Attached:
    """An optimizer that steps within the backward; `detach` ends that.

    Attributes:
        optimizer: the optimizer that steps.
        parameters: the parameters that it updates.
        accumulated: their sums of gradients, if it does not step in every backward.
    """

    optimizer: AdamW
    parameters: frozenset[Tensor]
    accumulated: dict[Tensor, Accumulated]
    _handles: list[RemovableHandle] = field(repr=False)

    def detach(self) -> None:
        """Leave gradients to `optimizer.step()` again; accumulated ones are dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.accumulated.clear()
        for attached in _ATTACHED.values():
            if self in attached:
                attached.remove(self)


# Keeps optimizers alive as long as a module that owns one of their parameters. Hooks cannot: the
# garbage collector does not see the objects that they hold, so that a parameter whose hook refers
# back to it would never be freed.
_ATTACHED: WeakKeyDictionary[nn.Module, list[Attached]] = WeakKeyDictionary()


def attach(
    model: nn.Module, optimizer: AdamW, *, accumulate: int = 1, buffer: str | None = None
) -> Attached:
    """Have `loss.backward()` update the parameters of `model`.

        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-4)
        fp8pass.optim.attach(model, optimizer)

    Learning rate schedules and checkpoints work as before, and `optimizer.step()` finds nothing to
    do. With FSDP2 a shard is updated as soon as its gradient has been reduced. Methods that need
    all gradients at once do not work: clipping by their common norm, and `torch.amp.GradScaler`.

    Args:
        model: the module to train. A parameter that it uses several times is updated once.
        optimizer: the optimizer of all parameters of `model` that are trained.
        accumulate: update in every n-th backward, by the sum of gradients since the last update.
        buffer: format of that sum: `e4m3`, `e5m2`, `de8`, or `fp16`, with two bytes an element. By
            default `e4m3` for the sum of up to 8 gradients, and `fp16` for that of more: each
            addition rounds the sum, and in 8 bits the errors of many become as large as it is.

    Raises:
        ConfigError: the optimizer is no `fp8pass.optim.AdamW` or lacks a parameter, parameters are
            attached already, the model's gradients are reduced over ranks, or an option has an
            invalid value.
    """
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ConfigError(f"accumulate must be a positive int, got {accumulate!r}.")
    if buffer is None:
        buffer = "e4m3" if accumulate <= FEW else "fp16"
    if buffer not in BUFFERS:
        raise ConfigError(f"buffer is one of {', '.join(map(repr, BUFFERS))}, got {buffer!r}.")
    format = moment_format(buffer, signed=True)
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"attach takes an fp8pass.optim.AdamW, got {type(optimizer).__name__}: make one of the "
            "same parameters."
        )
    _check_nothing_reduces_later(model)
    # Numbers instead of the groups, which loading a checkpoint replaces.
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if missing := [name for name, p in trained.items() if p not in groups]:
        raise ConfigError(
            f"The optimizer lacks parameters of the model: {', '.join(missing[:3])}. Give it "
            "model.parameters(), or switch their gradients off with requires_grad_(False)."
        )
    _check_nothing_is_attached(trained)
    accumulated: dict[Tensor, Accumulated] = {}
    if accumulate > 1:
        accumulated |= {p: Accumulated(format) for p in trained.values()}
    handles = []
    for parameter in trained.values():
        hook: Callable[..., None] = partial(_step, ref(optimizer), groups[parameter])
        if accumulate > 1:
            sum_ = accumulated[parameter]
            hook = partial(_accumulate, ref(optimizer), groups[parameter], sum_, accumulate)
        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    attached = Attached(optimizer, frozenset(trained.values()), accumulated, handles)
    for module in model.modules():
        if any(p in groups for p in module.parameters(recurse=False)):
            _ATTACHED.setdefault(module, []).append(attached)
    return attached


def _check_nothing_reduces_later(model: nn.Module) -> None:
    """Raise ConfigError if a module of `model` reduces gradients over ranks after the hooks."""
    kinds: list[Any] = [nn.parallel.DistributedDataParallel]
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        kinds.append(FullyShardedDataParallel)
    for module in model.modules():
        if isinstance(module, tuple(kinds)):
            raise ConfigError(
                f"{type(module).__name__} reduces gradients over ranks after each is final on its "
                "own, too late for a step in the backward: call optimizer.step() instead, or shard "
                "the model with fully_shard, which reduces before."
            )


def _check_nothing_is_attached(trained: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a backward updates some of these parameters already."""
    # A parameter is an element of a set by identity: equality would compare its numbers.
    already = {id(p) for each in _ATTACHED.values() for x in each for p in x.parameters}
    if names := [name for name, p in trained.items() if id(p) in already]:
        raise ConfigError(
            f"An optimizer is attached already to parameters of the model: {', '.join(names[:3])}. "
            "Call detach() of what that attach returned first."
        )


def _step(reference: ref[AdamW], group: int, parameter: Tensor) -> None:
    optimizer = _alive(reference)
    optimizer.update(optimizer.param_groups[group], [parameter])
    parameter.grad = None


@torch.no_grad()
def _accumulate(
    reference: ref[AdamW],
    group: int,
    accumulated: Accumulated,
    backwards: int,
    parameter: Tensor,
) -> None:
    gradient = local_gradient(parameter)
    rows = accumulated.add(gradient)
    if accumulated.count < backwards:
        optimizer = _alive(reference)
        accumulated.keep(rows, optimizer.key(optimizer.param_groups[group], parameter))
        parameter.grad = None
        return
    accumulated.clear()
    gradient.copy_(from_rows(rows, gradient.shape))
    parameter.grad = like_parameter(gradient, parameter)
    _step(reference, group, parameter)


def _alive(reference: ref[AdamW]) -> AdamW:
    optimizer = reference()
    if optimizer is None:
        raise RuntimeError(
            "A parameter outlived its module and the optimizer that was attached to it: keep the "
            "optimizer, or detach it first."
        )
    return optimizer
