"""Frozen weights in codes, of which nothing else is left: a byte an element instead of two or four.

    nn.Linear.weight    bf16 [M, K]  ->  CodedWeight: e4m3 [M, K], fp32 [M, 1]

They enter graphs as codes, which the forward's GEMM takes as they are: no pass over the weight is
left of what is made of it in every step. dgrad contracts the other dimension, along which scales
may not vary: the backward makes other codes of these, in one pass of two bytes an element. To keep
those, too, would take the byte that is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import ConfigError, bytes_text, checked_patterns
from fp8pass.graph.names import common_reasons, first_reasons
from fp8pass.weights.choice import choose
from fp8pass.weights.quantized_parameter import CodedWeight, coded

log = logging.getLogger("fp8pass")

FREEZABLE_DTYPES = (torch.bfloat16, torch.float32)


@torch.no_grad()
def quantize_frozen(model: nn.Module, *, skip: str | Sequence[str] = ()) -> nn.Module:
    """Keep the frozen weights of linear layers in FP8 codes, and nothing else of them.

        model.requires_grad_(False)
        model = peft.get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        fp8pass.quantize_frozen(model)
        model.compile(backend="fp8pass")

    For adapters (LoRA), teachers, encoders: whatever is trained beside weights that are not. A
    compiled model computes the same forward, bit for bit, as with those weights in BF16, where
    linear layers run in FP8 with `forward_scales="rowwise"`; gradients of inputs
    are those of the rounded weights. Elsewhere codes are decoded whenever they are used.

    The model can be moved, copied and saved as before; call this again for what has been frozen
    since. `state_dict` has the rounded weights, in their dtype and on the host, where there is room
    for them. `load_state_dict` makes codes of other weights; with `assign=True` it puts these in
    their place. Nothing else changes a weight in codes: what merges adapters into weights does so
    before.

    Args:
        model: a module, on any device, frozen in part or as a whole (`requires_grad_(False)`). Its
            linear layers' weights are in BF16, or in FP32 for autocast, whose rounding they get.
            Under DistributedDataParallel, wrap it before.
        skip: paths of linear layers, or parts of them with *, that stay as they are. So do output
            heads, and layers that cannot run in FP8.

    Returns:
        The model.

    Raises:
        ConfigError: no linear layer is frozen, or none that is can have its weight in codes.
    """
    choice = choose(model, checked_patterns("skip", skip), _why_not_in_codes, _is_frozen)
    frozen = sum(map(len, choice.layers.values())) + len(choice.reasons)
    if not choice.layers and not any(map(_is_done, model.modules())):
        raise ConfigError(_why_nothing(frozen, choice.reasons))
    before, layers = sum(w.nbytes for w in choice.layers), sum(map(len, choice.layers.values()))
    after = 0
    while choice.layers:  # one weight after the other is freed
        weight, users = choice.layers.popitem()
        parameter = _in_codes(weight)
        after += parameter.codes.nbytes + parameter.scales.nbytes
        for layer in users:
            layer.weight = parameter
            layer.register_state_dict_post_hook(_give_values)
    log.info(
        "quantize_frozen: %d of %d frozen linear layers in codes, %s instead of %s%s",
        *(layers, frozen, bytes_text(after), bytes_text(before)),
        "".join(f"; {line}" for line in first_reasons(choice.reasons, " stays: ")),
    )
    return model


def _is_frozen(weight: Tensor) -> bool:
    return not weight.requires_grad and not isinstance(weight, CodedWeight)


def _is_done(module: nn.Module) -> bool:
    weight = module.weight if isinstance(module, nn.Linear) else None
    return isinstance(weight, CodedWeight) and weight.is_all


def _why_not_in_codes(weight: Tensor) -> str:
    if weight.dtype not in FREEZABLE_DTYPES:
        return f"it is in {graph.dtype_text(weight.dtype)}, not in bfloat16 or float32"
    return ""


def _why_nothing(frozen: int, reasons: dict[str, str]) -> str:
    if not frozen:
        return (
            "No linear layer of the model is frozen: model.requires_grad_(False) comes first, then "
            "requires_grad_(True) for what is trained."
        )
    listed = "; ".join(common_reasons(reasons))
    return f"No frozen weight of the model can be in FP8: {listed}."


def _in_codes(weight: Tensor) -> CodedWeight:
    """A weight as a parameter in codes."""
    ((codes, scales),) = coded([weight], torch.bfloat16)
    found = CodedWeight(codes, scales, weight.dtype)
    found.is_all = True
    return nn.Parameter(found, requires_grad=False)  # type: ignore[return-value]


def _give_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put decoded values into a state dict, on the host: a GPU may have no room for all of them."""
    weight = module.weight
    if isinstance(weight, CodedWeight) and f"{prefix}weight" in state:
        state[f"{prefix}weight"] = weight.decoded().cpu()
