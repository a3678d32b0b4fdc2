"""The options of a parameter group, checked, and their presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.config import ConfigError, check_choice
from fp8pass.optim.state_formats import PLAIN, StateFormat, moment_format

WEIGHTS = ("stochastic", "nearest", "fp32", "fp16")
STATE_ROUNDINGS = ("stochastic", "nearest")
# What can be on the host.
OFFLOAD = ("states", "gradients")
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

PRESETS: dict[str, dict[str, Any]] = {
    # COAT section 4, with weights in BF16 alone (LLMQ 3): 2.06 bytes of states a parameter.
    "coat": {
        "first_moment": "e4m3+expand",
        "second_moment": "e4m3+expand",
        "weights": "stochastic",
        "state_rounding": "stochastic",
    },
    # COAT as published: it rounds moments to nearest (section 3) and updates weights in FP32
    # (appendix A).
    "coat-paper": {
        "first_moment": "e4m3+expand",
        "second_moment": "e4m3+expand",
        "weights": "fp32",
        "state_rounding": "nearest",
    },
    # FP8-LM 2.2, Eq. 8, with a scale for each group instead of each tensor: finer, in one pass.
    "fp8-lm": {
        "first_moment": "e4m3",
        "second_moment": "fp16",
        "weights": "fp16",
        "state_rounding": "stochastic",
    },
}
# The sizes of groups that kernels take.
SMALLEST_GROUP, LARGEST_GROUP = 16, 1024
# The name of weights among those of states.
PARAMETER = "parameter"
# The options that say how states are stored. A checkpoint with others is converted to these.
STORAGE = ("first_moment", "second_moment", "weights", "group_size")
# What a checkpoint does not change: these, and where states are.
OWN = (*STORAGE, "offload")


@dataclass(frozen=True)
class Storage:
    """How the states of a group of parameters are stored.

    Attributes:
        first, second: formats of the moments.
        weights: one of `WEIGHTS`.
        group_size: number of elements that share a scale.
        state_rounding: one of `STATE_ROUNDINGS`, for the moments and a master copy in FP16.
    """

    first: StateFormat
    second: StateFormat
    weights: str
    group_size: int
    state_rounding: str

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Storage:
        """The storage of a parameter group.

        Raises:
            ConfigError: an option has an invalid value.
        """
        # Checkpoints that were saved before the option existed do not contain it.
        state_rounding = group.get("state_rounding", "stochastic")
        return _storage(*(group[name] for name in STORAGE), state_rounding)

    def exact(self) -> Storage:
        """The same weights with states in FP32."""
        weights = "fp32" if self.weights == "fp16" else self.weights
        return replace(self, first=PLAIN["fp32"], second=PLAIN["fp32"], weights=weights)

    def master(self, dtype: torch.dtype) -> StateFormat | None:
        """The format of the master copy of a parameter of `dtype`; None if it has none."""
        if dtype == torch.float32 or self.weights not in ("fp32", "fp16"):
            return None
        return PLAIN["fp32"] if self.weights == "fp32" else moment_format("fp16", signed=True)

    def states(self, dtype: torch.dtype) -> dict[str, StateFormat]:
        """The stored states of a parameter of `dtype`, by name, with their formats."""
        found = {"exp_avg": self.first, "exp_avg_sq": self.second}
        master = self.master(dtype)
        return found | {"master": master} if master else found

    def rounded(self, dtype: torch.dtype) -> tuple[str, ...]:
        """What an update rounds stochastically: states of a parameter of `dtype`, or itself."""
        found: tuple[str, ...] = ()
        if self.state_rounding == "stochastic":
            found = tuple(name for name, format in self.states(dtype).items() if format.rounds)
        weights = self.weights == "stochastic" and dtype == torch.bfloat16
        return (*found, PARAMETER) if weights else found


def state_bytes(group: Mapping[str, Any], parameter: Tensor) -> float:
    """Bytes of the states of a parameter of a group."""
    storage = Storage.of(group)
    formats = storage.states(parameter.dtype).values()
    groups = 1 / storage.group_size
    each = (f.dtype.itemsize + 2 * len(f.parts) * groups for f in formats)
    return parameter.numel() * sum(each)


@cache
def _storage(
    first: str, second: str, weights: str, group_size: int, state_rounding: str
) -> Storage:
    check_choice("weights", weights, WEIGHTS)
    check_choice("state_rounding", state_rounding, STATE_ROUNDINGS)
    sizes = f"from {SMALLEST_GROUP} to {LARGEST_GROUP}"
    in_range = isinstance(group_size, int) and SMALLEST_GROUP <= group_size <= LARGEST_GROUP
    if not in_range or group_size & (group_size - 1):
        raise ConfigError(f"group_size must be a power of two {sizes}, got {group_size!r}.")
    return Storage(
        _moment_format("first_moment", first, signed=True),
        _moment_format("second_moment", second, signed=False),
        weights,
        group_size,
        state_rounding,
    )


def _moment_format(option: str, name: str, *, signed: bool) -> StateFormat:
    try:
        return moment_format(name, signed=signed)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def preset_options(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a preset, replaced by those in `given` that are not None.

    Raises:
        ConfigError: there is no such preset.
    """
    check_choice("preset", preset, tuple(PRESETS))
    return PRESETS[preset] | {name: x for name, x in given.items() if x is not None}


def check_group(group: Mapping[str, Any]) -> None:
    """Check a parameter group with all its options.

    Raises:
        ConfigError: an option has an invalid value, or a parameter cannot be optimized.
    """
    _check_numbers(group)
    Storage.of(group)
    check_offload(group["offload"])
    if not isinstance(group["seed"], int) or isinstance(group["seed"], bool):
        raise ConfigError(f"seed must be an int, got {group['seed']!r}.")
    for parameter in group["params"]:
        _check_parameter(parameter)


def check_offload(names: object) -> None:
    """Check what is to be on the host.

    Raises:
        ConfigError: it is no tuple of names, or a name is unknown.
    """
    if not isinstance(names, tuple):
        raise ConfigError(f'offload takes names, such as offload=("states",), got {names!r}.')
    for name in names:
        check_choice("offload", name, OFFLOAD)


def _check_numbers(group: Mapping[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(f"lr as a tensor must have one element, got {tuple(lr.shape)}.")
    elif not _is_number(lr) or not lr >= 0:
        raise ConfigError(f"lr must be a number from 0 on, got {lr!r}.")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas must be two numbers, such as (0.9, 0.999), got {betas!r}.")
    for i, beta in enumerate(betas):
        if not _is_number(beta) or not 0 <= beta < 1:
            raise ConfigError(f"betas[{i}] must be a number in [0, 1), got {beta!r}.")
    for name in ("eps", "weight_decay"):
        if not _is_number(group[name]) or not group[name] >= 0:
            raise ConfigError(f"{name} must be a number from 0 on, got {group[name]!r}.")
    for name in ("amsgrad", "differentiable"):
        if group.get(name):
            raise ConfigError(f"fp8pass.optim.AdamW has no {name}: use torch.optim.AdamW for it.")


def _check_parameter(parameter: Tensor) -> None:
    dtype = parameter.dtype
    if dtype in PARAMETER_DTYPES:
        return
    shape = f"A parameter of shape {tuple(parameter.shape)} is {graph.dtype_text(dtype)}"
    if dtype.is_complex:
        raise ConfigError(f"{shape}: give torch.view_as_real(parameter) instead.")
    raise ConfigError(
        f"{shape}: fp8pass.optim.AdamW takes float32, bfloat16 and float16. Leave it to another "
        "optimizer, such as torch.optim.AdamW."
    )


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
