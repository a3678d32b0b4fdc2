"""Options of a parameter group: presets, checks, and formats of states.

The options determine the optimizer of the group (`METHODS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.optim.state_formats import (
    ALL_FORMATS,
    MOMENT_FORMATS,
    PLAIN,
    StateFormat,
    moment_format,
)
from fp8pass.option_checks import ConfigError, check_choice, is_number, is_whole

WEIGHTS = ("stochastic", "nearest", "fp32", "fp16")
STATE_ROUNDINGS = ("stochastic", "nearest")
OFFLOAD = ("states", "gradients")
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRESET_OPTIONS = ("first_moment", "second_moment", "weights", "state_rounding")
PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(PRESET_OPTIONS, values, strict=True))
    for name, values in {
        # The paper COAT, section 4, without master weights (paper LLMQ, section 3): the states take
        # 2.06 bytes per parameter.
        "coat": ("e4m3+expand", "e4m3+expand", "stochastic", "stochastic"),
        # COAT as published: moments rounded to nearest (section 3), FP32 weights (appendix A).
        "coat-paper": ("e4m3+expand", "e4m3+expand", "fp32", "nearest"),
        # FP8-LM, section 2.2, Eq. 8. FP8-LM has one scale for each tensor. One scale for each group
        # is more accurate, and the update reads the tensor only once.
        "fp8-lm": ("e4m3", "fp16", "fp16", "stochastic"),
    }.items()
}
# Group sizes that the kernels support.
SMALLEST_GROUP, LARGEST_GROUP = 16, 1024
# `torch.optim.Muon` has the same limit of Newton–Schulz iterations, too.
ADJUSTMENTS, MOST_NS_STEPS = ("original", "match_rms_adamw"), 100
# The key of the parameter in dicts and tables that also contain states.
PARAMETER = "parameter"


@dataclass(frozen=True, eq=False)
class Method:
    """An optimizer: the names of its states, and the check of its own options."""

    name: str  # of the class in `fp8pass.optim` and in `torch.optim`
    moments: Mapping[str, str]  # names of states, by the option that selects the state's format
    torch_states: tuple[str, ...]  # keys of the states that the optimizer in `torch.optim` saves
    check: Callable[[Mapping[str, Any]], None]  # raises ConfigError about an option of a group


@dataclass(frozen=True, eq=False)
class Storage:
    """How a group stores its states. Groups with equal options share one instance."""

    method: Method
    moments: Mapping[str, StateFormat]  # formats, by the name of the state
    weights: str  # one of `WEIGHTS`
    group_size: int  # elements that share a scale
    state_rounding: str  # one of `STATE_ROUNDINGS`, for moments and FP16 master copies

    @staticmethod
    def of(group: Mapping[str, Any], group_size: int | None = None) -> Storage:
        """Return the storage of a group; `group_size=0` stores all states in FP32."""
        method = method_of(group)
        formats = tuple(group[option] for option in method.moments)
        weights, size = group["weights"], group_size or group["group_size"]
        # Checkpoints of older versions lack this option.
        state_rounding = group.get("state_rounding", "stochastic")
        if group_size == 0:
            weights = "fp32" if weights == "fp16" else weights
            formats = ("fp32",) * len(formats)
        return _make_storage(method, formats, weights, size, state_rounding)

    def master(self, dtype: torch.dtype) -> StateFormat | None:
        """Return the format of master copies, if parameters of `dtype` have them."""
        if dtype == torch.float32 or self.weights not in ("fp32", "fp16"):
            return None
        return PLAIN["fp32"] if self.weights == "fp32" else moment_format("fp16", signed=True)

    def states(self, dtype: torch.dtype) -> dict[str, StateFormat]:
        master = self.master(dtype)
        return {**self.moments, "master": master} if master else dict(self.moments)

    def rounded(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the names of the states, or `PARAMETER`, that an update rounds stochastically."""
        found: tuple[str, ...] = ()
        if self.state_rounding == "stochastic":
            formats = self.states(dtype).items()
            found = tuple(name for name, format in formats if format.dtype != torch.float32)
        weights = self.weights == "stochastic" and dtype == torch.bfloat16
        return (*found, PARAMETER) if weights else found


def state_bytes(group: Mapping[str, Any], parameter: Tensor) -> float:
    storage = Storage.of(group)
    formats = storage.states(parameter.dtype).values()
    groups = 1 / storage.group_size
    return parameter.numel() * sum(f.dtype.itemsize + 2 * len(f.parts) * groups for f in formats)


@cache
def _make_storage(
    method: Method, formats: tuple[str, ...], weights: str, group_size: int, state_rounding: str
) -> Storage:
    check_choice("weights", weights, WEIGHTS)
    check_choice("state_rounding", state_rounding, STATE_ROUNDINGS)
    in_range = isinstance(group_size, int) and SMALLEST_GROUP <= group_size <= LARGEST_GROUP
    if not in_range or group_size & (group_size - 1):
        sizes = f"from {SMALLEST_GROUP} to {LARGEST_GROUP}"
        raise ConfigError(f"group_size must be a power of two {sizes}, got {group_size!r}.")
    moments = {}
    for (option, state), name in zip(method.moments.items(), formats, strict=True):
        try:
            moments[state] = format_of_state(state, name)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None
    return Storage(method, moments, weights, group_size, state_rounding)


def format_of_state(state: str, name: str) -> StateFormat:
    """Return the format `name`. Raise ConfigError if `state` cannot have this format."""
    choices = ALL_FORMATS if state == "momentum_buffer" else MOMENT_FORMATS
    return moment_format(name, signed=state != "exp_avg_sq", choices=choices)


def preset_options(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a preset. Values in `given` that are not None override them."""
    check_choice("preset", preset, tuple(PRESETS))
    return PRESETS[preset] | {name: x for name, x in given.items() if x is not None}


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option is invalid, or if a parameter cannot be optimized."""
    method, (lr, offload, seed) = method_of(group), (group[x] for x in ("lr", "offload", "seed"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr as a tensor must have one element, got {tuple(lr.shape)}.")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        is_tensor = name == "lr" and isinstance(value, Tensor)
        if not is_tensor and (not _is_number(value) or not value >= 0):
            raise ConfigError(f"{name} must be a number >= 0, got {value!r}.")
    method.check(group)
    Storage.of(group)
    if not isinstance(offload, tuple):
        raise ConfigError(
            f'offload must be a tuple of names, such as offload=("states",), got {offload!r}.'
        )
    for name in offload:
        check_choice("offload", name, OFFLOAD)
    if not is_whole(seed):
        raise ConfigError(f"seed must be an int, got {seed!r}.")
    for parameter in group["params"]:
        _check_parameter(parameter, method)


def _check_parameter(parameter: Tensor, method: Method) -> None:
    if method is MUON and parameter.ndim != 2:
        raise ConfigError(
            f"fp8pass.optim.Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}."
            " Pass this parameter to fp8pass.optim.AdamW; fp8pass.optim.split_parameters(model) "
            "returns the parameters for both optimizers."
        )
    if parameter.dtype in PARAMETER_DTYPES:
        return
    dtype = graph.dtype_text(parameter.dtype)
    text = f"A parameter of shape {tuple(parameter.shape)} has dtype {dtype}: "
    if parameter.dtype.is_complex:
        raise ConfigError(f"{text}pass torch.view_as_real(parameter) to the optimizer instead.")
    raise ConfigError(
        f"{text}fp8pass.optim.{method.name} takes float32, bfloat16 and float16. Pass this "
        f"parameter to another optimizer, such as torch.optim.{method.name}."
    )


def _check_adamw(group: Mapping[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas must be two numbers, such as (0.9, 0.999), got {betas!r}.")
    for i, beta in enumerate(betas):
        _check_decay(f"betas[{i}]", beta)
    for name in ("amsgrad", "differentiable"):
        if group.get(name):
            raise ConfigError(
                f"fp8pass.optim.AdamW does not support {name}: use torch.optim.AdamW instead."
            )


def _check_muon(group: Mapping[str, Any]) -> None:
    _check_decay("momentum", group["momentum"])
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    is_row = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    if not is_row or not all(map(_is_number, coefficients)):
        raise ConfigError(
            "ns_coefficients must be three numbers, such as (3.4445, -4.775, 2.0315), got "
            f"{coefficients!r}."
        )
    if not is_whole(steps) or not 0 <= steps < MOST_NS_STEPS:
        raise ConfigError(f"ns_steps must be an int from 0 to {MOST_NS_STEPS - 1}, got {steps!r}.")
    if (adjust := group["adjust_lr_fn"]) is not None:
        check_choice("adjust_lr_fn", adjust, ADJUSTMENTS)


def _check_decay(name: str, value: object) -> None:
    if not _is_number(value) or not 0 <= value < 1:  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number in [0, 1), got {value!r}.")


def _is_number(x: object) -> bool:
    return is_number(x) and math.isfinite(x)  # type: ignore[arg-type]


ADAMW = Method(
    "AdamW",
    {"first_moment": "exp_avg", "second_moment": "exp_avg_sq"},
    ("step", "exp_avg", "exp_avg_sq"),
    _check_adamw,
)
MUON = Method("Muon", {"momentum_format": "momentum_buffer"}, ("momentum_buffer",), _check_muon)
METHODS = (ADAMW, MUON)
MOMENTS = tuple(state for method in METHODS for state in method.moments.values())
FORMATS = tuple(option for method in METHODS for option in method.moments)
# Loading a checkpoint does not change these options. It converts states to the optimizer's formats.
OWN = (*FORMATS, "weights", "group_size", "offload")


def method_of(group: Mapping[str, Any]) -> Method:
    return next(x for x in METHODS if x.moments.keys() <= group.keys())
