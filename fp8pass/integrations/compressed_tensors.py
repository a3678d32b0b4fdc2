"""`fp8pass.export`: a trained model with FP8 weights, for vLLM, SGLang and transformers to serve.

The layout is that of compressed-tensors' format `float-quantized`: for each linear layer
`NAME.weight`, float8_e4m3fn [out, in], and `NAME.weight_scale`, fp32 [out, 1], whose product is the
weight; inputs get a scale for each token when the layer runs. These are the codes that recipes with
scales by row multiply in the forward, so that the served model is the one that was trained. Weights
in FP32 are rounded to BF16 before, as autocast does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Config, ConfigError
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.graph.linear_layers import why_not_of_this_size
from fp8pass.graph.names import matching_pattern
from fp8pass.tools.running import find_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

fp8 = torch.ops.fp8pass


def export(model: nn.Module, path: str | Path, *, config: Config | None = None) -> list[str]:
    """Write a model of transformers with its linear layers in FP8, for serving.

    Output heads, layers in `skip`, and those whose sizes are not multiples of 16, or too narrow to
    gain by FP8, stay as they are, and in their dtype, as in training. Weights in FP32 get the codes
    that the forward has under autocast to BF16. The model is not changed.

    Args:
        model: a `PreTrainedModel`, compiled or not.
        path: the folder to write, as `save_pretrained` does.
        config: the configuration whose `skip` counts, instead of the model's own.

    Returns:
        The paths of the layers in FP8.

    Raises:
        ConfigError: the model is of another kind, sharded, has experts or no such layer.
        ValueError: a weight has a NaN or an infinity.
    """
    config = config or find_configuration(model)
    plain = _pretrained(model)
    linears = {name: m for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    head = plain.get_output_embeddings()
    chosen = [n for n, m in linears.items() if m is not head and is_served_in_fp8(n, m, config)]
    if not chosen:
        raise ConfigError(
            f"No layer of {type(plain).__name__} can be exported in FP8: none is an nn.Linear, no "
            "output head and not in skip, whose sizes are multiples of 16 and not too narrow."
        )
    values = plain.state_dict()
    for name in chosen:
        codes, scales = coded(f"{name}.weight", values[f"{name}.weight"])
        values |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
    plain.save_pretrained(path, state_dict=values)
    description = Path(path) / "config.json"
    settings = json.loads(description.read_text())
    settings["quantization_config"] = quantization_config(sorted(linears.keys() - set(chosen)))
    description.write_text(json.dumps(settings, indent=2) + "\n")
    return chosen


def _pretrained(model: nn.Module) -> PreTrainedModel:
    from transformers import PreTrainedModel

    plain = compat.original_of(model)
    if not isinstance(plain, PreTrainedModel):
        raise ConfigError(
            f"export takes a PreTrainedModel of transformers, got {type(plain).__name__}: of "
            "PEFT's models give model.merge_and_unload(), of wrappers what they wrap (.module)."
        )
    experts = next((n for n, p in plain.named_parameters() if "experts" in n and p.ndim == 3), "")
    if experts:  # which files have as a layer each, and those who load them take for such
        raise ConfigError(
            f"{experts} has the weights of several experts, which are not exported in FP8 yet: "
            "serve the model in 16 bits (save_pretrained)."
        )
    return plain


def is_served_in_fp8(path: str, layer: nn.Linear, config: Config) -> bool:
    """Whether a linear layer, no output head, is exported in FP8."""
    fits = not why_not_of_this_size(layer.out_features, layer.in_features)
    return fits and matching_pattern(path, config.skip) is None


def coded(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of a weight [M, K], float8_e4m3fn, and a scale for each row, fp32 [M, 1].

    Those of FP32 are of what autocast to BF16 makes of it.

    Raises:
        ConfigError: it is sharded.
        ValueError: it is not finite.
    """
    if hasattr(weight, "device_mesh"):
        raise ConfigError(
            f"{name} is sharded: export on one rank what get_model_state_dict(..., options="
            "StateDictOptions(full_state_dict=True)) gathers, loaded into a model of its own."
        )
    if weight.dtype is torch.float32:
        weight = weight.bfloat16()
    amax = fp8.row_amax(weight)
    if not amax.isfinite().all():
        raise ValueError(
            f"{name} has a NaN or an infinity, of which FP8 would make a row of NaN. Export a "
            "checkpoint whose weights are finite."
        )
    scales = fp8.scale(amax, E4M3.name)
    return fp8.quantize(weight, scales, E4M3.name), scales


def quantization_config(ignored: list[str]) -> dict[str, Any]:
    """What config.json says of the weights, for compressed-tensors; `ignored` layers stay."""
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
