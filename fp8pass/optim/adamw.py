"""`AdamW`: options, and the update, both in PyTorch and as the arithmetic of a Triton kernel.

w ← w (1 - lr·λ)          m ← β₁ m + (1 - β₁) g          v ← β₂ v + (1 - β₂) g²
w ← w - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.fused import FusedUpdate, StreamedUpdate
from fp8pass.optim.group_options import PARAMETER, PRESET_OPTIONS, preset_options
from fp8pass.optim.kernel import FusedRule, UpdateWriter
from fp8pass.optim.optimizer import How, Optimizer
from fp8pass.optim.slots import Slot
from fp8pass.optim.update import Batch, Group, PreparedUpdate, Tensors, update_eagerly

# Prevents a division by zero for elements whose gradients were all zero.
SMALLEST_EPS = 2.0**-100
# A smaller learning rate counts as 0. Otherwise the divisor, which contains 1 / rate, could exceed
# 2^126 for a finite second moment. An infinite second moment needs no limit, because it makes its
# group NaN in the next step.
SMALLEST_RATE = 2.0**-61
# Constants of the kernel's function `quotient`. `of_one` is the approximation of 1 / 1 before the
# iteration in this function.
QUOTIENT = {"linear": 1.500971, "constant": 0.7490293, "of_one": 0.9501953125}

_NUMBERS = """
beta1 = 1.0 - complement1
of_first = tl.load(control) * complement1
of_second = tl.load(control) * root(complement2)
decay = tl.load(factors + number)
rate = tl.load(factors + count + number)
# The inverse correction of the second moment scales the other terms, instead of the root itself.
uncorrected = 1.0 / tl.load(factors + 2 * count + number)
rate = rate * uncorrected
least = tl.maximum(eps, {least!r}) * uncorrected
"""
# If the rate is zero, the divisor is 1, and the quotient of finite numbers is zero.
_INVERSE_RATE = """
moves = tl.abs(rate) > {smallest_rate!r}
inverse_rate = tl.where(moves, 1.0 / rate, 0.0)
least = tl.where(moves, least * inverse_rate, 1.0)
linear = tl.where(moves, {linear!r}, {of_one!r})
constant = tl.where(moves, {constant!r}, 0.0)
"""
_UPDATE = """
exp_avg = exp_avg + of_first * gradient
scaled = of_second * gradient
exp_avg_sq = exp_avg_sq + scaled * scaled
"""
# The error of `quotient` is smaller than the quantization errors of the moments. The divisor
# contains 1 / rate.
_STEP = """
divisor = root(exp_avg_sq) * inverse_rate + least
{weights} = {weights} * decay - quotient(exp_avg, divisor, linear, constant)
"""
_EXACT_STEP = "{weights} = {weights} * decay - rate * (exp_avg / (root(exp_avg_sq) + least))"


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
        first_moment: format of the first moment, by default the preset's: `e4m3`, `e5m2` or `de8`
            (8-bit dynamic exponent), each also with `+expand`; `fp16`, `bf16`, `fp32`.
        second_moment: format of the second moment, with the same choices.
        state_rounding: rounding of moments and FP16 master copies, by default the preset's.
            `nearest` has less noise than `stochastic`, but if beta is near 1, the moment does not
            decrease when gradients become smaller.
        weights: how 16-bit parameters receive updates smaller than their precision. `stochastic`
            rounds BF16 stochastically, `nearest` loses such updates, and `fp32` and `fp16` update a
            master copy.
        group_size: number of consecutive elements that share a scale. It must be a power of two.
        seed: seed of stochastic rounding.
        offload: names of the tensors to store in host memory and to stream through the GPU (paper
            LLMQ, section 3): `states`, the moments and master weights; `gradients`, the sums of
            `step_in_backward`. Tensors of parameters with fewer than 65,536 elements are not
            offloaded, and neither are states of parameters that are not contiguous
            (`channels_last`).
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
        ignored = {"foreach": foreach, "fused": fused, "capturable": capturable}
        for name in (name for name, value in ignored.items() if value):
            warnings.warn(
                f"fp8pass: fp8pass.optim.AdamW ignores {name}=True, because it has one "
                "implementation for each device, which is fused and capturable on CUDA. Leave out "
                f"{name}.",
                stacklevel=2,
            )
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
            rule = FUSED if how.fuses else update_adamw
            return StreamedUpdate(slots, gradients, how.storage, staging, rule).step
        if how.fuses:
            return FusedUpdate(FUSED, slots, gradients, how.storage).step
        return partial(update_eagerly, slots, how.storage, update_adamw)


def factors(group: Group, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - lr·λ, lr / (1 - β₁ᵗ) and 1 / √(1 - β₂ᵗ) for step counts t = `steps`, fp32 [n].

    The factors are computed in fp64, without synchronizing the device.
    """
    steps = steps.double()
    (beta1, beta2), lr = group["betas"], group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(steps).reshape(())
    decay = torch.ones_like(steps) - lr * group["weight_decay"]
    rate = lr / (1 - beta1**steps)
    correction = (1 - beta2**steps).rsqrt()
    return decay.float(), rate.float(), correction.float()


def update_adamw(batch: Batch, gradient: Tensor) -> None:
    """Update a batch by the formulas in the module's docstring."""
    batch.count_step()
    group = batch.group
    decay, rate, correction = (batch.repeat(x) for x in factors(group, batch.steps))
    (beta1, beta2), eps = group["betas"], max(group["eps"], SMALLEST_EPS)
    m = batch.read("exp_avg").lerp(gradient, 1 - beta1)
    v = batch.read("exp_avg_sq") * beta2
    v = v.addcmul(gradient, gradient, value=1 - beta2)
    weights = batch.read_weights() * decay - rate * (m / (v.sqrt() * correction + eps))
    batch.write({"exp_avg": m, "exp_avg_sq": v, PARAMETER: weights})


def _write_kernel(writer: UpdateWriter) -> None:
    writer.add_before(_NUMBERS, least=SMALLEST_EPS)
    writer.add(_UPDATE)
    grouped = writer.states["exp_avg_sq"].grouped
    if grouped:
        writer.add_before(_INVERSE_RATE, smallest_rate=SMALLEST_RATE, **QUOTIENT)
    writer.add(_STEP if grouped else _EXACT_STEP, weights=writer.weights)


FUSED = FusedRule(
    "adamw",
    {
        "complement1": lambda group: 1 - float(group["betas"][0]),
        "beta2": lambda group: float(group["betas"][1]),
        "complement2": lambda group: 1 - float(group["betas"][1]),
        "eps": lambda group: float(group["eps"]),
    },
    lambda group, steps, shapes: torch.stack(factors(group, steps)),
    _write_kernel,
    decays={"exp_avg": " * beta1", "exp_avg_sq": " * beta2"},
)
