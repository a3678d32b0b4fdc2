"""`export` and `served_weights`: convert a model to FP8 weights for vLLM, SGLang, transformers.

Each linear layer has FP8 data, `NAME.weight`, float8_e4m3fn [out, in], and fp32 scales. The weight
is the product of the data and the scales. The serving engine quantizes the layer's inputs. The FP8
weights are bit-identical to the FP8 weights in the forward of training, if the recipe uses the same
kind of scales. FP32 weights are rounded to BF16 first, as autocast does.

The stacked weights of experts [E, N, K] are written as separate layers, `EXPERTS.0.up_proj.weight`,
as in the model's checkpoints in 16 bits. Experts train with row scales in any recipe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.quantization import BY_ROW, block_text, parse
from fp8pass.graph.linear_layers import why_unsuitable_size
from fp8pass.graph.names import matching_pattern
from fp8pass.option_checks import ConfigError, check_choice
from fp8pass.tools.running import find_configuration
from fp8pass.weights.choice import find_experts
from fp8pass.weights.quantized_parameter import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

fp8 = torch.ops.fp8pass

Format = Literal["row", "block"]


@dataclass(frozen=True)
class Layout:
    """A format in which serving engines read quantized weights."""

    quantization: str
    scales: str  # name of the scales, after the name of the layer
    # Returns the entry `quantization_config` of config.json, for the layers in high precision.
    configure: Callable[[list[str]], dict[str, Any]]

    def fits(self, rows: int, columns: int) -> bool:
        """Whether the blocks of the quantization divide a weight of this size evenly."""
        sizes = zip(parse(self.quantization).block, (rows, columns), strict=True)
        return all(side < 2 or size % side == 0 for side, size in sizes)


def export(
    model: nn.Module, path: str | Path, *, format: Format = "row", config: Config | None = None
) -> list[str]:
    """Write a `PreTrainedModel` to a folder for serving, with FP8 weights in its linear layers.

    As in training, some layers are not quantized: output heads, layers in `skip`, layers with sizes
    that are not multiples of 16, and layers too narrow to gain from FP8. With `format="block"`,
    sizes must be multiples of 128. The model is not changed.

    Args:
        model: a `PreTrainedModel`, compiled or not.
        path: the folder to write, in the layout of `save_pretrained`.
        format: `row`, one scale for each output feature in `NAME.weight_scale` [out, 1], in format
            `float-quantized` of compressed-tensors; or `block`, one scale for each 128×128 elements
            in `NAME.weight_scale_inv` [out / 128, in / 128], in the layout of DeepSeek-V3.
        config: a configuration. Its `skip` is used instead of the `skip` of the compiled model.

    Returns:
        Paths of the quantized layers, and of the quantized stacked weights of experts.

    Raises:
        ConfigError: the format is unknown, or the model is not a `PreTrainedModel`, is sharded, or
            has no layer for FP8.
        ValueError: a weight has a NaN or an infinity.
    """
    plain, layout = _check_pretrained(model, "export"), _find_layout(format)
    for name, parameter in plain.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"{name} is sharded. Load the full state dict, get_model_state_dict(..., options="
                "StateDictOptions(full_state_dict=True)), into an unsharded model on one rank, and "
                "export that model."
            )
    chosen = _choose_layers(plain, layout, config or find_configuration(model))
    values: dict[str, Tensor] = {}
    parts_of_experts: dict[str, Tensor] = {}
    for name, value, is_converted in _quantize_layers(plain, layout, chosen):
        (parts_of_experts if is_converted else values)[name] = value
    values = {**_in_checkpoint(plain, values), **parts_of_experts}
    converted: dict[str, Any] = {"save_original_format": False} if _conversion() else {}
    plain.save_pretrained(path, state_dict=values, **converted)
    layers = {name: name for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    layers |= {name: name.rpartition(".")[0] for name in find_experts(plain)}
    others = set(layers.values()) - {layers[name] for name in chosen}
    description = Path(path) / "config.json"
    settings = json.loads(description.read_text())
    settings["quantization_config"] = layout.configure(sorted(others))
    description.write_text(json.dumps(settings, indent=2) + "\n")
    return chosen


def served_weights(
    model: nn.Module, *, format: Format = "row", config: Config | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors that `export` would write, one by one, to update a serving engine.

    Sharded parameters are gathered one by one, so all ranks must iterate. For example, pass the
    pairs to `load_weights` of a vLLM model that was loaded from an exported folder.

    Args:
        model: a `PreTrainedModel`, compiled or not.
        format: `row` or `block`, as in `export`.
        config: a configuration. Its `skip` is used instead of the `skip` of the compiled model.

    Returns:
        An iterator of pairs of a name in the checkpoint and a tensor: FP8 data, scales, or a tensor
        of a layer that is not quantized.

    Raises:
        ConfigError: as in `export`, except that the model may be sharded.
        ValueError: a weight has a NaN or an infinity.
    """
    plain, layout = _check_pretrained(model, "served_weights"), _find_layout(format)
    chosen = _choose_layers(plain, layout, config or find_configuration(model))
    return _rename(plain, _quantize_layers(plain, layout, chosen))


def _rename(
    model: PreTrainedModel, values: Iterator[tuple[str, Tensor, bool]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under their names in a checkpoint.

    Parameters that a checkpoint splits into several tensors, or merges into one, keep their names
    in the model.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    empty = {name: torch.empty(x.shape, device="meta") for name, x in tensors}
    found = {name: [*_in_checkpoint(model, {name: x})] for name, x in empty.items()}
    counts = Counter(name for names in found.values() for name in names)
    for name, value, is_converted in values:
        parameter = name if name in found else f"{name.rpartition('weight')[0]}weight"
        new = [] if is_converted else found.get(parameter, [])
        if len(new) == 1 and counts[new[0]] == 1:
            name = name.replace(parameter, new[0], 1)
        yield name, value


def _check_pretrained(model: nn.Module, function: str) -> PreTrainedModel:
    from transformers import PreTrainedModel

    plain = compat.original_of(model)
    if not isinstance(plain, PreTrainedModel):
        raise ConfigError(
            f"{function} takes a PreTrainedModel of transformers, got {type(plain).__name__}. For "
            "a PEFT model, pass model.merge_and_unload(); for a wrapped model, pass its .module."
        )
    return plain


def _find_layout(format: str) -> Layout:
    check_choice("format", format, get_args(Format))
    return LAYOUTS[format]


def _choose_layers(model: PreTrainedModel, layout: Layout, config: Config) -> list[str]:
    """Return the paths of the layers and of the stacked weights of experts to quantize.

    Raises ConfigError if no layer fits.
    """
    head = model.get_output_embeddings()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = [
        name
        for name, layer in linears.items()
        if layer is not head
        and layout.fits(*layer.weight.shape)
        and not why_unsuitable_size(layer.out_features, layer.in_features)
        and matching_pattern(name, config.skip_patterns) is None
    ]
    modules: dict[nn.Module, list[str]] = {}
    for name, (module, _) in find_experts(model).items():
        modules.setdefault(module, []).append(name)
    for names in modules.values():  # loaders expect all weights of a module in the same format
        if all(_why_not_experts(model, name, layout, config) is None for name in names):
            chosen += names
    if not chosen:
        sides = [side for side in parse(layout.quantization).block if side > 1]
        raise ConfigError(
            f"No layer of {type(model).__name__} can be exported in FP8. Exported layers are "
            f"nn.Linear with sizes in multiples of {max(sides, default=16)}, except output heads, "
            "layers in skip and narrow layers."
        )
    return chosen


def _why_not_experts(
    model: PreTrainedModel, name: str, layout: Layout, config: Config
) -> str | None:
    """Return why the stacked weight of experts stays in 16 bits, or None."""
    if matching_pattern(name, config.skip_patterns) is not None:
        return "it is skipped"
    stacked = model.get_parameter(name)
    parts = _in_checkpoint(model, {name: torch.empty(stacked.shape, device="meta")})
    if any(x.ndim != 2 for x in parts.values()):
        return "checkpoints stack experts"
    sizes = [(x.shape[0], x.shape[1]) for x in parts.values()]
    if not all(layout.fits(*size) for size in sizes):
        return "blocks do not divide it"
    return next((why for size in sizes if (why := why_unsuitable_size(*size))), None)


def _conversion() -> Callable[..., dict[str, Tensor]] | None:
    """Return transformers' function that converts to a checkpoint; None before version 5."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion


def _in_checkpoint(model: PreTrainedModel, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's parameters, by name, to the tensors of a checkpoint, by name."""
    convert = _conversion()
    return dict(convert(model, values)) if convert else values


def _quantize_layers(
    model: PreTrainedModel, layout: Layout, chosen: list[str]
) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, is_converted). The name is from a checkpoint if `is_converted`, or else
    from the model.
    """
    linears = {f"{name}.weight": f"{name}.{layout.scales}" for name in chosen}
    experts = find_experts(model).keys() & set(chosen)
    # `state_dict` lists a tied weight under each of its names, `named_parameters` under one.
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = model.state_dict()
    for name in (name for name in values if name in parameters or name in buffers):
        value = values[name]
        if isinstance(parameters.get(name), QuantizedWeight):  # the state dict may have FP8 data
            value = parameters[name].detach() + 0
        whole = value.full_tensor() if hasattr(value, "device_mesh") else value
        if name in linears:
            data, scales = quantize_weight(name, whole, layout.quantization)
            yield name, data, False
            yield linears[name], scales, False
        elif name in experts:
            pair = quantize_weight(name, whole.flatten(0, 1), layout.quantization)
            data, scales = (x.unflatten(0, (len(whole), -1)) for x in pair)
            for part, x in _in_checkpoint(model, {name: data}).items():
                yield part, x, True
            for part, x in _in_checkpoint(model, {name: scales}).items():
                yield f"{part.removesuffix('weight')}{layout.scales}", x, True
        else:
            yield name, whole, False


def quantize_weight(name: str, weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn data [M, K] and fp32 scales. FP32 weights are rounded to BF16 first.

    Raises:
        ValueError: the weight is not finite.
    """
    if weight.dtype is torch.float32:
        weight = weight.bfloat16()
    amax = fp8.amax(weight, block_text(parse(quantization).block))
    if not amax.isfinite().all():
        raise ValueError(
            f"{name} has a NaN or an infinity, which would make all weights with the same scale "
            "NaN in FP8. Export a checkpoint with finite weights."
        )
    scales = fp8.scale(amax, quantization)
    return fp8.quantize(weight, scales, quantization), scales


def _configure_rows(others: list[str]) -> dict[str, Any]:
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
        "ignore": others,
        "kv_cache_scheme": None,
    }


def _configure_blocks(others: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": others,
    }


LAYOUTS: dict[str, Layout] = {
    "row": Layout(BY_ROW, "weight_scale", _configure_rows),
    "block": Layout("e4m3 128×128 fp32", "weight_scale_inv", _configure_blocks),
}
