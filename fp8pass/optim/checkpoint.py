"""Convert states in other formats, or of `torch.optim.AdamW`, to an optimizer's formats.

The keys of a state contain its format (`slots.py`), and the number of scales determines the size of
groups. The options of the checkpoint's parameter groups do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.config import ConfigError
from fp8pass.optim.groups import Stored, decode
from fp8pass.optim.options import LARGEST_GROUP, OWN, SMALLEST_GROUP, Storage, check_group
from fp8pass.optim.shards import is_distributed, like_groups, like_parameter, local, shard_of
from fp8pass.optim.slots import (
    State,
    from_rows,
    group_count,
    name_of,
    state_key,
    stored_state,
    to_rows,
)
from fp8pass.optim.state_formats import StateFormat, moment_format

MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = ("step", *MOMENTS, "master")
# How the keys of a state's parts end.
PARTS = (":scale", ":power")


@dataclass(frozen=True, eq=False)
class Hidden:
    """A key that hides a parameter from PyTorch, with the options of its group."""

    parameter: Tensor
    group: dict[str, Any]


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
        _check_options({**own, "params": group["params"]})
        merged.append({**own, "params": saved["params"]})
        for key, parameter in zip(saved["params"], group["params"], strict=False):
            if key in states:
                states[Hidden(parameter, own)] = states.pop(key)
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


def _check_options(own: Mapping[str, Any]) -> None:
    """Raise ConfigError if a group with options of a checkpoint has an invalid one."""
    try:
        check_group(own)
    except ConfigError as error:
        raise ConfigError(f"The checkpoint cannot be loaded. {error}") from None


def converted(values: Mapping[str, Any], parameter: Tensor, storage: Storage) -> State:
    """A parameter's state in the formats of `storage`, on the parameter's device.

    Args:
        values: a state in any formats, of this optimizer or of `torch.optim.AdamW`.
        parameter: float [...], or a DTensor.
        storage: how the parameter's states are stored from now on.

    Raises:
        ConfigError: the state is of another optimizer, of a parameter of another shape, or not
            complete.
    """
    if "step" not in values:
        raise _of_another_optimizer("step", values)
    formats = storage.states(parameter.dtype)
    found = _found(values, formats)
    for name, saved in found.items():
        if saved is None and name in MOMENTS:
            raise _of_another_optimizer(name, values)
        if saved is not None and saved.codes.shape != parameter.shape:
            raise ConfigError(
                f"The state {name} has shape {tuple(saved.codes.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: give the optimizer its parameters in the order of the "
                "one that was saved."
            )
    step = torch.as_tensor(values["step"], dtype=torch.float32)
    state: State = {"step": step.to(parameter.device, copy=True)}
    for name, format in formats.items():
        state |= _converted(name, found[name], parameter, format, storage.group_size)
    return state


def is_converted(
    values: Mapping[str, Any], parameter: Tensor, storage: Storage, device: torch.device
) -> bool:
    """Whether a parameter's state is in the formats of `storage`, on `device`."""
    formats = storage.states(parameter.dtype)
    if any(name_of(key) in STATES and name_of(key) not in ("step", *formats) for key in values):
        return False
    return all(
        saved is not None
        and saved.codes.device == device
        and saved.codes.shape == parameter.shape
        and saved.is_stored_as(formats[name], storage.group_size)
        for name, saved in _found(values, formats).items()
    )


@dataclass(frozen=True)
class Saved:
    """A state of a checkpoint: floating-point values, or codes with their format.

    Attributes:
        codes: values or codes, shaped like the parameter.
        format: the format of codes; None for floating-point values.
        parts: scales, and powers if the format has them, of the groups of consecutive elements.
    """

    codes: Tensor
    format: StateFormat | None = None
    parts: tuple[Tensor, ...] = ()

    def is_stored_as(self, format: StateFormat, group_size: int) -> bool:
        """Whether these are the tensors that a state in `format` has."""
        if not format.grouped or self.format != format:
            return self.format is None and self.codes.dtype == format.stored
        return self.parts[0].numel() == group_count(self.codes.numel(), group_size)

    def decode(self, device: torch.device) -> Tensor:
        """The values of the local shard, in any float dtype."""
        codes = _copy(self.codes, device)
        if self.format is None:
            return codes
        parts = [_copy(x, device).view(-1) for x in self.parts]
        rows = to_rows(codes, self.group_size(), self.format.stored)
        return from_rows(decode(Stored(rows, *parts), self.format), codes.shape)

    def group_size(self) -> int:
        """The size that gives as many groups as there are scales."""
        elements, groups = self.codes.numel(), self.parts[0].numel()
        sizes = (1 << i for i in range(SMALLEST_GROUP.bit_length() - 1, LARGEST_GROUP.bit_length()))
        for size in sizes:
            if group_count(elements, size) == groups:
                return size
        raise ConfigError(
            f"The checkpoint has {groups} scales for the {elements} elements of a state: it is "
            "not complete."
        )


def _found(
    values: Mapping[str, Any], formats: Mapping[str, StateFormat]
) -> dict[str, Saved | None]:
    """The states of a parameter, by name; `formats` are the formats of the optimizer."""
    return {name: _find(name, values, format) for name, format in formats.items()}


def _find(name: str, values: Mapping[str, Any], own: StateFormat) -> Saved | None:
    """Find the state `name` among the entries of a parameter; None if it has none.

    PyTorch merges a full state dict into the optimizer's own. The result has the state twice, once
    in the optimizer's format `own`: the other one is the checkpoint's.
    """
    keys = [key for key in values if name_of(key) == name and not key.endswith(PARTS)]
    others = [key for key in keys if key != state_key(name, own)]
    if not keys:
        return None
    if len(others) > 1:
        raise ConfigError(
            f"The checkpoint has {' and '.join(others)} for one parameter: load what "
            "optimizer.state_dict() returned."
        )
    return saved_state(name, (others or keys)[0], values)


def saved_state(name: str, key: str, values: Mapping[str, Any]) -> Saved:
    """Return the state `name` of a parameter from its entry `key` and the entries of its groups.

    Raises:
        ConfigError: the format is unknown, or an entry of the groups is missing.
    """
    codes = values[key]
    if key == name:
        if not codes.is_floating_point():
            raise ConfigError(
                f"The checkpoint's {name} is {graph.dtype_text(codes.dtype)}, not floating point: "
                "these are codes of an unknown format. Load a checkpoint of fp8pass.optim.AdamW or "
                "torch.optim.AdamW."
            )
        return Saved(codes)
    try:
        format = moment_format(key.removeprefix(f"{name}:"), signed=name != "exp_avg_sq")
    except ConfigError as error:
        raise ConfigError(f"The checkpoint cannot be loaded. {name}: {error}") from None
    parts = [state_key(name, format, part) for part in format.parts]
    if missing := [x for x in parts if x not in values]:
        raise ConfigError(f"The checkpoint has {key} without {missing[0]}: it is not complete.")
    return Saved(codes, format, tuple(values[x] for x in parts))


def _of_another_optimizer(missing: str, values: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        f"The checkpoint has no {missing} for a parameter, but {', '.join(values)}: it is of "
        "another optimizer. Load one of fp8pass.optim.AdamW or torch.optim.AdamW."
    )


def _converted(
    name: str, saved: Saved | None, parameter: Tensor, format: StateFormat, group_size: int
) -> State:
    """The entries of the state `name` in `format`, bit by bit if it was saved in this format."""
    if saved is None:  # a master copy
        return stored_state(name, local(parameter), parameter, format, group_size)
    distributed = is_distributed(saved.codes)
    if not saved.is_stored_as(format, group_size) or distributed != is_distributed(parameter):
        values = saved.decode(parameter.device)
        values = values if distributed else shard_of(values, parameter)
        return stored_state(name, values, parameter, format, group_size)
    codes = _copy(saved.codes, parameter.device)
    state = {state_key(name, format): like_parameter(codes, parameter)}
    for part, groups in zip(format.parts, saved.parts, strict=True):
        copied = _copy(groups, parameter.device).view(-1)
        state[state_key(name, format, part)] = like_groups(copied, parameter, group_size)
    return state


def _copy(x: Tensor, device: torch.device) -> Tensor:
    return local(x).detach().to(device, copy=True).contiguous()
