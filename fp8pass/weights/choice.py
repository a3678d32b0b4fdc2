"""Choose the linear layers of a model that can have quantized weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fp8pass.config import Pattern
from fp8pass.graph.linear_layers import why_unsuitable_size
from fp8pass.graph.names import clean_path, warn_about_idle_patterns
from fp8pass.graph.output_heads import largest_embedding_size, stays_in_high_precision
from fp8pass.option_checks import ConfigError


def choose_layers(
    model: nn.Module,
    skip: tuple[Pattern, ...],
    why_not: Callable[[Tensor], str],
    considers: Callable[[Tensor], bool] = lambda weight: True,
) -> tuple[dict[Tensor, list[nn.Linear]], dict[str, str]]:
    """Choose the linear layers of a model that can have quantized weights.

    `skip` excludes layer paths. `why_not` returns why a weight cannot be quantized, or ''. Layers
    without a candidate weight (`considers`) are left out.

    Returns the layers of each chosen weight, and why other layers, by path, cannot be quantized.

    Raises:
        ConfigError: the model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    modules = model.named_modules()
    linears = {m: clean_path(path) for path, m in modules if isinstance(m, nn.Linear)}
    warn_about_idle_patterns("skip", skip, "linear layer", list(linears.values()))
    logits = largest_embedding_size(model)
    shared = {p for m in model.modules() if m not in linears for p in m.parameters(recurse=False)}
    layers: dict[Tensor, list[nn.Linear]] = {}
    reasons: dict[str, str] = {}
    for layer, path in linears.items():
        if not considers(layer.weight):
            continue
        if stays_in_high_precision(path, layer, logits, skip):
            reasons[path] = "it is an output head, or skipped"
        elif layer.weight in shared:
            reasons[path] = "a module that is not a linear layer shares its weight"
        elif why := _why_not_quantizable(layer.weight) or why_not(layer.weight):
            reasons[path] = why
        else:
            layers.setdefault(layer.weight, []).append(layer)
    return layers, reasons


def _why_not_quantizable(weight: Tensor) -> str:
    if type(weight) is not nn.Parameter:
        return f"it is a {type(weight).__name__}, not a plain parameter"
    return why_unsuitable_size(*weight.shape) if weight.numel() else "it is empty"
