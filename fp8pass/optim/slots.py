"""The states of a parameter in `optimizer.state`, and their local tensors.

`state[p]` contains `step`, and for each state one tensor shaped like the parameter. Keys of
quantized states contain the format: `exp_avg:e4m3+expand`, with scales and powers of groups in
`exp_avg:e4m3+expand:scale` and `exp_avg:e4m3+expand:power`. States in BF16 and FP32 have the keys
of `torch.optim.AdamW`. The states of a DTensor are DTensors (`shards.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE
from fp8pass.optim.group_options import Storage
from fp8pass.optim.shards import find_quantized, like_groups, like_parameter, local
from fp8pass.optim.state_formats import Quantized, StateFormat, quantize
from fp8pass.weights.quantized_parameter import QuantizedWeight

State = dict[str, Any]


@dataclass(frozen=True)
class Slot:
    """A parameter, or a slice of a parameter. All tensors are local shards."""

    number: int  # index of the parameter in the optimizer
    parameter: Tensor
    step: Tensor  # number of updates so far, fp32 []
    states: dict[str, Quantized]  # data are shaped like the parameter, scales and powers are [R]
    entries: State  # the parameter's entries in `optimizer.state`
    offloaded: QuantizedWeight | None = None  # has the FP8 data of weights in host memory
    first: int = 0  # position of the slot's first element in the parameter
    shape: tuple[int, ...] = ()  # of the whole parameter, also if the slot is a shard or a slice

    def narrow(self, first: int, size: int, group_size: int) -> Slot:
        """Return the slot of up to `size` elements from `first` on.

        `first` is a multiple of `group_size`.
        """
        elements = slice(first, first + size)
        groups = slice(first // group_size, group_count(first + size, group_size))
        states = {
            name: Quantized(
                stored.data.view(-1)[elements],
                *(None if part is None else part[groups] for part in stored[1:]),
            )
            for name, stored in self.states.items()
        }
        parameter = self.parameter.view(-1)[elements]
        return replace(self, parameter=parameter, states=states, first=self.first + first)

    @classmethod
    def of(cls, number: int, parameter: Tensor, state: State, storage: Storage) -> Slot:
        states = {
            name: Quantized(
                local(state[state_key(name, format)]),
                *(local(state[state_key(name, format, x)]).view(-1) for x in format.parts),
            )
            for name, format in storage.states(parameter.dtype).items()
        }
        weights, shape = local(parameter), tuple(parameter.shape)
        offloaded = find_quantized(parameter)
        return cls(number, weights, state["step"], states, state, offloaded, shape=shape)


def state_key(name: str, format: StateFormat, part: str = "") -> str:
    """Return the key of a state, or of its `part` (`scale` or `power`)."""
    return ":".join([name, *([format.name] if format.grouped else []), *([part] if part else [])])


def name_of(key: str) -> str:
    """Return the state's name, from the key of data, scales or powers."""
    return key.split(":")[0]


def new_state(parameter: Tensor, storage: Storage) -> State:
    weights, size = local(parameter), storage.group_size
    state: State = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    for name, format in storage.states(parameter.dtype).items():
        if name == "master":
            state |= quantize_state(name, weights, parameter, format, size)
            continue
        # Quantizing zeros would need a temporary in fp32.
        data = weights.new_full(weights.shape, format.zero_code, dtype=format.storage_dtype)
        groups = group_count(weights.numel(), size)
        parts = [weights.new_ones(groups, dtype=GROUP_SCALE_DTYPE) for _ in format.parts]
        stored = Quantized(data, *parts)
        state |= state_entries(name, stored, parameter, format, size)
    return state


def quantize_state(
    name: str, values: Tensor, parameter: Tensor, format: StateFormat, group_size: int
) -> State:
    """Return the entries of the state `name` for local `values` of any float dtype."""
    stored = quantize(to_rows(values, group_size, torch.float32), format)
    stored = stored._replace(data=from_rows(stored.data, values.shape))
    return state_entries(name, stored, parameter, format, group_size)


def state_entries(
    name: str, stored: Quantized, parameter: Tensor, format: StateFormat, group_size: int
) -> State:
    """Return the entries of the state `name`.

    The data in `stored` are shaped like the local parameter. Scales and powers are [R].
    """
    state = {state_key(name, format): like_parameter(stored.data, parameter)}
    for part in format.parts:
        groups = like_groups(getattr(stored, part), parameter, group_size)
        state[state_key(name, format, part)] = groups
    return state


def group_count(elements: int, group_size: int) -> int:
    """Return the number of groups. The last group may be shorter."""
    return -(-elements // group_size)


def to_rows(x: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Return the elements of `x` as rows [R, G], padded with zeros."""
    rows = torch.zeros(group_count(x.numel(), group_size), group_size, dtype=dtype, device=x.device)
    rows.view(-1)[: x.numel()].copy_(x.reshape(-1))
    return rows


def from_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """Return a copy of rows [R, G] in `shape`, without the padding."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape).clone()
