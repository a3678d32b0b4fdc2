"""Quantize frozen weights in place: one byte per element instead of two or four.

    nn.Linear.weight    bf16 [M, K]     ->  QuantizedWeight: e4m3 [M, K], fp32 [M, 1]
    experts             bf16 [E, N, K]  ->  QuantizedWeight: e4m3 [E·N, K], fp32 [E·N, 1]

The forward's GEMM reads the FP8 data. dgrad contracts the rows of the weight, so the backward
requantizes the data with one scale. Requantization reads and writes one byte per element.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import Pattern
from fp8pass.graph.names import common_reasons, first_reasons
from fp8pass.option_checks import ConfigError, bytes_text, checked_patterns
from fp8pass.weights.choice import choose_experts, choose_layers, why_not_plain
from fp8pass.weights.fp8_checkpoint import add_hooks, has_fp8_layers, use_fp8_layers
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows

log = logging.getLogger("fp8pass")

FREEZABLE_DTYPES = (torch.bfloat16, torch.float32)


@torch.no_grad()
def quantize_frozen(model: nn.Module, *, skip: str | Sequence[str] = ()) -> nn.Module:
    """Replace the frozen weights of linear layers and experts by FP8 data, in place.

        model.requires_grad_(False)
        model = peft.get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        fp8pass.quantize_frozen(model)
        model.compile(backend="fp8pass")

    If linear layers run in FP8 with a scale for each row (`scales="rowwise"`), the forward
    of a compiled model is bit-identical to the forward with weights in BF16. Gradients of inputs
    are computed with the rounded weights. In all other layers, each use dequantizes the weight.

    The model can be moved, copied and saved as before. `state_dict` contains the rounded weights in
    their original dtype, in host memory. `load_state_dict` quantizes the loaded weights. Nothing
    else can change a quantized weight, so merge adapters before you quantize.

    If the model was loaded from an FP8 checkpoint (DeepSeek's `weight_scale_inv`, or
    `weight_scale` of compressed-tensors), the weights keep their FP8 data, and all other weights
    keep their dtype. Layers with FP8 data become `nn.Linear`. GEMMs read data with scales for
    128×128 elements as in recipe `block`. `state_dict` contains the data and scales of the
    checkpoint. Call `quantize_frozen` before adapters are added.

    Args:
        model: a module on any device, frozen in part or as a whole (`requires_grad_(False)`), with
            weights in BF16, or in FP32 for autocast. FP32 weights are rounded to BF16. Quantize
            before DistributedDataParallel wraps the model. Experts are parameters [E, N, K] of
            modules with "expert" in their path or class.
        skip: shell-style patterns of layer paths. Matching layers are not quantized. Output heads
            and layers that cannot run in FP8 are never quantized.

    Raises:
        ConfigError: no linear layer is frozen, no frozen layer can be quantized, or no FP8 weight
            of the checkpoint can be used.
    """
    patterns = checked_patterns("skip", skip)
    if isinstance(model, nn.Module) and has_fp8_layers(model):
        _use_checkpoint(model, patterns)
        return model
    layers, reasons = choose_layers(model, patterns, _why_not, _is_frozen)
    experts, reasons_of_experts = choose_experts(model, patterns, _why_not)
    chosen = {w: [(layer, "weight") for layer in users] for w, users in layers.items()} | experts
    count = sum(map(len, chosen.values()))
    reasons |= reasons_of_experts
    frozen = count + len(reasons)
    quantized = (p for p in model.parameters() if isinstance(p, QuantizedWeight))
    if not chosen and not any(p.is_only_copy for p in quantized):
        raise ConfigError(_why_nothing(frozen, reasons))
    before = sum(w.nbytes for w in chosen)
    after = 0
    del layers, experts
    for module in dict.fromkeys(module for users in chosen.values() for module, _ in users):
        add_hooks(module)
    while chosen:  # each weight is freed before the next one is quantized
        weight, users = chosen.popitem()
        parameter = _quantize(weight)
        after += parameter.fp8_data.nbytes + parameter.scales.nbytes
        for module, name in users:
            setattr(module, name, parameter)
    log.info(
        "quantize_frozen: %d of %d frozen layers in FP8, %s instead of %s%s",
        *(count, frozen, bytes_text(after), bytes_text(before)),
        "".join(f"; {line}" for line in first_reasons(reasons)),
    )
    return model


def _use_checkpoint(model: nn.Module, skip: tuple[Pattern, ...]) -> None:
    used, reasons = use_fp8_layers(model, skip)
    if not any(isinstance(p, QuantizedWeight) for p in model.parameters()):
        listed = "; ".join(common_reasons(reasons))
        raise ConfigError(f"No FP8 weight of the model's checkpoint can be used: {listed}.")
    log.info(
        "quantize_frozen: %d layers with the FP8 weights of their checkpoint%s",
        used,
        "".join(f"; {line}" for line in first_reasons(reasons)),
    )


def _is_frozen(weight: Tensor) -> bool:
    return not weight.requires_grad and not isinstance(weight, QuantizedWeight)


def _why_not(weight: Tensor) -> str:
    if weight.dtype not in FREEZABLE_DTYPES:
        return f"it is in {graph.dtype_text(weight.dtype)}, not in bfloat16 or float32"
    return why_not_plain(weight)


def _why_nothing(frozen: int, reasons: dict[str, str]) -> str:
    if not frozen:
        return (
            "No linear layer of the model is frozen: call model.requires_grad_(False) first, then "
            "requires_grad_(True) for the layers to train."
        )
    listed = "; ".join(common_reasons(reasons))
    return f"No frozen weight of the model can be in FP8: {listed}."


def _quantize(weight: Tensor) -> QuantizedWeight:
    experts = len(weight) if weight.ndim == 3 else 0
    data, scales = quantize_rows(weight.flatten(0, -2), torch.bfloat16)
    found = QuantizedWeight(data, scales, weight.dtype, experts=experts)
    found.is_only_copy = True
    return nn.Parameter(found, requires_grad=False)  # type: ignore[return-value]
