"""Weights that a checkpoint stores in FP8: their bytes become quantized weights.

The loaders of transformers and compressed-tensors represent a linear layer as an `nn.Linear` or an
`FP8Linear`, with these tensors:

    weight              float8_e4m3fn [M, K]
    weight_scale_inv    [M / 128, K / 128], rounded up, as in DeepSeek-V3; or one scale
    weight_scale        [M, 1], [M], [M / m, K / k] or one scale, as in compressed-tensors

The weights of experts are stacked: [E, N, K], with scales [E, N / 128, K / 128] or one per expert.
A scale multiplies the data. Blocks that are not square, or that do not divide the number of rows,
become blocks of one row: each row gets a copy of its scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Pattern
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import ROW, Block, Quantization
from fp8pass.graph.names import clean_path, matching_pattern, warn_about_idle_patterns
from fp8pass.weights.layout import Layout
from fp8pass.weights.quantized_parameter import WITH_SCALES, QuantizedWeight, save_weights

SCALE_SUFFIXES = "_scale_inv", "_scale"
# Classes in transformers with weights that are used only as operands of GEMMs.
LOADED_CLASSES = "FP8Linear", "FP8Experts"
OPERAND_DTYPES = torch.bfloat16, torch.float16, torch.float32


def has_fp8_layers(model: nn.Module) -> bool:
    """Whether a model has FP8 data of a checkpoint, before or after `use_fp8_layers`."""
    used = (p for p in model.parameters() if isinstance(p, QuantizedWeight))
    return any(True for _ in _fp8_weights(model)) or any(p.checkpoint is not None for p in used)


def use_fp8_layers(model: nn.Module, skip: tuple[Pattern, ...]) -> tuple[int, dict[str, str]]:
    """Turn the FP8 data of a checkpoint into quantized weights. Linear layers become `nn.Linear`.

    Returns the number of quantized weights. Also returns, by path, why other FP8 data are left
    unchanged.
    """
    chosen, reasons = _choose_weights(model, skip)
    replaced = {}
    for module, weights in chosen.items():
        if isinstance(module, nn.Linear):
            replaced[module] = _make_linear(module, weights["weight"])
        else:
            _use_experts(module, weights)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replaced:
            model.set_submodule(path, replaced[module])
    if not any(True for _ in _fp8_weights(model)):  # nothing is left to dequantize
        for module in model.modules():
            compat.remove_forward_pre_hooks(module, "compressed_tensors")
    return sum(map(len, chosen.values())), reasons


def _choose_weights(
    model: nn.Module, skip: tuple[Pattern, ...]
) -> tuple[dict[nn.Module, dict[str, nn.Parameter]], dict[str, str]]:
    """Return quantized weights by module and name, and, by path, why other FP8 data are left."""
    found, dtype = list(_fp8_weights(model)), _find_dtype(model)
    warn_about_idle_patterns("skip", skip, "FP8 weight", [path for path, *_ in found])
    reasons: dict[str, str] = {}
    chosen: dict[nn.Module, dict[str, nn.Parameter]] = {}
    made: dict[Tensor, nn.Parameter | str] = {}  # layers may share a weight
    for path, module, name in found:
        data = getattr(module, name)
        is_skipped = matching_pattern(path, skip) is not None
        why = "it is skipped" if is_skipped else _why_not(module, model)
        if not why and data not in made:
            made[data] = _quantized_weight(module, name, dtype)
        if isinstance(weight := why or made[data], str):
            reasons[path] = weight
        else:
            chosen.setdefault(module, {})[name] = weight
    broken = {m: name for path, m, name in found if path in reasons and m in chosen}
    for path, module, _ in found:  # the forward of experts needs all their weights
        if module in broken:
            chosen.pop(module, None)
            reasons.setdefault(path, f"{broken[module]} stays in FP8")
    return chosen, reasons


def _why_not(module: nn.Module, model: nn.Module) -> str:
    """Return why FP8 data of this module cannot be used, or '' if the module allows it."""
    if (kind := type(module)) is not nn.Linear and kind.__name__ not in LOADED_CLASSES:
        return f"{kind.__name__} may use its weights in other operations than GEMMs"
    if module is model:
        return "it is the whole model: pass the module that contains it"
    return "accelerate moves it between devices" if hasattr(module, "_hf_hook") else ""


def _fp8_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and name of all FP8 data with two or three dimensions."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if is_fp8(weight) and weight.ndim in (2, 3):
                yield clean_path(path if name == "weight" else f"{path}.{name}"), module, name


def _find_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the weights of modules without FP8 data.

    Modules with FP8 data are left out, because their scales are FP32 in any model.
    """
    others = set(model.modules()) - {module for _, module, _ in _fp8_weights(model)}
    parameters = (p for m in model.modules() if m in others for p in m.parameters(recurse=False))
    return next((p.dtype for p in parameters if p.dtype in OPERAND_DTYPES), torch.bfloat16)


def _quantized_weight(module: nn.Module, name: str, dtype: torch.dtype) -> nn.Parameter | str:
    """Return the quantized weight of a module, or why its FP8 data cannot be used."""
    names = [f"{name}{suffix}" for suffix in SCALE_SUFFIXES]
    scales = next((n for n in names if getattr(module, n, None) is not None), None)
    if scales is None:
        return f"it has no scales: expected {' or '.join(names)}"
    data = getattr(module, name).detach()
    found = from_checkpoint(data, getattr(module, scales).detach(), scales, dtype)
    return found if isinstance(found, str) else nn.Parameter(found, requires_grad=False)


def from_checkpoint(
    data: Tensor, scales: Tensor, name: str, dtype: torch.dtype
) -> QuantizedWeight | str:
    """Return a weight with data and scales of a checkpoint, or why they cannot be used."""
    *stack, rows, columns = data.shape
    experts = stack[0] if stack else 1
    if scales.numel() == experts:
        quantization, shared = Quantization(E4M3, ROW), rows
    elif [*scales.shape] in ([*stack, rows], [*stack, rows, 1]):
        quantization, shared = Quantization(E4M3, ROW), 1
    elif (block := _find_block(data.shape, scales.shape)) is None:
        return f"scales of shape {list(scales.shape)} do not fit a weight {list(data.shape)}"
    elif columns % block[1]:
        return f"its input size {columns} is not a multiple of the block length {block[1]}"
    else:
        side = block[0] if rows % block[0] == 0 and block[0] == block[1] else 1
        quantization, shared = Quantization(E4M3, (side, block[1]), "fp32"), block[0]
    layout = Layout(name, scales.shape, scales.dtype, shared, quantization, experts)
    values = data.flatten(0, -2), layout.expand(scales, rows)
    weight = QuantizedWeight(*values, dtype, str(quantization), stack[0] if stack else 0)
    weight.is_only_copy, weight.checkpoint = True, layout
    return weight


def _find_block(shape: torch.Size, scales: torch.Size) -> Block | None:
    """Return the smallest block with sides that are powers of two, or None if no block fits."""
    if scales[:-2] != shape[:-2] or len(scales) < 2 or not all(scales):
        return None
    pairs = list(zip(shape[-2:], scales[-2:], strict=True))
    sides = [2 ** math.ceil(math.log2(n / count)) for n, count in pairs]
    counts = [compat.ceil_div(n, side) for (n, _), side in zip(pairs, sides, strict=True)]
    return (sides[0], sides[1]) if counts == list(scales[-2:]) else None


def _make_linear(layer: nn.Linear, weight: nn.Parameter) -> nn.Linear:
    """Return an `nn.Linear` with a quantized weight and the layer's bias.

    The other tensors of the layer become buffers.
    """
    found = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    found.weight, found.bias = weight, layer.bias
    scales = _name_of_scales(weight)
    for name, x in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if name not in ("weight", "bias", scales):
            found.register_buffer(name, x.detach())
    setattr(found, scales, None)  # DCP looks up each entry of `state_dict` as an attribute
    add_hooks(found)
    return found.train(layer.training)


def _use_experts(module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    """Give a module of experts quantized weights, and the forward of experts in 16 bits."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    for name, weight in weights.items():
        setattr(module, name, weight)
        delattr(module, _name_of_scales(weight))
        setattr(module, _name_of_scales(weight), None)  # as in `_make_linear`
    module.forward = partial(grouped_mm_experts_forward, module)  # can be pickled, unlike a method
    add_hooks(module)


def _name_of_scales(weight: nn.Parameter) -> str:
    assert isinstance(weight, QuantizedWeight)
    assert weight.checkpoint is not None
    return weight.checkpoint.name


def add_hooks(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a module support its quantized weights."""
    module.register_state_dict_post_hook(save_weights)
    module.register_load_state_dict_pre_hook(load_weights)


def load_weights(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: combine FP8 data and scales of a checkpoint."""
    for name, weight in module.named_parameters(recurse=False):
        data = state.get(prefix + name)
        if not isinstance(weight, QuantizedWeight) or not is_fp8(data):
            continue
        scales = next((name + s for s in SCALE_SUFFIXES if prefix + name + s in state), None)
        if scales is None:
            raise RuntimeError(f"{prefix}{name} is FP8 data without scales. {WITH_SCALES}")
        found = from_checkpoint(data, state.pop(prefix + scales), scales, weight.dtype)
        if isinstance(found, str):
            raise RuntimeError(f"{prefix}{name} cannot be loaded: {found}.")
        state[prefix + name] = found


def is_fp8(x: Any) -> TypeGuard[Tensor]:
    """Whether `x` is FP8 data, not a quantized weight."""
    return isinstance(x, Tensor) and x.dtype is torch.float8_e4m3fn
