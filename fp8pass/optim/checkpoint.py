"""States in other formats, or of `torch.optim.AdamW`, converted to an optimizer's formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8pass.config import ConfigError
from fp8pass.optim.groups import Stored, decode
from fp8pass.optim.options import OWN, STORAGE, Storage, check_group
from fp8pass.optim.shards import (
    is_distributed,
    like_groups,
    like_parameter,
    local,
    shard_of,
    storage_of,
)
from fp8pass.optim.slots import State, from_rows, stored_state, to_rows
from fp8pass.optim.state_formats import StateFormat

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Hidden:
    """A key that hides a parameter from PyTorch: with its options, and those of the checkpoint."""

    parameter: Tensor
    group: dict[str, Any]
    saved_group: dict[str, Any]


def hide_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with `Hidden` keys, so that PyTorch does not cast states, and own storage.

    Raises:
        ConfigError: the checkpoint is of no optimizer, was made with AMSGrad, or has an option with
            an invalid value.
    """
    check_has_states(state_dict)
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if any(group.get("amsgrad") for group in saved_groups):
        raise ConfigError(
            "The checkpoint was made with amsgrad=True, which fp8pass.optim.AdamW does not have: "
            "go on with torch.optim.AdamW, or start with fresh states."
        )
    states, merged = dict(state_dict["state"]), []
    for saved, group in zip(saved_groups, groups, strict=False):
        own = {**group, **{k: v for k, v in saved.items() if k not in OWN}}
        _check_options(saved, {**own, "params": group["params"]})
        merged.append({**own, "params": saved["params"]})
        for key, parameter in zip(saved["params"], group["params"], strict=False):
            if key in states:
                states[Hidden(parameter, own, saved)] = states.pop(key)
    # Groups without a counterpart, about which PyTorch raises an error.
    merged += saved_groups[len(merged) :]
    return {**state_dict, "state": states, "param_groups": merged}


def check_has_states(given: Any) -> None:
    """Raise ConfigError if what was given for a checkpoint is not of an optimizer."""
    keys = given if isinstance(given, Mapping) else ()
    if missing := {"state", "param_groups"} - set(keys):
        raise ConfigError(
            f"The checkpoint ({type(given).__name__}) has no {', '.join(sorted(missing))}: it is "
            "not of an optimizer. Load what optimizer.state_dict() returned."
        )


def _check_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError if options of a checkpoint, or a group's with some of them, are wrong."""
    stored = [name for name in STORAGE if name in saved]
    if stored and (missing := set(STORAGE) - set(stored)):
        raise ConfigError(
            f"The checkpoint has {stored[0]} without {', '.join(sorted(missing))}: it is not "
            "complete."
        )
    try:
        check_group(own)
        if stored:
            check_group({**own, **{name: saved[name] for name in STORAGE}})
    except ConfigError as error:
        raise ConfigError(f"The checkpoint cannot be loaded. {error}") from None


def converted(values: Mapping[str, Any], hidden: Hidden) -> State:
    """A parameter's state from a checkpoint, in the optimizer's formats and on its device.

    Raises:
        ConfigError: the state is of another optimizer, or of a parameter of another shape.
    """
    parameter, group = hidden.parameter, hidden.saved_group
    storage = storage_of(hidden.group, parameter)
    _check(values, parameter)
    saved = _saved_storage(group, values, parameter.dtype) if STORAGE[0] in group else None
    step = torch.as_tensor(values["step"], dtype=torch.float32)
    state: State = {"step": step.to(parameter.device, copy=True)}
    for name, format in storage.states(parameter.dtype).items():
        found = saved and saved.states(parameter.dtype).get(name)
        alike = saved and found == format and saved.group_size == storage.group_size
        if alike and is_distributed(values[name]) == is_distributed(parameter):
            state |= _copied(name, values, parameter, format, storage.group_size)
            continue
        if name in values:
            size = saved.group_size if saved else 0
            decoded = _decoded(name, values, parameter, found or None, size)
            if not is_distributed(values[name]):
                decoded = shard_of(decoded, parameter)
        else:
            decoded = local(parameter)  # the checkpoint has no master copy
        state |= stored_state(name, decoded, parameter, format, storage.group_size)
    return state


def _saved_storage(group: Mapping[str, Any], values: Mapping[str, Any], dtype: Any) -> Storage:
    """How a parameter's states were stored, which is another way where it was distributed."""
    storage = Storage.of(group)
    formats = storage.states(dtype)
    if any(values[name].dtype != formats[name].stored for name in MOMENTS):
        return storage.exact()
    scales = [values[key] for name in formats if (key := f"{name}_scale") in values]
    if scales and scales[0].ndim == 2:
        return replace(storage, group_size=values[MOMENTS[0]].numel() // scales[0].numel())
    return storage


def _check(values: Mapping[str, Any], parameter: Tensor) -> None:
    missing = [name for name in ("step", *MOMENTS) if name not in values]
    if missing:
        raise ConfigError(
            f"The checkpoint has no {', '.join(missing)} for a parameter, but {', '.join(values)}: "
            "it is of another optimizer. Load one of fp8pass.optim.AdamW or torch.optim.AdamW."
        )
    for name in MOMENTS:
        if values[name].shape != parameter.shape:
            raise ConfigError(
                f"The checkpoint's {name} has shape {tuple(values[name].shape)} for a parameter of "
                f"shape {tuple(parameter.shape)}: give the optimizer its parameters in the order "
                "of the one that was saved."
            )


def _copied(
    name: str, values: Mapping[str, Any], parameter: Tensor, format: StateFormat, group_size: int
) -> State:
    """The entries of a state that keeps its format, bit by bit."""
    device = parameter.device
    state = {name: like_parameter(_copy(values[name], device), parameter)}
    for part in format.parts:
        groups = _copy(_part(values, name, part), device).view(-1)
        state[f"{name}_{part}"] = like_groups(groups, parameter, group_size)
    return state


def _decoded(
    name: str,
    values: Mapping[str, Any],
    parameter: Tensor,
    format: StateFormat | None,
    group_size: int,
) -> Tensor:
    """The values of the local shard; without a format they were saved as they are."""
    codes = _copy(values[name], parameter.device)
    if format is None or not format.grouped:
        return codes
    parts = [_copy(_part(values, name, x), codes.device).view(-1) for x in format.parts]
    rows = to_rows(codes, group_size, format.stored)
    return from_rows(decode(Stored(rows, *parts), format), codes.shape)


def _part(values: Mapping[str, Any], name: str, part: str) -> Tensor:
    key = f"{name}_{part}"
    if key not in values:
        raise ConfigError(f"The checkpoint has {name} without its {key}: it is not complete.")
    return values[key]


def _copy(x: Tensor, device: torch.device) -> Tensor:
    return local(x).detach().to(device, copy=True).contiguous()
