"""Conversion of checkpointed states to an optimizer's formats, also during DCP loads.

A checkpoint may contain states in other formats or of `torch.optim`. Keys (`slots.py`) and the
number of scales determine a state's format; the options in the checkpoint do not matter.

`torch.distributed.checkpoint` (DCP) reads entries into the optimizer's tensors with the same keys.
States in other formats are read into new tensors, which are converted after the read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.optim.group_options import (
    FORMATS,
    LARGEST_GROUP,
    METHODS,
    MOMENTS,
    OWN,
    SMALLEST_GROUP,
    Storage,
    check_group,
    format_of_state,
)
from fp8pass.optim.shards import DTensor, like_groups, like_parameter, local, shard_of
from fp8pass.optim.slots import (
    State,
    from_rows,
    group_count,
    name_of,
    quantize_state,
    state_entries,
    state_key,
    to_rows,
)
from fp8pass.optim.state_formats import PLAIN, Quantized, StateFormat, dequantize
from fp8pass.option_checks import ConfigError

STATES = ("step", *MOMENTS, "master")
# Names of states of the optimizers that do not count updates in `torch.optim` (Muon).
UNCOUNTED = {x for m in METHODS if "step" not in m.torch_states for x in m.moments.values()}
# Suffixes of the keys of scales and powers.
PARTS = (":scale", ":power")
# `torch.optim` does not have these options.
UNKNOWN_TO_TORCH = (*OWN, "seed", "state_rounding")
PLAIN_OF_DTYPE = {format.dtype: format for format in PLAIN.values()}


@dataclass(frozen=True, eq=False)
class HiddenParameter:
    """Replaces a parameter as the key of its loaded state.

    PyTorch would cast the state of a parameter to the parameter's dtype.
    """

    parameter: Tensor
    group: dict[str, Any]


@dataclass(frozen=True)
class SavedState:
    """One state of a parameter, such as `exp_avg`, in any format."""

    data: Tensor  # floating-point values or quantized data, shaped like the parameter
    format: StateFormat | None = None  # None for floating-point values
    parts: tuple[Tensor, ...] = ()  # scales, and powers if the format has them

    def is_stored_as(self, format: StateFormat, group_size: int) -> bool:
        if not format.grouped:
            return self.format is None and self.data.dtype == format.dtype
        groups = group_count(self.data.numel(), group_size)
        return self.format == format and self.parts[0].numel() == groups

    def copy(self, device: torch.device) -> Quantized:
        """Copy the local shards to `device`. Scales and powers have shape [R]."""
        data, *parts = (
            local(x).detach().to(device, copy=True).contiguous() for x in (self.data, *self.parts)
        )
        return Quantized(data, *(x.view(-1) for x in parts))

    def dequantize(self, device: torch.device) -> Tensor:
        """Return the local values. Unquantized values keep their dtype."""
        copied = self.copy(device)
        if self.format is None:
            return copied.data
        rows = to_rows(copied.data, self.group_size(), self.format.storage_dtype)
        return from_rows(dequantize(copied._replace(data=rows), self.format), copied.data.shape)

    def group_size(self) -> int:
        elements, groups = self.data.numel(), self.parts[0].numel()
        for exponent in range(SMALLEST_GROUP.bit_length() - 1, LARGEST_GROUP.bit_length()):
            if group_count(elements, 1 << exponent) == groups:
                return 1 << exponent
        raise ConfigError(
            f"The checkpoint is incomplete: it has {groups} scales for a state of {elements} "
            "elements. Save the whole optimizer.state_dict()."
        )


def hide_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with `HiddenParameter` keys, so that PyTorch does not cast the states.

    The groups of the result have the optimizer's values of the options in `OWN`.
    """
    check_has_states(state_dict)
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if any(group.get("amsgrad") for group in saved_groups):
        raise ConfigError(
            "The checkpoint is from an optimizer with amsgrad=True, which fp8pass.optim.AdamW does "
            "not support. Continue with torch.optim.AdamW, or start without the checkpoint."
        )
    states, merged = dict(state_dict["state"]), []
    for saved, group in zip(saved_groups, groups, strict=False):
        own = {**group, **{k: v for k, v in saved.items() if k not in OWN}}
        try:
            check_group({**own, "params": group["params"]})
        except ConfigError as error:
            raise ConfigError(f"The checkpoint cannot be loaded. {error}") from None
        merged.append({**own, "params": saved["params"]})
        for key, parameter in zip(saved["params"], group["params"], strict=False):
            if key in states:
                states[HiddenParameter(parameter, own)] = states.pop(key)
    # Keep additional groups of the checkpoint, so that PyTorch raises an error about them.
    merged += saved_groups[len(merged) :]
    return {**state_dict, "state": states, "param_groups": merged}


def check_has_states(given: Any) -> None:
    keys = given if isinstance(given, Mapping) else ()
    if missing := {"state", "param_groups"} - set(keys):
        raise ConfigError(
            f"The checkpoint ({type(given).__name__}) has no {', '.join(sorted(missing))}, so it "
            "is not the state dict of an optimizer. Load what optimizer.state_dict() returned."
        )


def convert(values: Mapping[str, Any], parameter: Tensor, storage: Storage) -> State:
    """Return a parameter's state in the formats of `storage`, on the parameter's device.

    States that are already in the right format are copied bit by bit. `values` may be a state of
    `torch.optim`.
    """
    formats = storage.states(parameter.dtype)
    found = {name: _find(name, values, format) for name, format in formats.items()}
    method = storage.method
    for name in method.torch_states:
        if found.get(name) is None and name not in values:
            raise ConfigError(
                "The checkpoint is from another optimizer: a parameter has the states "
                f"{', '.join(values)}, but no {name}. Load a checkpoint of "
                f"fp8pass.optim.{method.name} or torch.optim.{method.name}."
            )
    step = torch.as_tensor(values.get("step", 0.0), dtype=torch.float32)
    state: State = {"step": step.to(parameter.device, copy=True)}
    for name, format in formats.items():
        saved, size = found[name], storage.group_size
        if saved is None:  # a checkpoint without master copies
            state |= quantize_state(name, local(parameter), parameter, format, size)
            continue
        if saved.data.shape != parameter.shape:
            raise ConfigError(
                f"The state {name} has shape {tuple(saved.data.shape)}, but the parameter has "
                f"shape {tuple(parameter.shape)}. If the state is from a checkpoint, create the "
                "optimizer with the parameters in the same order as before saving."
            )
        distributed = isinstance(saved.data, DTensor)
        if saved.is_stored_as(format, size) and distributed == isinstance(parameter, DTensor):
            state |= state_entries(name, saved.copy(parameter.device), parameter, format, size)
        else:
            new = saved.dequantize(parameter.device)
            new = new if distributed else shard_of(new, parameter)
            state |= quantize_state(name, new, parameter, format, size)
    return state


def is_converted(
    values: Mapping[str, Any], parameter: Tensor, storage: Storage, device: torch.device
) -> bool:
    formats = storage.states(parameter.dtype)
    keys = {key for key in values if name_of(key) in STATES and not key.endswith(PARTS)}
    if keys != {"step", *(state_key(name, format) for name, format in formats.items())}:
        return False
    for name, format in formats.items():
        saved = _read_state(name, state_key(name, format), values)
        where = saved.data.device, saved.data.shape
        if where != (device, parameter.shape) or not saved.is_stored_as(format, storage.group_size):
            return False
    return True


def _find(name: str, values: Mapping[str, Any], own: StateFormat) -> SavedState | None:
    """Return the state `name`, if any.

    When PyTorch merges a full state dict, `values` contains the state twice: in the format `own`,
    and in the checkpoint's format. The state in the checkpoint's format is returned.
    """
    keys = [key for key in values if name_of(key) == name and not key.endswith(PARTS)]
    others = [key for key in keys if key != state_key(name, own)]
    if len(others) > 1:
        raise ConfigError(
            f"The checkpoint has both {' and '.join(others)} for one parameter. Load what "
            "optimizer.state_dict() returned."
        )
    return _read_state(name, (others or keys)[0], values) if keys else None


def _read_state(name: str, key: str, values: Mapping[str, Any]) -> SavedState:
    data = values[key]
    if key == name:
        if not data.is_floating_point():
            raise ConfigError(
                f"The checkpoint's {name} is {graph.dtype_text(data.dtype)}, not floating point, "
                "so its format is unknown. Load what optimizer.state_dict() returned."
            )
        return SavedState(data)
    try:
        format = format_of_state(name, key.removeprefix(f"{name}:"))
    except ConfigError as error:
        raise ConfigError(f"The checkpoint cannot be loaded. {name}: {error}") from None
    parts = [state_key(name, format, part) for part in format.parts]
    if missing := [x for x in parts if x not in values]:
        raise ConfigError(
            f"The checkpoint is incomplete: it has {key} without {missing[0]}. Load what "
            "optimizer.state_dict() returned."
        )
    return SavedState(data, format, tuple(values[x] for x in parts))


def stage_states(
    state_dict: dict[str, Any], saved: Mapping[str, Any]
) -> dict[str, Callable[[], None]]:
    """In `state_dict`, replace the states that the checkpoint has in another format.

    The new entries are empty tensors in the checkpoint's format, which DCP fills. `saved` contains
    the metadata of the checkpoint's entries. Return, for each new entry of `state_dict`, the
    function that converts the state after the read.
    """
    theirs = _group_by_state(saved)
    conversions: dict[str, Callable[[], None]] = {}
    for (prefix, name), own in _group_by_state(state_dict).items():
        found = theirs.get((prefix, name), {})
        is_equal = own.keys() == found.keys() and all(own[k].shape == found[k].size for k in own)
        if is_equal or not _is_of_fp8pass(prefix, state_dict):  # loaded without conversion
            continue
        staged = _make_staging_tensors(name, own, found)
        if not found and name == "master" and any((prefix, x) in theirs for x in MOMENTS):
            # The checkpoint has no master copy. The next step replaces all elements of the
            # optimizer's master copy that differ from the loaded weights.
            staged = {}
        if staged is None:  # DCP raises an error about the first missing key
            continue
        for key in own:
            del state_dict[prefix + key]
        # DCP calls this function once, after it has read the last entry of the state.
        convert_entries = partial(_convert_staged, name, own, staged)
        for key, x in staged.items():
            state_dict[prefix + key] = x
            conversions[prefix + key] = convert_entries
    # `torch.optim.Muon` does not save the number of updates.
    for entry in [f"{prefix}step" for prefix, name in theirs if name in UNCOUNTED]:
        if entry not in saved:
            state_dict.pop(entry, None)
    # The optimizer keeps its own values of the options that the checkpoint lacks.
    prefixes = tuple({_groups_prefix(prefix) for prefix, _ in theirs})
    for entry in [x for x in state_dict if x not in saved and x.startswith(prefixes)]:
        if entry.rpartition(".")[2] in UNKNOWN_TO_TORCH:
            del state_dict[entry]
    return conversions


@torch.no_grad()
def _convert_staged(name: str, own: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    saved = _read_state(name, _data_key(read), read)
    target = _read_state(name, _data_key(own), own)
    format = target.format or PLAIN_OF_DTYPE[target.data.dtype]
    group_size = target.group_size() if target.format else LARGEST_GROUP
    values = saved.dequantize(target.data.device)
    new = quantize_state(name, values, target.data, format, group_size)
    for key, x in own.items():
        local(x).copy_(local(new[key]))


def _group_by_state(entries: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for entry, value in entries.items():
        prefix, dot, key = entry.rpartition(".")
        if name_of(key) in (*MOMENTS, "master") and hasattr(value, "size"):
            found[prefix + dot, name_of(key)][key] = value
    return found


def _groups_prefix(prefix: str) -> str:
    return prefix.rpartition("state.")[0] + "param_groups."


def _is_of_fp8pass(prefix: str, state_dict: Mapping[str, Any]) -> bool:
    groups = _groups_prefix(prefix)
    options = tuple(f".{option}" for option in FORMATS)
    return any(x.startswith(groups) and x.endswith(options) for x in state_dict)


def _data_key(entries: Mapping[str, Any]) -> str:
    """Return the only key of data (not of scales or powers), or "" if there are several or none."""
    keys = [key for key in entries if not key.endswith(PARTS)]
    return keys[0] if len(keys) == 1 else ""


def _make_staging_tensors(
    name: str, own: dict[str, Tensor], found: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """Return empty tensors in the checkpoint's format, or None if conversion is impossible."""
    key = _data_key(found)
    like = own.get(_data_key(own))
    if not key or like is None or found[key].size != like.shape:
        return None
    read: dict[str, Tensor] = {}
    for entry, meta in found.items():
        made = _new_empty(meta, like, is_part=entry != key)
        if made is None:
            return None
        read[entry] = made
    _read_state(name, key, read)  # checks that the state is complete
    return read


def _new_empty(meta: Any, like: Tensor, *, is_part: bool) -> Tensor | None:
    """Return an empty tensor distributed like `like`, or None if groups would cross shards.

    `meta` describes the whole tensor, which has scales or powers if `is_part`, and data otherwise.
    """
    shard, shape, dtype = local(like), meta.size, meta.properties.dtype
    if not isinstance(like, DTensor):
        return shard.new_empty(shape, dtype=dtype)
    if not is_part:
        return like_parameter(shard.new_empty(shard.shape, dtype=dtype), like)
    row, shard_row = math.prod(like.shape[1:]), math.prod(shard.shape[1:])
    size = row // shape[1] if len(shape) == 2 and shape[1] else 0
    if not SMALLEST_GROUP <= size <= LARGEST_GROUP or row % shape[1] or shard_row % size:
        return None
    groups = shard.new_empty(shard.shape[0] * (shard_row // size), dtype=dtype)
    return like_groups(groups, like, size)
