"""The states of a parameter in the optimizer's `state`, and their local tensors.

`state[p]` has `step` and for each state its values or codes, shaped like the parameter. The keys of
codes contain their format, for example `exp_avg:e4m3+expand`, so that no reader takes codes for
values, or codes of one format for codes of another. Formats with groups of consecutive elements
add `exp_avg:e4m3+expand:scale` and perhaps `exp_avg:e4m3+expand:power`, with one number for each
group. States in BF16 and FP32 have the keys of `torch.optim.AdamW`. The states of a DTensor are
DTensors (`shards.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE
from fp8pass.optim.groups import Stored, encode
from fp8pass.optim.options import Storage
from fp8pass.optim.shards import like_groups, like_parameter, local
from fp8pass.optim.state_formats import StateFormat

State = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """One parameter to update, or a piece of it, all tensors local.

    Attributes:
        number: number of the parameter in the optimizer.
        parameter: the weights.
        step: number of updates so far, a scalar.
        states: the states by name, each shaped like the parameter, with scales of its groups.
        first: position of a piece's first element in the parameter.
    """

    number: int
    parameter: Tensor
    step: Tensor
    states: dict[str, Stored]
    first: int = 0

    def piece(self, first: int, size: int, group_size: int) -> Slot:
        """Up to `size` elements from `first`, a multiple of `group_size`, as views."""
        elements = slice(first, first + size)
        groups = slice(first // group_size, group_count(first + size, group_size))
        states = {
            name: Stored(
                stored.codes.view(-1)[elements],
                *(None if part is None else part[groups] for part in stored[1:]),
            )
            for name, stored in self.states.items()
        }
        parameter = self.parameter.view(-1)[elements]
        return Slot(self.number, parameter, self.step, states, self.first + first)

    @classmethod
    def of(cls, number: int, parameter: Tensor, state: State, storage: Storage) -> Slot:
        """The slot of a parameter with its `state`."""
        weights = local(parameter)
        states = {
            name: Stored(
                local(state[state_key(name, format)]),
                *(local(state[state_key(name, format, x)]).view(-1) for x in format.parts),
            )
            for name, format in storage.states(parameter.dtype).items()
        }
        return cls(number, weights, state["step"], states)


def state_key(name: str, format: StateFormat, part: str = "") -> str:
    """The key of the state `name` in `format`, or of a part of it (`scale`, `power`)."""
    return ":".join([name, *([format.name] if format.grouped else []), *([part] if part else [])])


def name_of(key: str) -> str:
    """The name of the state that a key belongs to; of other keys the key itself."""
    return key.split(":")[0]


def new_state(parameter: Tensor, storage: Storage) -> State:
    """The state of a parameter before its first update."""
    state: State = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    for name, format in storage.states(parameter.dtype).items():
        if name == "master":
            state |= stored_state(name, local(parameter), parameter, format, storage.group_size)
        else:
            state |= _zeros(name, parameter, format, storage.group_size)
    return state


def stored_state(
    name: str, values: Tensor, parameter: Tensor, format: StateFormat, group_size: int
) -> State:
    """The entries of the state `name` for `values` of the local shard, in any float dtype."""
    rows = to_rows(values, group_size, torch.float32)
    stored = encode(rows, format)
    codes = from_rows(stored.codes, values.shape)
    state = {state_key(name, format): like_parameter(codes, parameter)}
    for part in format.parts:
        groups = getattr(stored, part)
        state[state_key(name, format, part)] = like_groups(groups, parameter, group_size)
    return state


def _zeros(name: str, parameter: Tensor, format: StateFormat, group_size: int) -> State:
    """The entries of a state that is zero, made without fp32 values."""
    weights = local(parameter)
    codes = weights.new_full(weights.shape, format.zero, dtype=format.stored)
    state = {state_key(name, format): like_parameter(codes, parameter)}
    groups = group_count(weights.numel(), group_size)
    for part in format.parts:
        ones = torch.ones(groups, dtype=GROUP_SCALE_DTYPE, device=weights.device)
        state[state_key(name, format, part)] = like_groups(ones, parameter, group_size)
    return state


def group_count(elements: int, group_size: int) -> int:
    """Number of groups of consecutive elements; the last may be shorter."""
    return -(-elements // group_size)


def to_rows(x: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """`x` as rows [R, G] of consecutive elements, padded with zeros."""
    rows = torch.zeros(group_count(x.numel(), group_size), group_size, dtype=dtype, device=x.device)
    rows.view(-1)[: x.numel()].copy_(x.reshape(-1))
    return rows


def from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """The elements of rows [R, G] in `shape`, without the padding; a copy."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape).clone()
