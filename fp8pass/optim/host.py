"""What of an optimizer is on the host, and whether the host has room for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fp8pass.config import ConfigError
from fp8pass.optim.options import state_bytes
from fp8pass.optim.shards import local
from fp8pass.runtime.arena import available
from fp8pass.weights.quantized_parameter import CodedWeight

# Of a smaller parameter the states stay where it is: norms and biases are many, and no memory.
SMALLEST = 1 << 16


def is_offloaded(group: Mapping[str, Any], name: str, parameter: Tensor) -> bool:
    """Whether `name` of a parameter of an optimizer's group is on the host."""
    if isinstance(parameter, CodedWeight):
        if parameter.source is None:  # codes are all of a frozen weight
            return False
        if name == "states":  # they follow the weight
            return True
    values = local(parameter)
    in_pieces = name != "states" or values.is_contiguous()  # pieces of its weights are views
    return name in group["offload"] and values.numel() >= SMALLEST and in_pieces


def check_room(groups: Iterable[Mapping[str, Any]]) -> None:
    """Check before the first step that the host has room for all that goes there.

    Raises:
        ConfigError: it has not.
    """
    offloaded = [(g, p) for g in groups for p in g["params"] if is_offloaded(g, "states", p)]
    needed, found = sum(state_bytes(g, local(p)) for g, p in offloaded), available()
    if found is not None and needed > found:
        raise ConfigError(
            f"The optimizer's states take {needed / 2**30:.1f} GiB of the host, which has "
            f"{found / 2**30:.1f} GiB left: take states of fewer bytes (preset, first_moment, "
            "second_moment, weights), or leave them on the GPU in some of the parameter groups."
        )
