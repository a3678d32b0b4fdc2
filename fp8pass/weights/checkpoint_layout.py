"""Linear layers whose weights a checkpoint stores in FP8: their bytes become quantized weights.

The loaders of transformers and compressed-tensors represent such a layer as an `nn.Linear`, or a
subclass, with these tensors:

    weight              float8_e4m3fn [M, K]
    weight_scale_inv    [M / 128, K / 128], rounded up, as in DeepSeek-V3; or one scale
    weight_scale        [M, 1], [M], [M / m, K / k] or one scale, as in compressed-tensors

A scale multiplies the data. Blocks that do not divide the rows become blocks within a row: each row
gets a copy of its scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Pattern
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import ROW, Block, Quantization
from fp8pass.graph.names import clean_path, matching_pattern
from fp8pass.weights.quantized_parameter import WITH_SCALES, QuantizedWeight, save_weight

SCALE_NAMES = "weight_scale_inv", "weight_scale"
OPERAND_DTYPES = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores the scales of a weight.

    Attributes:
        name: the tensor with the scales.
        shape, dtype: of this tensor.
        rows: number of rows of the weight that share a scale.
        quantization: the blocks of the quantized weight.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    rows: int
    quantization: Quantization

    def expand(self, stored: Tensor, rows: int) -> Tensor:
        """Return the scales of a quantized weight with `rows` rows, fp32."""
        scales = stored.float().reshape(-1, stored.shape[-1] if self.is_in_blocks else 1)
        copies = self.rows // self.quantization.block[0]
        return scales.repeat_interleave(copies, 0)[: self._count(rows)].contiguous()

    def collapse(self, scales: Tensor) -> Tensor:
        """Return the tensor of the checkpoint."""
        copies = self.rows // self.quantization.block[0]
        return scales[::copies].reshape(self.shape).to(self.dtype)

    @property
    def is_in_blocks(self) -> bool:
        return self.quantization.is_in_groups

    def _count(self, rows: int) -> int:
        return rows // self.quantization.block[0]


def has_fp8_layers(model: nn.Module) -> bool:
    """Whether a model has FP8 data of a checkpoint, used by `use_fp8_layers` or not."""
    used = (p for p in model.parameters() if isinstance(p, QuantizedWeight))
    return any(True for _ in _fp8_layers(model)) or any(p.checkpoint is not None for p in used)


def use_fp8_layers(model: nn.Module, skip: tuple[Pattern, ...]) -> tuple[int, dict[str, str]]:
    """Replace layers whose weights are FP8 data by `nn.Linear` with the same bytes.

    Returns the number of replaced layers, and why other layers with FP8 data, by path, are left.
    """
    reasons: dict[str, str] = {}
    replaced: dict[nn.Module, nn.Linear] = {}
    dtype = _find_dtype(model)
    for path, layer in list(_fp8_layers(model)):
        if matching_pattern(path, skip) is not None:
            reasons[path] = "skipped"
        elif isinstance(found := _quantized_weight(layer, dtype), str):
            reasons[path] = found
        else:
            replaced[layer] = _make_linear(layer, found)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in replaced:
                setattr(module, name, replaced[child])
    if not any(True for _ in _fp8_layers(model)):  # nothing is left to dequantize
        compat.remove_forward_pre_hooks(model, "compressed_tensors")
    return len(replaced), reasons


def _fp8_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_fp8(module.weight):
            yield clean_path(path), module


def _find_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the other layers' weights. Scales are in FP32 in any model."""
    others = set(model.modules()) - {layer for _, layer in _fp8_layers(model)}
    parameters = (p for m in model.modules() if m in others for p in m.parameters(recurse=False))
    return next((p.dtype for p in parameters if p.dtype in OPERAND_DTYPES), torch.bfloat16)


def _quantized_weight(layer: nn.Linear, dtype: torch.dtype) -> QuantizedWeight | str:
    """Return the weight of a layer, or why its data cannot be used."""
    name = next((n for n in SCALE_NAMES if getattr(layer, n, None) is not None), None)
    if name is None:
        return f"it has no scales: expected {' or '.join(SCALE_NAMES)}"
    return from_checkpoint(layer.weight.detach(), getattr(layer, name).detach(), name, dtype)


def from_checkpoint(
    data: Tensor, scales: Tensor, name: str, dtype: torch.dtype
) -> QuantizedWeight | str:
    """Return a weight with data and scales of a checkpoint, or why they cannot be used."""
    rows, columns = data.shape
    if scales.numel() == 1:
        quantization, shared = Quantization(E4M3, ROW), rows
    elif scales.shape in ((rows,), (rows, 1)):
        quantization, shared = Quantization(E4M3, ROW), 1
    elif (block := _find_block(data.shape, scales.shape)) is None:
        return f"scales of shape {list(scales.shape)} do not fit a weight {[rows, columns]}"
    elif columns % block[1]:
        return f"its input size {columns} is not a multiple of its blocks, {block[1]}"
    else:
        side = block[0] if rows % block[0] == 0 and block[0] == block[1] else 1
        quantization, shared = Quantization(E4M3, (side, block[1]), "fp32"), block[0]
    layout = Layout(name, scales.shape, scales.dtype, shared, quantization)
    weight = QuantizedWeight(data, layout.expand(scales, rows), dtype, str(quantization))
    weight.is_only_copy, weight.checkpoint = True, layout
    return weight


def _find_block(shape: torch.Size, scales: torch.Size) -> Block | None:
    """Return the smallest block with sides that are powers of two."""
    if len(scales) != 2 or not all(scales):
        return None
    sides = [2 ** math.ceil(math.log2(n / s)) for n, s in zip(shape, scales, strict=True)]
    counts = [compat.ceil_div(n, side) for n, side in zip(shape, sides, strict=True)]
    return (sides[0], sides[1]) if counts == list(scales) else None


def _make_linear(layer: nn.Linear, weight: QuantizedWeight) -> nn.Linear:
    """Return an `nn.Linear` with a quantized weight, the bias, and other tensors as buffers."""
    found = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    found.bias = layer.bias
    used = "weight", "bias", weight.checkpoint.name if weight.checkpoint else ""
    for name, x in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if name not in used:
            found.register_buffer(name, x.detach())
    setattr(found, used[-1], None)  # DCP looks up each entry of `state_dict` as an attribute
    found.register_state_dict_post_hook(save_weight)
    found.register_load_state_dict_pre_hook(load_weight)
    return found.train(layer.training)


def load_weight(module: nn.Linear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`: combine FP8 data and scales of a checkpoint."""
    weight, data = module.weight, state.get(f"{prefix}weight")
    if not isinstance(weight, QuantizedWeight) or not is_fp8(data):
        return
    name = next((n for n in SCALE_NAMES if prefix + n in state), None)
    if name is None:
        raise RuntimeError(f"{prefix}weight is FP8 data without scales. {WITH_SCALES}")
    found = from_checkpoint(data, state.pop(prefix + name), name, weight.dtype)
    if isinstance(found, str):
        raise RuntimeError(f"{prefix}weight cannot be loaded: {found}.")
    state[f"{prefix}weight"] = found


def is_fp8(x: Any) -> TypeGuard[Tensor]:
    """Whether `x` is FP8 data, not a quantized weight."""
    return isinstance(x, Tensor) and x.dtype is torch.float8_e4m3fn
