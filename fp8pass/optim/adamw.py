"""`AdamW`: the options of AdamW, and its fused and eager updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fp8pass.optim.fused import FusedUpdate, StreamedUpdate
from fp8pass.optim.group_options import PRESET_OPTIONS, preset_options, warn_about_ignored
from fp8pass.optim.optimizer import How, Optimizer
from fp8pass.optim.slots import Slot
from fp8pass.optim.update import Group, PreparedUpdate, Tensors, update_adamw, update_eagerly


class AdamW(Optimizer):
    """`torch.optim.AdamW` with moments in FP8 and Dynamic Range Expansion (paper COAT, section 4).

    Options can be set for each parameter group. `foreach`, `fused` and `capturable` are ignored
    with a warning: each device has one implementation, which is fused and capturable on CUDA.

    Args:
        params: parameters in float32, bfloat16 or float16, or groups of them.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, multiplied by `lr`.
        amsgrad: must be False.
        preset: `coat`; `coat-paper`, with states rounded to nearest and FP32 master weights; or
            `fp8-lm`, with the second moment and master weights in FP16.
        first_moment: format, by default the preset's: `e4m3`, `e5m2` or `de8` (8-bit dynamic
            exponent), each also with `+expand`; `fp16`, `bf16`, `fp32`.
        second_moment: format, with the same choices.
        state_rounding: rounding of moments and FP16 master copies, by default the preset's.
            `nearest` has less noise than `stochastic`, but if beta is near 1, the moment does not
            decrease when gradients become smaller.
        weights: how 16-bit parameters receive updates smaller than their precision. `stochastic`
            rounds BF16 stochastically, `nearest` loses such updates, and `fp32` and `fp16` update a
            master copy.
        group_size: number of consecutive elements that share a scale, a power of two.
        seed: seed of stochastic rounding.
        offload: tensors in host memory, which are streamed through the GPU (paper LLMQ, section 3):
            `states`, the moments and master weights; `gradients`, the sums of `step_in_backward`.
            Tensors of parameters with fewer than 65,536 elements are not offloaded, and neither are
            states of parameters that are not contiguous (`channels_last`).
        maximize: whether to maximize the objective instead of minimizing it.

    Raises:
        ConfigError: an option has an invalid value, a parameter cannot be optimized, or host memory
            is too small.
    """

    _shorthands = ("preset",)

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
        formats = (first_moment, second_moment, weights, state_rounding)
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
            **preset_options(preset, dict(zip(PRESET_OPTIONS, formats, strict=True))),
        }
        warn_about_ignored(foreach=foreach, fused=fused, capturable=capturable)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with its own options; `preset` sets several options.

        Raises:
            ConfigError: an option is invalid or misspelled, or a parameter cannot be optimized.
        """
        if "preset" in param_group:
            param_group = preset_options(param_group["preset"], param_group)
            del param_group["preset"]
        super().add_param_group(param_group)

    def _make_update(
        self, group: Group, parameters: Tensors, slots: Sequence[Slot], gradients: Tensors, how: How
    ) -> PreparedUpdate:
        if how.streams:
            staging = self._staging_of(parameters[0].device)
            rule = None if how.fuses else update_adamw
            return StreamedUpdate(slots, gradients, how.storage, staging, rule).step
        if how.fuses:
            return FusedUpdate(slots, gradients, how.storage).step
        return partial(update_eagerly, slots, how.storage, update_adamw)
