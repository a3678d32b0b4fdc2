"""`Optimizer`: implements PyTorch's optimizer interface, and selects how parameters are updated."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.compat import prepare_loads
from fp8pass.optim import checkpoint
from fp8pass.optim.group_options import Storage, check_group
from fp8pass.optim.offload import Staging, check_host_memory, is_offloaded
from fp8pass.optim.shards import find_quantized, local, local_gradient, storage_of, with_local
from fp8pass.optim.slots import Slot, State, name_of, new_state
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.sums import GradientSum
from fp8pass.optim.update import Group, PreparedUpdate, Tensors
from fp8pass.option_checks import ConfigError
from fp8pass.runtime.arena import Arena

# Gradients that wait for offloaded states may take 1 / WAITING of the bytes of all parameters. In a
# model of 32 layers, these are the bytes of two layers.
WAITING = 16


class How(NamedTuple):
    """How a parameter is updated. Parameters that are updated together have an equal `How`."""

    storage: Storage
    fuses: bool  # a Triton kernel computes the update
    streams: bool  # states are copied from host memory


class Optimizer(torch.optim.Optimizer, ABC):
    """Base class of the optimizers, with states in the formats of `state_formats.py`.

    A subclass defines the options of parameter groups, and `_make_update`.
    """

    # Whether GradScaler leaves gradients scaled; True while `step_in_backward` is attached.
    takes_scaled_gradients = False
    # Keys of a parameter group that set several options, such as `preset`.
    _shorthands: tuple[str, ...] = ()

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        offload = defaults["offload"]
        if isinstance(offload, Iterable) and not isinstance(offload, str):
            defaults["offload"] = tuple(offload)
        self._staging: dict[torch.device, Staging] = {}
        self._reset_caches()
        super().__init__(params, defaults)
        check_host_memory(self.param_groups)

    def _reset_caches(self) -> None:
        self._numbers: dict[Tensor, int] = {}
        self._constants: dict[Any, Tensor] = {}
        self._arenas: dict[torch.device, Arena] = {}
        self._prepared: dict[tuple[int, ...], tuple[Any, list[Any], PreparedUpdate]] = {}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with its own options.

        Raises:
            ConfigError: an option is invalid or misspelled, or a parameter cannot be optimized.
        """
        options = [*self.defaults, *self._shorthands]
        for name in sorted(map(str, set(param_group) - {"params", *options})):
            nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.85)
            if nearest and len(name) > 4:  # a short name such as `eps2` may be the user's own
                raise ConfigError(
                    f"Unknown option {name!r} of a parameter group. Did you mean {nearest[0]!r}?"
                )
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the result of `closure`.

        Raises:
            RuntimeError: a gradient is sparse, or a weight exists only in FP8. In these two cases
                no parameter has been updated. Also raised if a parameter is a DTensor and its
                gradient is not.
            ConfigError: an option of a group has an invalid value.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        for group, parameters in groups:
            Storage.of(group)  # raises ConfigError before any group is updated
            for parameter in parameters:
                _check_can_be_updated(parameter)
        try:
            for group, parameters in groups:
                self.update(group, parameters)
        finally:
            self.join()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler sets `grad_scale` and `found_inf` instead of unscaling gradients.

        GradScaler cannot unscale gradients in FP16. Lightning refuses to clip gradients of
        optimizers that support scaling.
        """
        parameters = (p for group in self.param_groups for p in group["params"])
        return self.takes_scaled_gradients or any(p.dtype is torch.float16 for p in parameters)

    @torch.no_grad()
    def update(self, group: Group, parameters: Tensors) -> None:
        """Update some parameters of a group with their gradients.

        Parameters with offloaded states are updated on another stream; `join` waits for it.
        """
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            _check_can_be_updated(parameter)
            fuses, streams = self._fuses(group, parameter), self._streams(group, parameter)
            how = How(storage_of(group, parameter), fuses, streams)
            batches[parameter.dtype, parameter.device, how].append(parameter)
        for (_, device, how), batch in batches.items():
            control = self._control(group, device)
            found = getattr(self, "found_inf", None)
            if not how.fuses and found is not None and found.item():
                continue
            gradients = [local_gradient(p) for p in batch]
            if how.fuses:
                gradients = [g.contiguous() for g in gradients]
            self._prepare(group, batch, gradients, how)(gradients, group, control)
            if how.fuses:
                # In-place operators increment the version, too. A backward that needs the old
                # weights then raises an error.
                torch.autograd.graph.increment_version([local(p) for p in batch])

    def count_updates(self, group: Group, parameter: Tensor) -> Tensor:
        """Return the number of updates of a parameter, fp32 []. Create its states if missing."""
        if not self.state.get(parameter):
            self._make_slot(storage_of(group, parameter), group, parameter)
        return self.state[parameter]["step"].to(parameter.device)

    def make_sum(self, group: int, parameter: Tensor, format: StateFormat) -> GradientSum:
        """Return an empty sum of gradients for a parameter of the group with index `group`."""
        offload = None
        if is_offloaded(self.param_groups[group], "gradients", parameter):
            offload = self._arena_of(parameter.device), self._staging_of(parameter.device)
        return GradientSum(format, offload, self._number(parameter))

    def join(self) -> None:
        """Make the current stream wait for all updates."""
        for staging in self._staging.values():
            staging.join()

    def abandon(self) -> None:
        """Block the CPU until all updates have ended, and drop references to gradients."""
        for staging in self._staging.values():
            staging.abandon()

    def release(self) -> None:
        """Drop references to gradients, whose memory stays valid for pending additions."""
        for staging in self._staging.values():
            staging.release()

    def prepare_again(self) -> None:
        """Drop prepared updates, which contain step counts. Call this after writing states."""
        self._prepared.clear()

    def _control(self, group: Group, device: torch.device) -> Tensor:
        """Return fp32 [2]: the factor that multiplies gradients, and a flag.

        The flag is 1 if any gradient is not finite.
        """
        key = device, bool(group.get("maximize"))
        if key not in self._constants:
            sign = -1.0 if group.get("maximize") else 1.0
            self._constants[key] = torch.tensor([sign, 0.0], dtype=torch.float32, device=device)
        control = self._constants[key]
        scale, found = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if scale is not None:
            control = torch.stack([control[0] / scale.to(device).reshape(()), control[1]])
        if found is not None:
            control = torch.stack([control[0], found.to(device).reshape(())])
        return control

    def _prepare(
        self, group: Group, parameters: Tensors, gradients: Tensors, how: How
    ) -> PreparedUpdate:
        """Return the prepared update of parameters of one `How`.

        An update is reused until an option, parameter, dtype or state tensor changes.
        """
        key = tuple(map(id, parameters))
        # An eager update does not need the address, which a FakeTensor lacks.
        layouts = [
            (p.shape, x.data_ptr() if how.fuses or how.streams or x is not p else 0)
            for p, x in zip(parameters, map(local, parameters), strict=True)
        ]
        dtypes = parameters[0].dtype, parameters[0].device, [g.dtype for g in gradients]
        signature = (layouts, dtypes, how)
        states = [self.state[p] for p in parameters]
        if found := self._prepared.get(key):
            old, tensors, prepared = found
            if old == signature and all(states[i].get(name) is x for i, name, x in tensors):
                return prepared
        slots = [self._make_slot(how.storage, group, p) for p in parameters]
        # A fused update replaces step tensors, so other prepared updates of the same parameters
        # would count steps in the old tensors.
        for other in [x for x in self._prepared if not set(key).isdisjoint(x)]:
            del self._prepared[other]
        prepared = self._make_update(group, parameters, slots, gradients, how)
        tensors = [
            (i, name, x)
            for i, state in enumerate(states)
            for name, x in state.items()
            if name_of(name) in checkpoint.STATES
        ]
        self._prepared[key] = signature, tensors, prepared
        return prepared

    def _fuses(self, group: Group, parameter: Tensor) -> bool:
        device = parameter.device
        return hardware.why_no_triton_kernels(device) is None and local(parameter).is_contiguous()

    def _streams(self, group: Group, parameter: Tensor) -> bool:
        return is_offloaded(group, "states", parameter)

    @abstractmethod
    def _make_update(
        self, group: Group, parameters: Tensors, slots: Sequence[Slot], gradients: Tensors, how: How
    ) -> PreparedUpdate:
        """Return the update of parameters of one dtype and device.

        The gradients of all steps have the dtypes of `gradients`.
        """

    def _staging_of(self, device: torch.device) -> Staging:
        if device not in self._staging:
            everything = (p for group in self.param_groups for p in group["params"])
            size = sum(local(p).numel() * p.itemsize for p in everything if p.device == device)
            self._staging[device] = Staging(device, size // WAITING)
        return self._staging[device]

    def _arena_of(self, device: torch.device) -> Arena:
        return self._arenas.setdefault(device, Arena(device))

    def _make_slot(self, storage: Storage, group: Group, parameter: Tensor) -> Slot:
        """Return the slot of a parameter. Create or convert the states if necessary."""
        state = self.state[parameter]
        offloaded = is_offloaded(group, "states", parameter)
        device = torch.device("cpu") if offloaded else parameter.device
        if not state:
            state.update(self._move_to_host(new_state(parameter, storage), group, parameter))
        elif not checkpoint.is_converted(state, parameter, storage, device):
            new = checkpoint.convert(state, parameter, storage)
            new = self._move_to_host(new, group, parameter)
            for key in [key for key in state if name_of(key) in checkpoint.STATES]:
                del state[key]
            state.update(new)
        return Slot.of(self._number(parameter), parameter, state, storage)

    def _move_to_host(self, state: State, group: Group, parameter: Tensor) -> State:
        if not is_offloaded(group, "states", parameter):
            return state
        copy = self._arena_of(parameter.device).take
        return {name: x if name == "step" else with_local(x, copy) for name, x in state.items()}

    def _number(self, parameter: Tensor) -> int:
        if parameter not in self._numbers:
            everything = (p for group in self.param_groups for p in group["params"])
            self._numbers = {p: i for i, p in enumerate(everything)}
        return self._numbers[parameter]

    def state_dict(self) -> dict[str, Any]:
        """Wait for copies to host memory, and return a checkpoint."""
        for staging in self._staging.values():
            staging.synchronize()
        prepare_loads(checkpoint.stage_states)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer in any format, or of its namesake in `torch.optim`.

        States are converted to the formats of this optimizer. The options in `group_options.OWN`
        keep their values, and the other options come from the checkpoint.

        Raises:
            ConfigError: the checkpoint was made by another class of optimizer or for parameters of
                other shapes, or has an option with an invalid value.
            ValueError: the checkpoint has other parameter groups.
        """
        if not isinstance(state_dict, dict):  # PyTorch would fail before calling the hook
            checkpoint.check_has_states(state_dict)
        # PyTorch would cast states to the dtype of their parameter. The hook is registered last, so
        # that hooks of users get the original checkpoint.
        handle = self.register_load_state_dict_pre_hook(checkpoint.hide_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = {  # converted first: an invalid checkpoint raises an error before any change
            key: checkpoint.convert(x, key.parameter, storage_of(key.group, key.parameter))
            for key, x in state.get("state", {}).items()
            if isinstance(key, checkpoint.HiddenParameter)
        }
        super().__setstate__(state)
        self.__dict__.setdefault("_staging", {})  # missing in copies and after unpickling
        self._reset_caches()
        for key, new in loaded.items():
            self.state.pop(key)  # type: ignore[call-overload]
            self.state[key.parameter] = self._move_to_host(new, key.group, key.parameter)


def _check_can_be_updated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        raise RuntimeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse. "
            "Make it dense (nn.Embedding(sparse=False)), or use torch.optim.SparseAdam."
        )
    if (weight := find_quantized(parameter)) is not None and weight.source is None:
        raise RuntimeError(
            f"A trainable weight of shape {tuple(parameter.shape)} exists only in FP8, which is "
            "too coarse for most updates. Name its layer in skip= of quantize_frozen, or freeze "
            "the weight with requires_grad_(False)."
        )
