"""Weights on the host, with their codes on the device: a byte an element there instead of two.

Linear layers take part in graphs as codes (`weights/quantized_parameter.py`). `AdamW` quantizes the
weights again when it updates them: once a step, however many backwards it sums (LLMQ 3).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import ConfigError, checked_patterns
from fp8pass.graph.names import common_reasons
from fp8pass.optim.host import SMALLEST
from fp8pass.optim.kernel import CHUNK
from fp8pass.optim.staging import STAGED_BYTES
from fp8pass.runtime.arena import Arena
from fp8pass.weights.choice import choose
from fp8pass.weights.quantized_parameter import CodedWeight, coded

log = logging.getLogger("fp8pass")

# Elements of the smallest part of a weight that has whole rows and whole programs of the update.
LARGEST_PIECE = STAGED_BYTES // 16


def offload_weights(
    model: nn.Module, device: torch.device | str, *, skip: str | Sequence[str] = ()
) -> nn.Module:
    """Move a model to a device, where its linear layers have their weights in codes.

        model = LlamaForCausalLM(config).bfloat16()         # on the host
        fp8pass.optim.offload_weights(model, "cuda")
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-4, offload=("states",))
        model.compile(backend="fp8pass")

    The weights stay on the host, in memory that the GPU copies from, and so do the optimizer's
    states of these. Compiled code multiplies their codes. Every other operator reads the exact
    weights, which cross the link for it, and writes to them; the codes are made again before their
    next use. Writes to a part or to a view of a weight raise RuntimeError. `fully_shard` and
    `parallelize_module` shard the exact weights on the device: they end the offloading. Call this
    before the optimizer is made, and before the model is compiled.

    Args:
        model: a module with BF16 weights, on the host or on the device.
        device: where it trains.
        skip: paths of linear layers, or parts of them with *, that go to the device as they are.
            So do output heads, layers that cannot run in FP8, and all other parameters.

    Returns:
        The model.

    Raises:
        ConfigError: no layer's weight can be in codes, or there is no such device.
    """
    device = _found(device)
    layers = layers_to_code(model, checked_patterns("skip", skip))
    arena, moved = Arena(device), []
    while layers:  # one weight after the other is freed where it was
        weight, users = layers.popitem()
        moved.append((users, _in_codes(weight, device, arena)))
        for layer in users:
            layer.weight = None  # type: ignore[assignment]
    # Codes come to their places last: modules would move them as if they were numbers.
    model.to(device)
    for users, parameter in moved:
        for layer in users:
            layer.weight = parameter
            layer.register_state_dict_post_hook(_give_source)
    return model


def layers_to_code(model: nn.Module, skip: tuple[str, ...]) -> dict[Tensor, list[nn.Linear]]:
    """The layers whose weights can be in codes, by their weight, which several may share."""
    choice = choose(model, skip, _why_not_in_codes)
    for path, why in choice.reasons.items():
        log.info(
            "offload_weights: the weight of %s goes to the GPU as it is, not in FP8 codes: %s.",
            path,
            why,
        )
    if not choice.layers:
        listed = "; ".join(common_reasons(choice.reasons))
        raise ConfigError(
            "No weight of the model can be in host memory with FP8 data on the device: "
            f"{listed or 'it has no linear layer'}."
        )
    return choice.layers


def _why_not_in_codes(weight: Tensor) -> str:
    if weight.dtype is not torch.bfloat16:
        return f"it is in {graph.dtype_text(weight.dtype)}; model.bfloat16() comes first"
    if math.lcm(CHUNK, weight.shape[-1]) > LARGEST_PIECE:
        return f"its rows of {weight.shape[-1]} elements do not go through buffers in parts"
    return "it is small" if weight.numel() < SMALLEST else ""


def _found(device: torch.device | str) -> torch.device:
    """A device with its number."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"offload_weights takes the device that the model trains on, such as 'cuda', behind "
            f"the model, got {device!r}: {str(error).splitlines()[0]}"
        ) from None


@torch.no_grad()
def _in_codes(weight: Tensor, device: torch.device, arena: Arena) -> nn.Parameter:
    ((codes, scales),) = coded([weight.to(device)], weight.dtype)
    found = CodedWeight(codes, scales, weight.dtype)
    found.source = arena.take(weight.detach())
    found.mark_quantized()
    return nn.Parameter(found, requires_grad=weight.requires_grad)


def _give_source(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Have a state dict hold the weight instead of its codes."""
    weight = module.weight
    if isinstance(weight, CodedWeight) and f"{prefix}weight" in state:
        weight.wait_for_source()
        state[f"{prefix}weight"] = weight.source
