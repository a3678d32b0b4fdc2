"""The optimizer in the backward: each parameter is updated as soon as its gradient is final.

The gradient is freed before the next one is computed, so that gradients never take memory together.
Those of several backwards are added up in `sums.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8pass import compat
from fp8pass.config import ConfigError
from fp8pass.optim.adamw import AdamW
from fp8pass.optim.endings import Endings
from fp8pass.optim.host import is_offloaded
from fp8pass.optim.microbatches import Microbatches
from fp8pass.optim.shards import like_parameter, local, local_gradient
from fp8pass.optim.state_formats import moment_format
from fp8pass.optim.sums import Accumulated

# The formats of sums: 8 bits for up to so many gradients, then 16.
FEW = 8
BUFFERS = ("e4m3", "e5m2", "de8", "fp16")


@dataclass(frozen=True, eq=False)
class Attached:
    """An optimizer that steps within the backward; `detach` ends that.

    Attributes:
        optimizer: the optimizer that steps.
        parameters: the parameters that it updates.
        accumulated: their sums of gradients, if it does not step in every backward.
    """

    optimizer: AdamW
    parameters: frozenset[Tensor] = field(repr=False)
    accumulated: dict[Tensor, Accumulated] = field(repr=False)
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
    do, but for sums of less than `accumulate` gradients: of parameters that not all backwards used,
    or at the end of an epoch. So call it behind the last backward of a step, or never. With FSDP2 a
    shard is updated as soon as its gradient has been reduced. Methods that need all gradients at
    once do not work: clipping by their common norm, and `torch.amp.GradScaler`.

    Layers may be frozen and unfrozen afterwards. A backward that finds a parameter to train that
    the optimizer lacks, or that was added to the model later, raises ConfigError before it updates
    anything; so does DistributedDataParallel around the model, before or after this call.

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
        buffer = default_buffer(accumulate)
    if buffer not in BUFFERS:
        raise ConfigError(f"buffer must be one of {', '.join(map(repr, BUFFERS))}, got {buffer!r}.")
    format = moment_format(buffer, signed=True)
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            "attach takes an fp8pass.optim.AdamW, got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: make one of the same "
            "parameters."
        )
    _check_nothing_reduces_later(model)
    if torch.distributed.is_available():
        _watch_wrappers()
    # Numbers instead of the groups, which loading a checkpoint replaces.
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if missing := [name for name, p in trained.items() if p not in groups]:
        raise ConfigError(
            f"The optimizer lacks parameters of the model: {', '.join(missing[:3])}. Give it "
            "model.parameters(), or switch their gradients off with requires_grad_(False)."
        )
    # Frozen ones, too: they may be unfrozen later.
    updated = {name: p for name, p in model.named_parameters() if p in groups}
    _check_nothing_is_attached(updated)
    accumulated: dict[Tensor, Accumulated] = {}
    if accumulate > 1:
        accumulated |= {p: optimizer.new_sum(groups[p], p, format) for p in updated.values()}
    # Hooks must not refer to the model or a parameter (see _ATTACHED).
    names, ids = frozenset(updated), frozenset(map(id, updated.values()))
    check = partial(_check_all_are_updated, ref(model), names, ids, _is_sharded(model))
    # The dict of sums has parameters as its keys, which hooks must not refer to.
    begin = partial(_begin, check, [(ref(p), x) for p, x in accumulated.items()])
    endings = Endings(ref(optimizer), begin, list(accumulated.values()))
    microbatches = Microbatches(ref(model))
    microbatches.find()
    # After fully_shard no hook runs: it replaces all parameters.
    handles = [
        optimizer.register_step_pre_hook(partial(_ignoring_arguments, check)),
        optimizer.register_step_pre_hook(partial(_ignoring_arguments, microbatches.divisor)),
        optimizer.register_step_pre_hook(_check_no_scaler),
    ]
    if accumulate > 1:
        finish = partial(_update_by_sums, groups, accumulated)
        # Behind the step: its closure may be the last backward of sums that are complete then.
        handles.append(optimizer.register_step_post_hook(finish))
    for parameter in updated.values():
        take: Callable[[AdamW, Tensor], bool] = partial(_step, groups[parameter])
        if accumulate > 1:
            take = partial(_accumulate, groups[parameter], accumulated[parameter], accumulate)
        # Dynamo would trace the hook where compiled autograd runs the backward.
        hook = torch.compiler.disable(partial(_take, endings, microbatches, take))
        handles.append(_add_hook(parameter, hook))
    attached = Attached(optimizer, frozenset(updated.values()), accumulated, handles)
    for module in model.modules():
        if any(p in groups for p in module.parameters(recurse=False)):
            _ATTACHED.setdefault(module, []).append(attached)
    return attached


def steps_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is attached, so that its `step()` finds no gradients."""
    return any(x.optimizer is optimizer for found in _ATTACHED.values() for x in found)


def default_buffer(accumulate: int) -> str:
    """The format of the sum of so many gradients."""
    return "e4m3" if accumulate <= FEW else "fp16"


@cache
def _wrappers() -> tuple[type, ...]:
    """The modules that reduce gradients over ranks after the hooks of parameters have run."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from fp8pass.compat.data_parallel import Replicated

    return nn.parallel.DistributedDataParallel, FullyShardedDataParallel, Replicated


def _check_nothing_reduces_later(model: nn.Module) -> None:
    """Raise ConfigError if a wrapper in, of or around `model` reduces some of its gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for module in model.modules():
        if isinstance(module, _wrappers()):
            raise _reduces_later(module)
    # No module refers to a wrapper around it.
    of_model = {id(p) for p in model.parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), _wrappers()) and _has_some(found.parameters(), of_model):
            raise _reduces_later(found)


@cache
def _watch_wrappers() -> None:
    """Have wrappers that are made from now on refuse a model that an optimizer is attached to.

    `replicate` makes its DistributedDataParallel in the first forward.
    """
    nn.modules.module.register_module_module_registration_hook(_check_wrapped)


def _check_wrapped(wrapper: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    """Raise ConfigError if a wrapper is given modules or parameters of an attached optimizer."""
    if torch.compiler.is_compiling():  # Dynamo would guard on the attached modules
        return
    if not _ATTACHED or wrapped is None or not isinstance(wrapper, _wrappers()):
        return
    attached = {id(p) for each in _ATTACHED.values() for x in each for p in x.parameters}
    # FullyShardedDataParallel has already replaced the parameters of the modules.
    replaced = any(_ATTACHED.get(module) for module in wrapped.modules())
    if replaced or _has_some(wrapped.parameters(), attached):
        raise _reduces_later(wrapper)


def _check_no_scaler(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise ConfigError if a GradScaler steps: the backward has updated by scaled gradients."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            "torch.amp.GradScaler cannot unscale gradients that attach has used in the backward: "
            "train in BF16 without a GradScaler, or call optimizer.step() instead of attach."
        )


def _has_some(parameters: Iterable[Tensor], ids: set[int]) -> bool:
    return any(id(p) in ids for p in parameters)


def _reduces_later(wrapper: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(wrapper).__name__} reduces gradients over ranks after each is final on its own, "
        "too late for a step in the backward: call optimizer.step() instead of attach, or shard "
        "the model with fully_shard, which reduces before."
    )


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards some of a model."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _ignoring_arguments(call: Callable[[], object], *_: Any) -> None:
    call()


def _check_all_are_updated(
    reference: ref[nn.Module], names: frozenset[str], ids: frozenset[int], sharded: bool
) -> int:
    """Raise ConfigError if a parameter to train has no hook; returns how many there are to train.

    In a backward FSDP2 has other tensors in place of its parameters, with the same names. `sharded`
    is whether FSDP2 sharded the model before the optimizer was attached.
    """
    model = reference()
    if model is None:
        return 0
    if not sharded and _is_sharded(model):
        raise ConfigError(
            "fully_shard has replaced parameters to which an optimizer was attached: apply it "
            "before the optimizer is made."
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if missing := [name for name, p in trained if name not in names and id(p) not in ids]:
        raise ConfigError(
            f"Parameters of the model have gradients that no update takes: {', '.join(missing[:3])}"
            ". Call detach(), give the optimizer these parameters with add_param_group, and attach "
            "again; or switch their gradients off with requires_grad_(False)."
        )
    return len(trained)


def _add_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a hook for gradients of a parameter, which may be frozen: PyTorch refuses that."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(trained)


def _check_nothing_is_attached(trained: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a backward updates some of these parameters already."""
    # A parameter is an element of a set by identity: equality would compare its numbers.
    already = {id(p) for each in _ATTACHED.values() for x in each for p in x.parameters}
    if names := [name for name, p in trained.items() if id(p) in already]:
        raise ConfigError(
            f"An optimizer is attached already to parameters of the model: {', '.join(names[:3])}. "
            "Call detach() of what that attach returned first."
        )


def _begin(check: Callable[[], int], sums: Sequence[tuple[ref[Tensor], Accumulated]]) -> int:
    """Check a backward that begins, and drop the sums of layers that were frozen before it."""
    if compat.compiles_backward():
        raise ConfigError(
            "Compiled autograd does not report the end of a backward, in which attach updates. "
            "Switch torch._dynamo.config.compiled_autograd off, or call optimizer.step() instead "
            "of attach."
        )
    for reference, sum_ in sums:
        parameter = reference()
        if sum_.count and parameter is not None and not parameter.requires_grad:
            sum_.clear()
    return check()


def _take(
    endings: Endings,
    microbatches: Microbatches,
    take: Callable[[AdamW, Tensor], bool],
    parameter: Tensor,
) -> None:
    """Take a final gradient, which is gone even if that fails: the next would be added to it."""
    optimizer = _alive(endings.optimizer)
    try:
        backward = endings.note()
        divisor = microbatches.divisor()
        if divisor != 1:
            with torch.no_grad():
                parameter.grad.div_(divisor)  # type: ignore[union-attr]
        backward.updates += take(optimizer, parameter)
        if not backward.ends:
            optimizer.join()
    finally:
        parameter.grad = None


def _step(group: int, optimizer: AdamW, parameter: Tensor) -> bool:
    """Update a parameter by its gradient; returns that it did."""
    optimizer.update(optimizer.param_groups[group], [parameter])
    return True


@torch.no_grad()
def _accumulate(
    group: int, accumulated: Accumulated, backwards: int, optimizer: AdamW, parameter: Tensor
) -> bool:
    """Add a gradient to its sum, and update by the sum if it is complete; returns whether it is."""
    options = optimizer.param_groups[group]
    gradient = local_gradient(parameter).contiguous()
    if accumulated.count + 1 < backwards:
        # With states get_state_dict of DCP takes no step to make some, which would use up the sum.
        optimizer.make_state(options, parameter)
        accumulated.add(gradient, options["seed"], optimizer.step_of(parameter))
        return False
    _update_by_sum(group, accumulated, optimizer, parameter, gradient)
    return True


def _update_by_sum(
    group: int, accumulated: Accumulated, optimizer: AdamW, parameter: Tensor, gradient: Tensor
) -> None:
    """Update a parameter by its last gradient and the sum of those before."""
    accumulated.move_to(gradient)
    if not is_offloaded(optimizer.param_groups[group], "states", parameter):
        optimizer.join()
    parameter.grad = like_parameter(gradient, parameter)
    _step(group, optimizer, parameter)


@torch.no_grad()
def _update_by_sums(
    groups: Mapping[Tensor, int], sums: Mapping[Tensor, Accumulated], optimizer: AdamW, *_: Any
) -> None:
    """Update by sums that are not complete: no other gradients of this step will come."""
    for parameter, sum_ in sums.items():
        if not parameter.requires_grad:  # frozen in the middle of a step
            sum_.clear()
    pending = [parameter for parameter, sum_ in sums.items() if sum_.count]
    try:
        for parameter in pending:
            shape = local(parameter).shape
            nothing = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            _update_by_sum(groups[parameter], sums[parameter], optimizer, parameter, nothing)
    finally:
        for parameter in pending:
            parameter.grad = None
        if pending:
            optimizer.join()


def _alive(reference: ref[AdamW]) -> AdamW:
    optimizer = reference()
    if optimizer is None:
        raise RuntimeError(
            "A parameter outlived its module and the optimizer that was attached to it: keep the "
            "optimizer, or detach it first."
        )
    return optimizer
