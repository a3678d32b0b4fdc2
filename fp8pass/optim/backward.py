"""`step_in_backward`: optimizers that update each parameter within the backward.

A parameter is updated as soon as its gradient is final, and the gradient is freed before the next
gradient is computed. `sums.py` adds the gradients of several backwards. With `max_norm`, every
gradient is added to a sum, and all sums are clipped and applied at the end of the last backward.

If a backward fails, some parameters have been updated already, and some sums lack the gradient of
this backward. So all sums are dropped.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8pass import compat
from fp8pass.optim.offload import is_offloaded
from fp8pass.optim.optimizer import Optimizer
from fp8pass.optim.shards import is_distributed, like_parameter, local_gradient, zeros_like_shard
from fp8pass.optim.state_formats import moment_format
from fp8pass.optim.sums import GradientSum, norm_of_sums, split_into_buckets
from fp8pass.optim.update import Group
from fp8pass.option_checks import ConfigError, is_whole

log = logging.getLogger("fp8pass")

# Sums of more gradients than this number are in FP16 by default.
FEW_GRADIENTS = 8
BUFFERS = ("e4m3", "e5m2", "de8", "fp16")
# Returned by `compat.running_backward` outside of a backward. FSDP2 reduces the gradients of a
# pipeline stage outside of autograd, where PyTorch does not report the end of a backward.
NO_BACKWARD = -1
# Kinds of pipeline actions that compute gradients of inputs only (I), or of weights only (W). In
# these actions, PyTorch does not call the hooks of parameters.
IN_TWO_PARTS = {"I", "W"}


@dataclass
class Backward:
    """Counts of a running backward."""

    parameters: int  # trainable parameters
    gradients: int = 0  # final gradients
    updates: int = 0  # updated parameters; the other final gradients were added to sums


@dataclass(eq=False, repr=False)
class Attached:
    """Optimizers that step within the backward, until `detach` is called.

    Hooks of parameters have weak references to this object. The garbage collector does not see the
    references of hooks. So it would never free a parameter with a hook that refers to the
    parameter.
    """

    optimizers: tuple[Optimizer, ...]
    # The optimizer of each parameter, and the index of the parameter's group. Groups are found by
    # index, because loading a checkpoint replaces the dicts of the groups.
    owners: dict[Tensor, tuple[Optimizer, int]]
    accumulate: int  # backwards between two updates
    # The sum of each parameter's gradients; {} if the optimizers step in every backward.
    accumulated: dict[Tensor, GradientSum]
    max_norm: float | None
    _model: ref[nn.Module]
    _names: frozenset[str]  # of parameters that have hooks
    _sharded: bool  # whether FSDP2 had sharded the model before the optimizer was attached
    _handles: list[RemovableHandle] = field(default_factory=list)
    _running: dict[int, Backward] = field(default_factory=dict)
    _schedule: ref[Any] | None = None
    _schedules: int = -1  # result of `count_schedules()` in the last call of `find_schedule`
    _backwards: int = 0  # completed since the last clipped update
    _added: Any = None  # the event after the last addition to a sum on a GPU
    # The norm of all gradients before clipping, fp32 []; None before the first clipped update.
    norm: Tensor | None = None
    # Ranks with copies of the model; set by `fp8pass.distributed.average_sums`.
    replicas: Any = None

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers of the model."""
        model = self._model()
        return () if model is None else tuple(model.buffers())

    def detach(self) -> None:
        """Remove the hooks, and drop accumulated gradients.

        Then `optimizer.step()` updates the parameters again.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.accumulated.clear()
        for attached in _ATTACHED.values():
            if self in attached:
                attached.remove(self)
        for optimizer in self.optimizers:
            optimizer.takes_scaled_gradients = steps_in_backward(optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise ConfigError if a GradScaler is used, or if a trainable parameter has no hook.

        The parameters that `fully_shard` creates have no hooks.
        """
        self._count_trained()
        self._gradient_divisor()
        if hasattr(optimizer, "found_inf"):
            # GradScaler deletes these attributes after a step only.
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            raise ConfigError(
                "torch.amp.GradScaler unscales gradients after the backward, but step_in_backward "
                "has used them by then. Train in BF16 without a GradScaler, or call "
                "optimizer.step() instead of step_in_backward."
            )

    def take_gradient(self, parameter: Tensor) -> None:
        """Update the parameter with its final gradient, or add the gradient to the parameter's sum.

        Then drop the gradient, even after an error, because autograd would add the next gradient to
        the old one.
        """
        try:
            number = compat.running_backward()
            backward = self._running.get(number)
            if backward is None:
                backward = Backward(self._begin())
                if number != NO_BACKWARD:
                    self._running[number] = backward
                    compat.after_backward(partial(self._end, number), partial(self._fail, number))
            backward.gradients += 1
            divisor = self._gradient_divisor()
            if divisor != 1:
                with torch.no_grad():
                    parameter.grad.div_(divisor)  # type: ignore[union-attr]
            backward.updates += self._update_or_add(parameter)
            if number == NO_BACKWARD:
                self.owners[parameter][0].join()
        finally:
            parameter.grad = None

    @torch.no_grad()
    def _update_or_add(self, parameter: Tensor) -> bool:
        """Update the parameter, or add its gradient to its sum if the update comes later.

        Return whether the parameter was updated.
        """
        sum_ = self.accumulated.get(parameter)
        if sum_ is None:
            optimizer, group = self._owner_of(parameter)
            optimizer.update(group, [parameter])
            return True
        gradient = local_gradient(parameter).contiguous()
        if self.max_norm is not None or sum_.count + 1 < self.accumulate:
            self._add(parameter, gradient)
            if gradient.is_cuda:  # FSDP2 reduces gradients on a stream of its own
                self._added = torch.cuda.current_stream(gradient.device).record_event()
            return False
        self._update_by_sum(parameter, gradient)
        return True

    def _owner_of(self, parameter: Tensor) -> tuple[Optimizer, Group]:
        optimizer, index = self.owners[parameter]
        return optimizer, optimizer.param_groups[index]

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient to the parameter's sum."""
        optimizer, group = self._owner_of(parameter)
        # get_state_dict of torch.distributed.checkpoint would run a step to create missing states,
        # and this step would use up the sum. So `count_updates` creates the states here.
        step = optimizer.count_updates(group, parameter)
        self.accumulated[parameter].add(gradient, group["seed"], step)

    def _update_by_sum(self, parameter: Tensor, gradient: Tensor | None = None) -> None:
        """Update the parameter with its sum, plus the last gradient if `gradient` is given."""
        optimizer, group = self._owner_of(parameter)
        gradient = zeros_like_shard(parameter) if gradient is None else gradient
        self.accumulated[parameter].move_to(gradient)
        if not is_offloaded(group, "states", parameter):
            optimizer.join()
        parameter.grad = like_parameter(gradient, parameter)
        optimizer.update(group, [parameter])

    @torch.no_grad()
    def finish_sums(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After `optimizer.step()`, apply the sums that are incomplete."""
        assert isinstance(optimizer, Optimizer)
        self._drop_sums_of_frozen()
        if self.max_norm is not None:
            self._clip_and_update(self.max_norm)
            return
        sums = self.accumulated.items()
        pending = [p for p, sum_ in sums if sum_.count and self.owners[p][0] is optimizer]
        try:
            for parameter in pending:
                self._update_by_sum(parameter)
        finally:
            for parameter in pending:
                parameter.grad = None
            if pending:
                optimizer.join()

    @torch.no_grad()
    def _clip_and_update(self, max_norm: float) -> None:
        """Update all parameters with their sums, scaled to a global norm of at most `max_norm`."""
        self._backwards = 0
        pending = [p for p, sum_ in self.accumulated.items() if p.requires_grad]
        if not pending:
            return
        if self._added is not None:
            torch.cuda.current_stream(pending[0].device).wait_event(self._added)
        if self.replicas is not None:
            self._average(pending)
        if not any(self.accumulated[p].count for p in pending):
            return
        self.norm = norm_of_sums(self.accumulated, pending)
        # A norm that is not finite makes the weights NaN, as with `clip_grad_norm_`.
        scale = (self.norm / max_norm).clamp(min=1)
        try:
            for optimizer in self.optimizers:
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
            for parameter in pending:
                if self.accumulated[parameter].count:
                    self._update_by_sum(parameter)
                parameter.grad = None
        finally:
            for optimizer in self.optimizers:
                del optimizer.grad_scale  # type: ignore[attr-defined]
                optimizer.join()

    def _average(self, parameters: list[Tensor]) -> None:
        """Replace sums by their averages over replicas, in buckets."""
        counts = [self.accumulated[p].count > 0 for p in parameters]
        used = self.replicas.any(counts, parameters[0].device)
        for bucket in split_into_buckets(compress(parameters, used)):
            gradients = [zeros_like_shard(p).view(-1) for p in bucket]
            for parameter, gradient in zip(bucket, gradients, strict=True):
                self.accumulated[parameter].move_to(gradient)
            sizes = tuple(map(len, gradients))
            averages = torch.cat(gradients)
            self.replicas.average(averages, sizes)
            for parameter, average in zip(bucket, averages.split(sizes), strict=True):
                self._add(parameter, average)

    def _begin(self) -> int:
        """Check a new backward, drop sums of frozen layers, and count trainable parameters."""
        if compat.compiles_backward():
            raise ConfigError(
                "step_in_backward does not support compiled autograd. Set "
                "torch._dynamo.config.compiled_autograd = False, or call optimizer.step() instead "
                "of step_in_backward."
            )
        self._drop_sums_of_frozen()
        return self._count_trained()

    def _drop_sums_of_frozen(self) -> None:
        for parameter, sum_ in self.accumulated.items():
            if sum_.count and not parameter.requires_grad:
                sum_.clear()

    def _end(self, number: int) -> None:
        updates = self._running.pop(number).updates
        self._backwards += 1
        if self.max_norm is not None and self._backwards == self.accumulate:
            self._clip_and_update(self.max_norm)
        for optimizer in self.optimizers:
            if updates:  # the next computation uses the new weights
                optimizer.join()
            else:  # only the next addition reads the sums
                optimizer.release()

    def _fail(self, number: int) -> None:
        backward = self._running.pop(number)
        for optimizer in self.optimizers:
            optimizer.abandon()
        for sum_ in self.accumulated.values():
            sum_.clear()
        self._backwards = 0
        log.warning(
            "A backward failed after %d of %d gradients and updated only %d parameters. Training "
            "can continue; to undo these updates, load a checkpoint.%s",
            *(backward.gradients, backward.parameters, backward.updates),
            " All accumulated gradients were dropped." if self.accumulated else "",
        )

    def _count_trained(self) -> int:
        """Count the trainable parameters. Raise ConfigError if one of them has no hook."""
        model = self._model()
        if model is None:
            return 0
        if not self._sharded and _is_sharded(model):
            raise ConfigError(
                "fully_shard has replaced parameters that step_in_backward updates. Apply "
                "fully_shard before the optimizer is created."
            )
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # During a backward FSDP2 replaces parameters by tensors with the same names.
        known, owned = self._names, self.owners
        if missing := [name for name, p in trained if name not in known and p not in owned]:
            raise ConfigError(
                "The attached optimizer does not update these parameters: "
                f"{', '.join(missing[:3])}. Call detach(), add the parameters with "
                "add_param_group, and call step_in_backward again; or freeze the parameters with "
                "requires_grad_(False)."
            )
        return len(trained)

    def find_schedule(self) -> None:
        """Find the model's pipeline schedule. Raise ConfigError if it is not supported."""
        self._schedules = compat.count_schedules()
        model = self._model()
        schedule = None if model is None else compat.find_schedule(model)
        if schedule is None:
            return
        rows = compat.pipeline_actions(schedule)
        if any(action.kind in IN_TWO_PARTS for row in rows for action in row):
            raise ConfigError(
                f"{type(schedule).__name__} computes the gradients of weights separately from the "
                "gradients of inputs, so PyTorch does not call the hooks that step_in_backward "
                "needs. Use another schedule, such as 1F1B or Interleaved1F1B, or call "
                "optimizer.step() instead of step_in_backward."
            )
        if self.max_norm is not None:
            raise ConfigError(
                "step_in_backward cannot clip gradients in a pipeline, because each rank has only "
                "the gradients of its own stages. Leave out max_norm, or call optimizer.step() "
                "instead of step_in_backward."
            )
        self._schedule = ref(schedule)

    def _gradient_divisor(self) -> int:
        """Return the number by which the pipeline schedule divides gradients; 1 without a schedule.

        PyTorch's schedules divide gradients after the last micro-batch, which is too late for
        updates within the backward.
        """
        if self._schedules != compat.count_schedules():
            self.find_schedule()
        schedule = self._schedule() if self._schedule else None
        return 1 if schedule is None else compat.gradient_divisor(schedule)


# The attached optimizers of each module that owns parameters. This dict keeps the optimizers alive
# as long as the modules.
_ATTACHED: WeakKeyDictionary[nn.Module, list[Attached]] = WeakKeyDictionary()


def step_in_backward(
    model: nn.Module,
    *optimizers: Optimizer,
    accumulate: int = 1,
    buffer: str | None = None,
    max_norm: float | None = None,
) -> Attached:
    """Make `loss.backward()` update the parameters of `model`.

        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-4)
        fp8pass.optim.step_in_backward(model, optimizer)

    If Muon trains the matrices, pass both Muon and AdamW. Learning rate schedules and checkpoints
    work as before, and layers may be frozen and unfrozen. `optimizer.step()` only applies
    incomplete sums, which contain fewer than `accumulate` gradients. A backward raises ConfigError
    before any update if the optimizers lack a trainable parameter. Methods that need all gradients
    at once do not work, such as `torch.amp.GradScaler`. Wrapping the model in
    DistributedDataParallel raises ConfigError.

    Args:
        model: the module to train. A parameter that the module uses several times is updated once.
        optimizers: the optimizers of all trainable parameters of `model`.
        accumulate: number of backwards between two updates. A parameter is updated with the sum of
            its gradients since the last update.
        buffer: format of the sum: `e4m3`, `e5m2`, `de8`, or `fp16`, which has two bytes an element.
            Default: `e4m3` for up to 8 gradients, and `fp16` for more. Each addition rounds the
            sum, and the errors of many roundings to 8 bits become as large as the sum.
        max_norm: clip the sums of gradients by their global norm, as `clip_grad_norm_` does. Then
            all gradients are in memory at the end of a backward, in the format `buffer`, and
            parameters are updated after the last backward. The attribute `norm` of the returned
            object is the norm before clipping.

    Raises:
        ConfigError: an optimizer is not from `fp8pass.optim`, the optimizers lack a parameter,
            parameters are already attached, the model's gradients are reduced over ranks, or an
            option has an invalid value.
    """
    if not is_whole(accumulate) or accumulate < 1:
        raise ConfigError(f"accumulate must be a positive int, got {accumulate!r}.")
    buffer = default_buffer(accumulate) if buffer is None else buffer
    if buffer not in BUFFERS:
        raise ConfigError(f"buffer must be one of {', '.join(map(repr, BUFFERS))}, got {buffer!r}.")
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise ConfigError(f"max_norm must be a positive number, got {max_norm!r}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "step_in_backward takes an fp8pass.optim.AdamW or Muon, got "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. Create an "
                "fp8pass.optim.AdamW with the same parameters."
            )
    _check_no_wrapper(model)
    if torch.distributed.is_available():
        _watch_wrappers()
    all_owners = {
        p: (optimizer, i)
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    if len(all_owners) < sum(len(g["params"]) for x in optimizers for g in x.param_groups):
        raise ConfigError(
            "Several optimizers have the same parameter. Pass each parameter to one optimizer, for "
            "example with fp8pass.optim.split_parameters(model)."
        )
    # Frozen parameters may be unfrozen later.
    updated = {name: p for name, p in model.named_parameters() if p in all_owners}
    trained = (name for name, p in model.named_parameters() if p.requires_grad)
    if missing := [name for name in trained if name not in updated]:
        raise ConfigError(
            f"The optimizers lack parameters of the model: {', '.join(missing[:3])}. Create the "
            "optimizers with model.parameters(), or freeze the missing parameters with "
            "requires_grad_(False)."
        )
    before = _attached_parameters()
    if names := [name for name, p in updated.items() if p in before]:
        raise ConfigError(
            f"Parameters of the model are already attached to an optimizer: {', '.join(names[:3])}."
            " First call detach() on the return value of step_in_backward."
        )
    owners: dict[Tensor, tuple[Optimizer, int]] = {p: all_owners[p] for p in updated.values()}
    sums: dict[Tensor, GradientSum] = {}
    if accumulate > 1 or max_norm is not None:
        format = moment_format(buffer, signed=True)
        sums = {p: x.make_sum(group, p, format) for p, (x, group) in owners.items()}
    attached = Attached(
        *(optimizers, owners, accumulate, sums, max_norm),
        *(ref(model), frozenset(updated), _is_sharded(model)),
    )
    attached.find_schedule()
    handles = attached._handles
    for optimizer in optimizers:
        # GradScaler then sets `found_inf`, for which `before_step` raises an error.
        optimizer.takes_scaled_gradients = True
        # Learning rate schedulers warn if step() was never called.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        handles.append(optimizer.register_step_pre_hook(attached.before_step))
        # The step's closure may run the last backward, so the hook runs after the step.
        handles.append(optimizer.register_step_post_hook(attached.finish_sums))
    # Dynamo would trace the hook if compiled autograd runs the backward.
    hook = torch.compiler.disable(partial(_take_gradient, ref(attached)))
    for parameter in owners:
        # PyTorch refuses to register hooks on frozen parameters.
        was_trained = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        finally:
            parameter.requires_grad_(was_trained)
    for module in model.modules():
        if any(p in owners for p in module.parameters(recurse=False)):
            _ATTACHED.setdefault(module, []).append(attached)
    return attached


def _take_gradient(reference: ref[Attached], parameter: Tensor) -> None:
    attached = reference()
    if attached is None:
        parameter.grad = None
        raise RuntimeError(
            "A parameter got a gradient after its module and its optimizer were deleted. Keep "
            "the optimizer, or first call detach() on the return value of step_in_backward."
        )
    attached.take_gradient(parameter)


def steps_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is attached, so that its `step()` finds no gradients."""
    attached = (each for found in _ATTACHED.values() for each in found)
    return any(x is optimizer for each in attached for x in each.optimizers)


def default_buffer(accumulate: int) -> str:
    return "e4m3" if accumulate <= FEW_GRADIENTS else "fp16"


@cache
def _wrappers() -> tuple[type, ...]:
    """Return the classes that reduce gradients after the hooks of parameters have run."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from fp8pass.compat.data_parallel import Replicated

    return nn.parallel.DistributedDataParallel, FullyShardedDataParallel, Replicated


def _check_no_wrapper(model: nn.Module) -> None:
    if not is_distributed():
        return
    # The search covers all objects, because a module has no reference to a module that wraps it.
    of_model = set(model.parameters())
    for x in gc.get_objects():
        if issubclass(type(x), _wrappers()) and not of_model.isdisjoint(x.parameters()):
            raise _wrapper_error(x)


@cache
def _watch_wrappers() -> None:
    """Make wrappers raise ConfigError if they are applied later to an attached module.

    `replicate` wraps a module in its first forward.
    """
    nn.modules.module.register_module_module_registration_hook(_check_wrapped)


def _check_wrapped(wrapper: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if torch.compiler.is_compiling():  # Dynamo would guard on the attached modules
        return
    if not _ATTACHED or wrapped is None or not isinstance(wrapper, _wrappers()):
        return
    # FullyShardedDataParallel has already replaced the parameters, so look up the modules, too.
    replaced = any(_ATTACHED.get(module) for module in wrapped.modules())
    if replaced or not _attached_parameters().isdisjoint(wrapped.parameters()):
        raise _wrapper_error(wrapper)


def _attached_parameters() -> set[Tensor]:
    return {p for each in _ATTACHED.values() for x in each for p in x.owners}


def _wrapper_error(wrapper: nn.Module) -> ConfigError:
    return ConfigError(
        f"{type(wrapper).__name__} reduces gradients over ranks only after step_in_backward has "
        "used them. Leave out the wrapper and call fp8pass.distributed.average_sums, or shard the "
        "model with fully_shard, or call optimizer.step() instead of step_in_backward."
    )


def _is_sharded(model: nn.Module) -> bool:
    if not is_distributed():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
