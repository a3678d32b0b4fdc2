"""The optimizer: it selects the parameters to update, and follows PyTorch's protocols."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim import checkpoint, fused, rounding
from fp8pass.optim.fused import FusedUpdate
from fp8pass.optim.options import Storage, check_group, preset_options
from fp8pass.optim.shards import local, local_gradient, storage_of
from fp8pass.optim.slots import Slot, new_state
from fp8pass.optim.update import update


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
        preset: `coat`, or `fp8-lm`: first moment FP8, second moment and master weights FP16.
        first_moment: format, by default that of the preset: `e4m3`, `e5m2` or `de8` (8-bit dynamic
            exponent), each also with `+expand`, `fp16`, `bf16`, `fp32`.
            Both moments are rounded stochastically: rounded to nearest they would not follow
            gradients that become smaller if their beta is near 1.
        second_moment: the same.
        weights: how 16-bit parameters get updates smaller than their precision. `stochastic`: BF16
            is rounded stochastically, so that the update is there on average (FP16 is rounded to
            nearest). `nearest`: the update is lost. `fp32`, `fp16`: a master copy gets it, the
            latter rounded stochastically.
        group_size: number of consecutive elements that share a scale, a power of two.
        seed: seed of stochastic rounding.
        maximize: whether to maximize the objective instead of minimizing it.

    Raises:
        ConfigError: an option has an invalid value, or a parameter cannot be optimized.
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
        group_size: int = 128,
        seed: int = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        given = {"first_moment": first_moment, "second_moment": second_moment, "weights": weights}
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
            **preset_options(preset, given),
        }
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drop everything that was derived from parameters and states."""
        self._numbers: dict[Tensor, int] = {}
        self._constants: dict[Any, Tensor] = {}
        self._fused: dict[tuple[int, ...], tuple[Any, FusedUpdate]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Raises:
            ConfigError: an option has an invalid value, or a parameter cannot be optimized.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the result of `closure`.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group, [p for p in group["params"] if p.grad is not None])
        return loss

    @torch.no_grad()
    def update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update some of the parameters of a group by their gradients.

        Raises:
            RuntimeError: a gradient is sparse, or distributed otherwise than its parameter.
        """
        batches: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse. "
                    "Make it dense (nn.Embedding(sparse=False)), or use torch.optim.SparseAdam."
                )
            device = parameter.device
            fuses = fused.why_not(device) is None and local(parameter).is_contiguous()
            storage = storage_of(group, parameter)
            batches[parameter.dtype, device, fuses, storage].append(parameter)
        for (_, device, fuses, storage), batch in batches.items():
            control = self._control(group, device)
            gradients = [local_gradient(p) for p in batch]
            if fuses:
                gradients = [g.contiguous() for g in gradients]
                self._fused_update(storage, batch, gradients).step(gradients, group, control)
                # As PyTorch's in-place operators do: a graph that saved the weights is outdated.
                torch.autograd.graph.increment_version([local(p) for p in batch])
            elif not control[1].item():
                slots = self._slots(storage, batch)
                for slot in slots:
                    slot.step.add_(1)
                update(slots, gradients, group, storage, control[0])

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

    def _fused_update(
        self, storage: Storage, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> FusedUpdate:
        """The fused update of these parameters, prepared again if they or gradients changed."""
        key = tuple(map(id, parameters))
        pointers = [local(p).data_ptr() for p in parameters]
        signature = (pointers, [g.dtype for g in gradients], storage)
        found = self._fused.get(key)
        if found is None or found[0] != signature:
            slots = self._slots(storage, parameters)
            # It takes over the steps of its parameters: sets that share one with it are outdated.
            overlapping = [other for other in self._fused if not set(key).isdisjoint(other)]
            for other in overlapping:
                del self._fused[other]
            states = [self.state[p] for p in parameters]
            prepared = FusedUpdate(slots, states, gradients, storage)
            found = self._fused[key] = signature, prepared
        return found[1]

    def _slots(self, storage: Storage, parameters: Sequence[Tensor]) -> list[Slot]:
        """The slots of parameters; their states are created if they have none."""
        slots = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(new_state(parameter, storage))
            slots.append(Slot.of(self._number(parameter), parameter, state, storage))
        return slots

    def key(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """The key of random bits for a parameter of `group` at its last step, int32 [1]."""
        step = self.state[parameter]["step"] if self.state.get(parameter) else torch.zeros(())
        number = torch.full((1,), self._number(parameter), dtype=torch.int32)
        device = local(parameter).device
        return rounding.keys(group["seed"], number.to(device), step.to(device))

    def _number(self, parameter: Tensor) -> int:
        """The number of a parameter among all of the optimizer."""
        if parameter not in self._numbers:
            everything = (p for group in self.param_groups for p in group["params"])
            self._numbers = {p: i for i, p in enumerate(everything)}
        return self._numbers[parameter]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, in any format, or of `torch.optim.AdamW`.

        States are converted to the formats of this optimizer; other options are the checkpoint's.

        Raises:
            ConfigError: the checkpoint is of another optimizer, or of parameters of other shapes,
                or has an option with an invalid value.
            ValueError: the checkpoint has other parameter groups.
        """
        # PyTorch would cast states to the dtype of their parameter, which the hook hides. It runs
        # last, so that hooks of users see the checkpoint as it is.
        handle = self.register_load_state_dict_pre_hook(checkpoint.hide_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for key in [key for key in self.state if isinstance(key, checkpoint.Hidden)]:
            values = self.state.pop(key)
            self.state[key.parameter] = checkpoint.converted(values, key)
