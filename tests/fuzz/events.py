"""What a user does between two steps: writes weights, freezes and unfreezes, runs tools."""

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
    """As clipping and weight decay of the user's own do."""
    for parameter in model.parameters():
        parameter.mul_(0.75)


@torch.no_grad()
def copy_to_weights(model: nn.Module) -> None:
    """As swapping in averages does."""
    for parameter in model.parameters():
        parameter.copy_(parameter.flip(0))


def load_weights(model: nn.Module) -> None:
    """Load a state dict."""
    model.load_state_dict({name: 0.75 * x for name, x in model.state_dict().items()})


def replace_data(model: nn.Module) -> None:
    """Give parameters other memory."""
    for parameter in model.parameters():
        parameter.data = 0.75 * parameter.data


def freeze_a_weight(model: nn.Module) -> None:
    """Freeze the first matrix."""
    next(p for p in model.parameters() if p.ndim > 1).requires_grad_(False)


def unfreeze_weights(model: nn.Module) -> None:
    """Train everything."""
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
    """A loss of everything that a program returns."""
    results = [y for y in model(*batch) if y.requires_grad]
    return torch.stack([y.float().square().mean() for y in results]).sum()


def diagnose(model: Any, batch: Sequence[Any]) -> object:
    """Measure the errors of gradients."""
    return fp8pass.diagnose(model, loss_of, batch)


def calibrate(model: Any, batch: Sequence[Any]) -> object:
    """Measure moments."""
    return fp8pass.calibrate(model, loss_of, batch)


def explain(model: Any, batch: Sequence[Any]) -> object:
    """Explain the model as it is compiled."""
    return fp8pass.explain(model, *batch)


# Only the compiled model has these; they must change nothing.
TOOLS: dict[str, Tool] = {f.__name__: f for f in (diagnose, calibrate, explain)}
