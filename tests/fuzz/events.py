"""Actions of a user between two steps: write weights, freeze or unfreeze them, run tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass

Event = Callable[[nn.Module], None]
Tool = Callable[[Any, Sequence[Any]], object]


@torch.no_grad()
def scale_weights(model: nn.Module) -> None:
    """Scale weights, as custom clipping and weight decay do."""
    for parameter in model.parameters():
        parameter.mul_(0.75)


@torch.no_grad()
def copy_to_weights(model: nn.Module) -> None:
    """Overwrite weights, as swapping in averages does."""
    for parameter in model.parameters():
        parameter.copy_(parameter.flip(0))


def load_weights(model: nn.Module) -> None:
    """Load a state dict."""
    model.load_state_dict({name: 0.75 * x for name, x in model.state_dict().items()})


def replace_data(model: nn.Module) -> None:
    """Replace the memory of parameters."""
    for parameter in model.parameters():
        parameter.data = 0.75 * parameter.data


def freeze_a_weight(model: nn.Module) -> None:
    """Freeze the first matrix."""
    next(p for p in model.parameters() if p.ndim > 1).requires_grad_(False)


def unfreeze_weights(model: nn.Module) -> None:
    """Unfreeze all weights."""
    model.requires_grad_(True)


EVENTS: dict[str, Event] = {
    f.__name__: f
    for f in (
        scale_weights,
        copy_to_weights,
        load_weights,
        replace_data,
        freeze_a_weight,
        unfreeze_weights,
    )
}


def loss_of(model: Callable[..., Any], batch: Sequence[Any]) -> Tensor:
    """Return a loss of all results of a program."""
    results = [y for y in model(*batch) if y.requires_grad]
    return torch.stack([y.float().square().mean() for y in results]).sum()


def diagnose(model: Any, batch: Sequence[Any]) -> object:
    """Measure the errors of gradients."""
    return fp8pass.diagnose(model, loss_of, batch)


def calibrate(model: Any, batch: Sequence[Any]) -> object:
    """Measure moments."""
    return fp8pass.calibrate(model, loss_of, batch)


def explain(model: Any, batch: Sequence[Any]) -> object:
    """Explain the compiled model."""
    return fp8pass.explain(model, *batch)


# Tools run on the compiled model only, and must not change it.
TOOLS: dict[str, Tool] = {f.__name__: f for f in (diagnose, calibrate, explain)}
