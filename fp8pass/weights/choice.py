"""Choose the linear layers and experts of a model that can have quantized weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fp8pass.config import Pattern
from fp8pass.graph.linear_layers import why_unsuitable_size
from fp8pass.graph.names import clean_path, matching_pattern, warn_about_idle_patterns
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
    are left out if `considers` is false for their weight.

    Returns the layers of each chosen weight. Also returns the paths of other layers, each with the
    reason why it cannot be quantized.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    linears = find_linears(model, skip)
    shared = {p for m in model.modules() if m not in linears for p in m.parameters(recurse=False)}
    layers: dict[Tensor, list[nn.Linear]] = {}
    reasons: dict[str, str] = {}
    for layer, (path, why) in linears.items():
        weight = layer.weight
        if not considers(weight):
            continue
        if weight in shared:
            why = why or "a module that is not a linear layer shares its weight"
        if why := why or _why_unsuitable(weight) or why_not(weight):
            reasons[path] = why
        else:
            layers.setdefault(weight, []).append(layer)
    return layers, reasons


def find_linears(model: nn.Module, skip: tuple[Pattern, ...]) -> dict[nn.Linear, tuple[str, str]]:
    """Return the path of each linear layer, and why it stays in high precision, or ''."""
    named = [(clean_path(path), m) for path, m in model.named_modules()]
    linears = {m: path for path, m in named if isinstance(m, nn.Linear)}
    names = [*linears.values(), *find_experts(model)]
    warn_about_idle_patterns("skip", skip, "linear layer", names)
    logits, reason = largest_embedding_size(model), "it is an output head, or skipped"
    return {
        m: (path, reason if stays_in_high_precision(path, m, logits, skip) else "")
        for m, path in linears.items()
    }


def find_experts(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return, by path, the module and the name of each stacked weight of experts [E, N, K].

    The path or the class of the module contains the word "expert".
    """
    return {
        clean_path(f"{path}.{name}".lstrip(".")): (module, name)
        for path, module in model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3 and len(weight) > 1
        if "expert" in f"{path}.{name} {type(module).__name__}".lower()
    }


def choose_experts(
    model: nn.Module, skip: tuple[Pattern, ...], why_not: Callable[[Tensor], str]
) -> tuple[dict[Tensor, list[tuple[nn.Module, str]]], dict[str, str]]:
    """Choose the frozen weights of experts that can be quantized.

    Returns, for each chosen weight, the modules that have the weight, and its name in each module.
    Also returns, by path, why other weights cannot be quantized.
    """
    chosen: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    reasons: dict[str, str] = {}
    for path, (module, name) in find_experts(model).items():
        weight = getattr(module, name)
        if weight.requires_grad or type(weight) is not nn.Parameter:
            continue
        if matching_pattern(path, skip) is not None:
            reasons[path] = "it is skipped"
        elif why := why_unsuitable_size(*weight.shape[1:]) or why_not(weight):
            reasons[path] = why
        else:
            chosen.setdefault(weight, []).append((module, name))
    return chosen, reasons


def why_not_plain(weight: Tensor) -> str:
    """Return why a weight is not a plain parameter, or ''."""
    if type(weight) is nn.Parameter:
        return ""
    return f"it is a {type(weight).__name__}, not a plain parameter"


def _why_unsuitable(weight: Tensor) -> str:
    return why_unsuitable_size(*weight.shape) if weight.numel() else "it is empty"
