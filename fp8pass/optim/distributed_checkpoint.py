"""Convert states while `torch.distributed.checkpoint` (DCP) loads them.

DCP reads into the tensors of the optimizer and finds only entries with the same keys. Where the
checkpoint has a state in another format, DCP reads into new tensors in that format instead. These
are converted into the tensors of the optimizer as soon as they have been read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.checkpoint import MOMENTS, PARTS, saved_state
from fp8pass.optim.options import LARGEST_GROUP, OWN, SMALLEST_GROUP
from fp8pass.optim.shards import is_distributed, like_groups, like_parameter, local
from fp8pass.optim.slots import name_of, stored_state
from fp8pass.optim.state_formats import PLAIN

NAMES = (*MOMENTS, "master")
# Options that a parameter group of `torch.optim.AdamW` does not have.
UNKNOWN_TO_TORCH = (*OWN, "seed", "state_rounding")
PLAIN_OF_DTYPE = {format.dtype: format for format in PLAIN.values()}


@dataclass(frozen=True, eq=False)
class Staged:
    """A state in the checkpoint's format, to be converted into the optimizer's tensors.

    Attributes:
        name: name of the state.
        own: the optimizer's tensors, by key.
        read: the tensors that DCP reads into, by key; empty if the state stays.
    """

    name: str
    own: dict[str, Tensor]
    read: dict[str, Tensor]

    @torch.no_grad()
    def convert(self) -> None:
        """Write what was read into the optimizer's tensors."""
        saved = saved_state(self.name, _key_of(self.read), self.read)
        own = saved_state(self.name, _key_of(self.own), self.own)
        values = saved.decode(own.codes.device)
        format = own.format or PLAIN_OF_DTYPE[own.codes.dtype]
        group_size = own.group_size() if own.format else LARGEST_GROUP
        new = stored_state(self.name, values, own.codes, format, group_size)
        for key, x in self.own.items():
            local(x).copy_(local(new[key]))


def stage_states(
    state_dict: dict[str, Any], saved: Mapping[str, Any]
) -> dict[str, Callable[[], None]]:
    """Replace the states in `state_dict` that the checkpoint has in another format.

    Args:
        state_dict: the flat state dict that DCP loads into.
        saved: the metadata of the checkpoint's entries.

    Returns:
        The conversion that each new entry takes part in.
    """
    theirs = _by_state(saved)
    conversions: dict[str, Callable[[], None]] = {}
    for (prefix, name), own in _by_state(state_dict).items():
        found = theirs.get((prefix, name), {})
        if _are_alike(own, found) or not _is_of_adamw(prefix, state_dict):
            continue
        staged = _stage(name, own, found)
        if not found and name == "master" and (prefix, MOMENTS[0]) in theirs:
            # The next step continues from the weights, where a master copy differs from them.
            staged = Staged(name, own, {})
        if staged is None:  # DCP raises an error about the first missing key
            continue
        for key in own:
            del state_dict[prefix + key]
        for key, x in staged.read.items():
            state_dict[prefix + key] = x
            conversions[prefix + key] = staged.convert
    _keep_own_options(state_dict, saved, {_groups_of(prefix) for prefix, _ in theirs})
    return conversions


def _by_state(entries: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The entries of each state, by the prefix of its parameter and its name."""
    found: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for entry, value in entries.items():
        prefix, dot, key = entry.rpartition(".")
        if name_of(key) in NAMES and hasattr(value, "size"):
            found[prefix + dot, name_of(key)][key] = value
    return found


def _are_alike(own: Mapping[str, Tensor], found: Mapping[str, Any]) -> bool:
    """Whether keys and sizes agree, so that DCP loads the state by itself."""
    return own.keys() == found.keys() and all(x.shape == found[key].size for key, x in own.items())


def _groups_of(prefix: str) -> str:
    """The prefix of the parameter groups that belong to the states of a parameter."""
    return prefix.rpartition("state.")[0] + "param_groups."


def _is_of_adamw(prefix: str, state_dict: Mapping[str, Any]) -> bool:
    """Whether a parameter belongs to an `fp8pass.optim.AdamW`, by the options of its groups."""
    groups = _groups_of(prefix)
    return any(x.startswith(groups) and x.endswith(".first_moment") for x in state_dict)


def _keep_own_options(
    state_dict: dict[str, Any], saved: Mapping[str, Any], groups: set[str]
) -> None:
    """Keep the optimizer's own options where a checkpoint with moments does not have them."""
    for entry in [x for x in state_dict if x not in saved]:
        option = entry.rpartition(".")[2]
        if option in UNKNOWN_TO_TORCH and entry.startswith(tuple(groups)):
            del state_dict[entry]


def _key_of(entries: Mapping[str, Any]) -> str:
    """The key of the values or the quantized data of a state; empty if there is not exactly one."""
    keys = [key for key in entries if not key.endswith(PARTS)]
    return keys[0] if len(keys) == 1 else ""


def _stage(name: str, own: dict[str, Tensor], found: Mapping[str, Any]) -> Staged | None:
    """New tensors for a state as the checkpoint has it; None if it cannot be converted."""
    key = _key_of(found)
    like = own.get(_key_of(own))
    if not key or like is None or found[key].size != like.shape:
        return None
    read: dict[str, Tensor] = {}
    for entry, meta in found.items():
        shape = like.shape if entry == key else meta.size
        made = _empty(shape, meta.properties.dtype, like, is_part=entry != key)
        if made is None:
            return None
        read[entry] = made
    saved_state(name, key, read)  # raises ConfigError if the state is not complete
    return Staged(name, own, read)


def _empty(shape: torch.Size, dtype: torch.dtype, like: Tensor, *, is_part: bool) -> Tensor | None:
    """A new tensor for the state of a parameter; None if groups lie in several ranks' shards."""
    shard = local(like)
    if not is_distributed(like):
        return shard.new_empty(shape, dtype=dtype)
    if not is_part:
        return like_parameter(shard.new_empty(shard.shape, dtype=dtype), like)
    row, shard_row = math.prod(like.shape[1:]), math.prod(shard.shape[1:])
    size = row // shape[1] if len(shape) == 2 and shape[1] else 0
    if not SMALLEST_GROUP <= size <= LARGEST_GROUP or row % shape[1] or shard_row % size:
        return None
    groups = shard.new_empty(shard.shape[0] * (shard_row // size), dtype=dtype)
    return like_groups(groups, like, size)
