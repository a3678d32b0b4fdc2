"""The optimizer: it selects the parameters to update, and follows PyTorch's protocols."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.compat import prepare_loads
from fp8pass.config import ConfigError
from fp8pass.optim import checkpoint, fused, host
from fp8pass.optim.distributed_checkpoint import stage_states
from fp8pass.optim.fused import FusedUpdate
from fp8pass.optim.options import Storage, check_group, preset_options
from fp8pass.optim.shards import local, local_gradient, storage_of, with_local
from fp8pass.optim.slots import Slot, State, name_of, new_state
from fp8pass.optim.staging import Staging
from fp8pass.optim.state_formats import StateFormat
from fp8pass.optim.streamed import StreamedUpdate
from fp8pass.optim.sums import Accumulated, Elsewhere
from fp8pass.optim.update import update
from fp8pass.runtime.arena import Arena
from fp8pass.weights.quantized_parameter import CodedWeight

# Of all gradients this part may wait for what is on the host: those of two layers of 32.
WAITING = 16


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with moments in FP8 and Dynamic Range Expansion (COAT 4).

    Options have the meaning that they have there, apart from the formats of moments and weights,
    and can be set for each parameter group. `foreach`, `fused` and `capturable` are accepted and
    change nothing: each device has one implementation, on CUDA a fused and capturable one.

    Args:
        params: parameters in float32, bfloat16 or float16, or groups of them.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, multiplied by `lr`.
        amsgrad: must be False.
        preset: `coat`; `coat-paper`, COAT as published: states rounded to nearest, FP32 master
            weights; or `fp8-lm`: first moment FP8, second moment and master weights FP16.
        first_moment: format, by default the preset's: `e4m3`, `e5m2` or `de8` (8-bit dynamic
            exponent), each also with `+expand`, `fp16`, `bf16`, `fp32`.
        second_moment: the same.
        state_rounding: rounding of moments and FP16 master copies, by default `stochastic`, which
            preserves their mean. `nearest` has less noise, but a moment with a beta near 1 does
            not follow gradients that become smaller. Default of `coat-paper`: `nearest`.
        weights: how 16-bit parameters get updates smaller than their precision. `stochastic`: BF16
            is rounded stochastically, so that the update is there on average (FP16 is rounded to
            nearest). `nearest`: the update is lost. `fp32`, `fp16`: a master copy gets it, the
            latter rounded by `state_rounding`.
        group_size: number of consecutive elements that share a scale, a power of two.
        seed: seed of stochastic rounding.
        offload: what is kept on the host and streamed through the GPU, which changes no number:
            `states`, the moments and master weights; `gradients`, the sums of gradients over
            several backwards that `attach` makes (LLMQ 3). Parameters of less than 65,536 elements,
            or in another layout (`channels_last`), keep theirs where they are.
        maximize: whether to maximize the objective instead of minimizing it.

    Raises:
        ConfigError: an option has an invalid value, a parameter cannot be optimized, or the host
            has not as much memory.
    """

    # Asks GradScaler for `grad_scale` and `found_inf` instead of unscaled gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        preset: str = "coat",
        first_moment: str | None = None,
        second_moment: str | None = None,
        weights: str | None = None,
        state_rounding: str | None = None,
        group_size: int = 128,
        seed: int = 0,
        offload: Iterable[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if isinstance(offload, Iterable) and not isinstance(offload, str):
            offload = tuple(offload)
        given = {
            "first_moment": first_moment,
            "second_moment": second_moment,
            "weights": weights,
            "state_rounding": state_rounding,
        }
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "differentiable": differentiable,
            "seed": seed,
            "group_size": group_size,
            "offload": offload,
            **preset_options(preset, given),
        }
        self._staging: dict[torch.device, Staging] = {}
        self._forget()
        super().__init__(params, defaults)
        host.check_room(self.param_groups)

    def _forget(self) -> None:
        """Drop everything that was derived from parameters and states."""
        self._numbers: dict[Tensor, int] = {}
        self._constants: dict[Any, Tensor] = {}
        self._arenas: dict[torch.device, Arena] = {}
        self._prepared: dict[tuple[int, ...], tuple[Any, FusedUpdate | StreamedUpdate]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, of which `preset` stands for several.

        Raises:
            ConfigError: an option has an invalid value, or a parameter cannot be optimized.
        """
        self._check_names(param_group)
        if "preset" in param_group:
            param_group = preset_options(param_group["preset"], param_group)
            del param_group["preset"]
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_names(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError if a group has what is nearly one of the options: it does nothing."""
        options = [*self.defaults, "preset"]
        for name in sorted(map(str, set(param_group) - {"params", *options})):
            nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.85)
            if nearest and len(name) > 4:  # `eps2` may mean something to somebody
                raise ConfigError(f"A parameter group has {name!r}: did you mean {nearest[0]!r}?")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the result of `closure`.

        Raises:
            RuntimeError, ConfigError: as `update`; nothing has been updated then.
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

    @torch.no_grad()
    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update some of the parameters of a group by their gradients.

        Those with states on the host are updated on a stream of their own: `join` waits for it.

        Raises:
            RuntimeError: a gradient is sparse, or distributed otherwise than its parameter, or a
                weight is in codes that are all of it.
            ConfigError: an option of the group that was changed has an invalid value.
        """
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            _check_can_be_updated(parameter)
            device = parameter.device
            fuses = fused.why_not(device) is None and local(parameter).is_contiguous()
            streams = host.is_offloaded(group, "states", parameter)
            storage = storage_of(group, parameter)
            batches[parameter.dtype, device, fuses, streams, storage].append(parameter)
        for (_, device, fuses, streams, storage), batch in batches.items():
            control = self._control(group, device)
            if not fuses and control[1].item():
                continue
            gradients = [local_gradient(p) for p in batch]
            if fuses:
                gradients = [g.contiguous() for g in gradients]
            if fuses or streams:
                prepared = self._prepare(storage, group, batch, gradients, fuses=fuses)
                prepared.step(gradients, group, control)
            else:
                slots = self._slots(storage, group, batch)
                for slot in slots:
                    slot.step.add_(1)
                update(slots, gradients, group, storage, control[0])
            if fuses:
                # As PyTorch's in-place operators do: a graph that saved the weights is outdated.
                torch.autograd.graph.increment_version([local(p) for p in batch])

    def make_state(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Make the state of a parameter that has not been updated yet."""
        if not self.state.get(parameter):
            self._slots(storage_of(group, parameter), group, [parameter])

    def new_sum(self, group: int, parameter: Tensor, format: StateFormat) -> Accumulated:
        """An empty sum of gradients of a parameter of the numbered group."""
        elsewhere = None
        if host.is_offloaded(self.param_groups[group], "gradients", parameter):
            device = parameter.device
            elsewhere = Elsewhere(self._arena_of(device), self._staging_of(device))
        return Accumulated(format, elsewhere, self._number(parameter))

    def join(self) -> None:
        """Have what is launched from now on wait for all updates so far."""
        for staging in self._staging.values():
            staging.join()

    def abandon(self) -> None:
        """Wait for all updates so far, on whichever stream this is, and let go of gradients."""
        for staging in self._staging.values():
            staging.abandon()

    def prepare_again(self) -> None:
        """Follow states that were written to: an update that is prepared has copies of steps."""
        self._prepared.clear()

    def let_go(self) -> None:
        """Hold on to no gradient that is still to be added to a sum."""
        for staging in self._staging.values():
            staging.let_go()

    def _control(self, group: dict[str, Any], device: torch.device) -> Tensor:
        """fp32 [2]: the factor of gradients, and whether GradScaler found infinite gradients."""
        key = device, bool(group["maximize"])
        if key not in self._constants:
            sign = -1.0 if group["maximize"] else 1.0
            self._constants[key] = torch.tensor([sign, 0.0], dtype=torch.float32, device=device)
        control = self._constants[key]
        scale, found = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if scale is not None:
            control = torch.stack([control[0] / scale.to(device).reshape(()), control[1]])
        if found is not None:
            control = torch.stack([control[0], found.to(device).reshape(())])
        return control

    def _prepare(
        self,
        storage: Storage,
        group: dict[str, Any],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        *,
        fuses: bool,
    ) -> FusedUpdate | StreamedUpdate:
        """The update of these parameters, prepared again if they or gradients changed."""
        key = tuple(map(id, parameters))
        pointers = [local(p).data_ptr() for p in parameters]
        offloaded = host.is_offloaded(group, "states", parameters[0])
        dtypes = parameters[0].dtype, [g.dtype for g in gradients]
        signature = (pointers, dtypes, storage, offloaded)
        found = self._prepared.get(key)
        if found is None or found[0] != signature:
            slots = self._slots(storage, group, parameters)
            # It takes over the steps of its parameters: sets that share one with it are outdated.
            overlapping = [other for other in self._prepared if not set(key).isdisjoint(other)]
            for other in overlapping:
                del self._prepared[other]
            states = [self.state[p] for p in parameters]
            prepared: FusedUpdate | StreamedUpdate
            if offloaded:
                staging = self._staging_of(parameters[0].device)
                prepared = StreamedUpdate(
                    slots, parameters, states, gradients, storage, staging, fuses=fuses
                )
            else:
                prepared = FusedUpdate(slots, states, gradients, storage)
            found = self._prepared[key] = signature, prepared
        return found[1]

    def _staging_of(self, device: torch.device) -> Staging:
        """The buffers of a device."""
        if device not in self._staging:
            everything = (p for group in self.param_groups for p in group["params"])
            size = sum(local(p).numel() * p.itemsize for p in everything if p.device == device)
            self._staging[device] = Staging(device, size // WAITING)
        return self._staging[device]

    def _arena_of(self, device: torch.device) -> Arena:
        """The memory of the host for a device."""
        if device not in self._arenas:
            self._arenas[device] = Arena(device)
        return self._arenas[device]

    def _slots(
        self, storage: Storage, group: dict[str, Any], parameters: Sequence[Tensor]
    ) -> list[Slot]:
        """The slots of parameters; states are created, or converted to the group's options."""
        slots = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(self._placed(new_state(parameter, storage), group, parameter))
            elif not self._is_converted(state, storage, group, parameter):
                new = self._placed(
                    checkpoint.converted(state, parameter, storage), group, parameter
                )
                for key in [key for key in state if name_of(key) in checkpoint.STATES]:
                    del state[key]
                state.update(new)
            slots.append(Slot.of(self._number(parameter), parameter, state, storage))
        return slots

    @staticmethod
    def _is_converted(
        state: State, storage: Storage, group: dict[str, Any], parameter: Tensor
    ) -> bool:
        """Whether a state is in the formats, and on the device, that the group's options name."""
        offloaded = host.is_offloaded(group, "states", parameter)
        device = torch.device("cpu") if offloaded else parameter.device
        return checkpoint.is_converted(state, parameter, storage, device)

    def _placed(self, state: State, group: dict[str, Any], parameter: Tensor) -> State:
        """A new state, moved to the host if it belongs there."""
        if not host.is_offloaded(group, "states", parameter):
            return state
        arena = self._arena_of(parameter.device)
        return {
            name: x if name == "step" else with_local(x, arena.take) for name, x in state.items()
        }

    def step_of(self, parameter: Tensor) -> Tensor:
        """How often a parameter was updated, fp32 [], on its device."""
        state, device = self.state.get(parameter), parameter.device
        return state["step"].to(device) if state else torch.zeros((), device=device)

    def _number(self, parameter: Tensor) -> int:
        """The number of a parameter among all of the optimizer."""
        if parameter not in self._numbers:
            everything = (p for group in self.param_groups for p in group["params"])
            self._numbers = {p: i for i, p in enumerate(everything)}
        return self._numbers[parameter]

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint; what is on its way to the host has arrived there.

        `torch.distributed.checkpoint` loads into it from a checkpoint in any format.
        """
        for staging in self._staging.values():
            staging.synchronize()
        prepare_loads(stage_states)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, in any format, or of `torch.optim.AdamW`.

        States are converted to the formats of this optimizer; other options are the checkpoint's.

        Raises:
            ConfigError: the checkpoint is of another optimizer or of none, or of parameters of
                other shapes, or has an option with an invalid value.
            ValueError: the checkpoint has other parameter groups.
        """
        if not isinstance(state_dict, dict):  # which hooks would not get to see
            checkpoint.check_has_states(state_dict)
        # PyTorch would cast states to the dtype of their parameter, which the hook hides. It runs
        # last, so that hooks of users see the checkpoint as it is.
        handle = self.register_load_state_dict_pre_hook(checkpoint.hide_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = {  # converted first: a checkpoint that is refused changes nothing
            key: checkpoint.converted(x, key.parameter, storage_of(key.group, key.parameter))
            for key, x in state.get("state", {}).items()
            if isinstance(key, checkpoint.Hidden)
        }
        super().__setstate__(state)
        self.__dict__.setdefault("_staging", {})  # copies and unpickled ones begin without
        self._forget()
        for key, new in loaded.items():
            self.state.pop(key)  # type: ignore[call-overload]
            self.state[key.parameter] = self._placed(new, key.group, key.parameter)


def _check_can_be_updated(parameter: Tensor) -> None:
    """Raise RuntimeError if an update would fail, or be lost."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        raise RuntimeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse. "
            "Make it dense (nn.Embedding(sparse=False)), or use torch.optim.SparseAdam."
        )
    if isinstance(parameter, CodedWeight) and parameter.source is None:
        raise RuntimeError(
            f"A weight of shape {tuple(parameter.shape)} is in codes, which were made for it to "
            "stay as it is: most updates are smaller than the distance of two codes. Name its "
            "layer in skip= of freeze, or switch its gradient off with requires_grad_(False)."
        )
