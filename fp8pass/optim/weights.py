"""Linear weights in host memory, with FP8 data on the device: one byte an element instead of two.

Graphs take such weights as FP8 data (`weights/quantized_parameter.py`). `AdamW` requantizes them
with each update, once a step, however many gradients it accumulates (LLMQ 3).
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
from fp8pass.optim.kernel import CHUNK
from fp8pass.optim.offload import SMALLEST, STAGED_BYTES
from fp8pass.runtime.arena import Arena
from fp8pass.weights.choice import choose
from fp8pass.weights.quantized_parameter import CodedWeight, coded

log = logging.getLogger("fp8pass")

# Limit of the elements in the smallest piece that has whole rows and whole programs of the kernel.
LARGEST_PIECE = STAGED_BYTES // 16


def offload_weights(
    model: nn.Module, device: torch.device | str, *, skip: str | Sequence[str] = ()
) -> nn.Module:
    """Move a model to a device, with the weights of its linear layers in host memory.

        model = LlamaForCausalLM(config).bfloat16()         # in host memory
        fp8pass.optim.offload_weights(model, "cuda")
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-4, offload=("states",))
        model.compile(backend="fp8pass")

    The weights and their optimizer states stay in pinned host memory; the device has FP8 data of
    the weights, which compiled code multiplies. All other operators read copies of the exact
    weights, and write to them; the FP8 data are updated before their next use. Writes to a part or
    to a view of a weight raise RuntimeError. `fully_shard` and `parallelize_module` shard the exact
    weights on the device, which ends the offloading. Call this before making the optimizer, and
    before compiling the model.

    Args:
        model: a module with BF16 weights, in host memory or on the device.
        device: the device on which the model trains.
        skip: paths of linear layers, or patterns with *, whose weights move to the device. Output
            heads, layers that cannot run in FP8, and all other parameters do so as well.

    Returns:
        The model.

    Raises:
        ConfigError: no weight can be offloaded, or the device does not exist.
    """
    try:
        device = torch.empty(0, device=device).device  # with its index
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            "offload_weights takes the device that the model trains on, such as 'cuda', after the "
            f"model, got {device!r}: {str(error).splitlines()[0]}"
        ) from None
    layers = layers_to_code(model, checked_patterns("skip", skip))
    arena, moved = Arena(device), []
    while layers:  # free each original weight before the next one is copied
        weight, users = layers.popitem()
        moved.append((users, _quantize_weight(weight, device, arena)))
        for layer in users:
            layer.weight = None  # type: ignore[assignment]
    # Set the new weights after the move, which would also move them.
    model.to(device)
    for users, parameter in moved:
        for layer in users:
            layer.weight = parameter
            layer.register_state_dict_post_hook(_save_exact_weight)
    return model


def layers_to_code(model: nn.Module, skip: tuple[str, ...]) -> dict[Tensor, list[nn.Linear]]:
    """Return the weights that can be offloaded, each with the layers that share it.

    Raises:
        ConfigError: no weight can be offloaded.
    """
    choice = choose(model, skip, _why_not_offloaded)
    for path, why in choice.reasons.items():
        log.info("offload_weights does not offload the weight of %s: %s.", path, why)
    if not choice.layers:
        listed = "; ".join(common_reasons(choice.reasons))
        raise ConfigError(
            "No weight of the model can be in host memory with FP8 data on the device: "
            f"{listed or 'it has no linear layer'}."
        )
    return choice.layers


def _why_not_offloaded(weight: Tensor) -> str:
    if weight.dtype is not torch.bfloat16:
        return f"it is in {graph.dtype_text(weight.dtype)}; model.bfloat16() comes first"
    if math.lcm(CHUNK, weight.shape[-1]) > LARGEST_PIECE:
        return f"its rows of {weight.shape[-1]} elements do not fit into staging buffers"
    return "it is small" if weight.numel() < SMALLEST else ""


@torch.no_grad()
def _quantize_weight(weight: Tensor, device: torch.device, arena: Arena) -> nn.Parameter:
    ((data, scales),) = coded([weight.to(device)], weight.dtype)
    quantized = CodedWeight(data, scales, weight.dtype)
    quantized.source = arena.take(weight.detach())
    quantized.mark_quantized()
    return nn.Parameter(quantized, requires_grad=weight.requires_grad)


def _save_exact_weight(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the exact weight into a state dict instead of its FP8 data."""
    weight = module.weight
    if isinstance(weight, CodedWeight) and f"{prefix}weight" in state:
        weight.wait_for_source()
        state[f"{prefix}weight"] = weight.source
