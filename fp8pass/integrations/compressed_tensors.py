"""`fp8pass.export`: write a trained model with FP8 weights, for vLLM, SGLang and transformers.

The format is `float-quantized` of compressed-tensors. Each linear layer has `NAME.weight`,
float8_e4m3fn [out, in], and `NAME.weight_scale`, fp32 [out, 1]; their product is the weight. The
serving engine quantizes the layer's inputs with a scale for each token. The FP8 weights are
bit-identical to the FP8 weights in training, if the recipe has row scales in the forward. FP32
weights are rounded to BF16 first, as autocast does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.graph.linear_layers import why_unsuitable_size
from fp8pass.graph.names import matching_pattern
from fp8pass.option_checks import ConfigError
from fp8pass.tools.running import find_configuration
from fp8pass.weights.quantized_parameter import quantize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(model: nn.Module, path: str | Path, *, config: Config | None = None) -> list[str]:
    """Write a `PreTrainedModel` to a folder for serving, with FP8 weights in its linear layers.

    As in training, some layers are not quantized: output heads, layers in `skip`, layers with sizes
    that are not multiples of 16, and layers too narrow to gain from FP8. The model is not changed.

    Args:
        model: a `PreTrainedModel`, compiled or not.
        path: the folder to write, in the layout of `save_pretrained`.
        config: a configuration. Its `skip` is used instead of the `skip` of the compiled model.

    Returns:
        Paths of the layers in FP8.

    Raises:
        ConfigError: the model is not a `PreTrainedModel`, is sharded, or has experts or no layer
            for FP8.
        ValueError: a weight has a NaN or an infinity.
    """
    config = config or find_configuration(model)
    plain = _check_pretrained(model)
    linears = {name: m for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    head = plain.get_output_embeddings()
    chosen = [
        name
        for name, layer in linears.items()
        if layer is not head
        and not why_unsuitable_size(layer.out_features, layer.in_features)
        and matching_pattern(name, config.skip_patterns) is None
    ]
    if not chosen:
        raise ConfigError(
            f"No layer of {type(plain).__name__} can be exported in FP8. Exported layers are "
            "nn.Linear with sizes in multiples of 16, except output heads, layers in skip and "
            "narrow layers."
        )
    values = plain.state_dict()
    for name in [f"{layer}.weight" for layer in chosen]:
        values[name], values[f"{name}_scale"] = _quantize_weight(name, values[name])
    plain.save_pretrained(path, state_dict=values)
    description = Path(path) / "config.json"
    settings = json.loads(description.read_text())
    settings["quantization_config"] = make_quantization_config(sorted(linears.keys() - set(chosen)))
    description.write_text(json.dumps(settings, indent=2) + "\n")
    return chosen


def _check_pretrained(model: nn.Module) -> PreTrainedModel:
    from transformers import PreTrainedModel

    plain = compat.original_of(model)
    if not isinstance(plain, PreTrainedModel):
        raise ConfigError(
            f"export takes a PreTrainedModel of transformers, got {type(plain).__name__}. For a "
            "PEFT model, pass model.merge_and_unload(); for a wrapped model, pass its .module."
        )
    experts = next((n for n, p in plain.named_parameters() if "experts" in n and p.ndim == 3), "")
    if experts:  # loaders expect a separate layer for each expert
        raise ConfigError(
            f"export does not support stacked weights of experts, such as {experts}. Save the "
            "model in 16 bits with save_pretrained."
        )
    return plain


def _quantize_weight(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn data [M, K] and fp32 scales [M, 1]."""
    if hasattr(weight, "device_mesh"):
        raise ConfigError(
            f"{name} is sharded. Load the full state dict, get_model_state_dict(..., options="
            "StateDictOptions(full_state_dict=True)), into an unsharded model on one rank, and "
            "export that model."
        )
    dtype = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
    ((data, scales),) = quantize_rows([weight], dtype)
    if not scales.isfinite().all():
        raise ValueError(
            f"{name} has a NaN or an infinity, which would make its whole row NaN in FP8. Export a "
            "checkpoint with finite weights."
        )
    return data, scales


def make_quantization_config(ignored: list[str]) -> dict[str, Any]:
    """Return the entry of config.json. Layers in `ignored` are not quantized."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }
