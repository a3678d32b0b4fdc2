"""`fp8pass.sharpness`: the largest rise of the loss in a small box around the last token's logits.

Section 3.1 of the paper "To FP8 and Back Again", after Keskar et al. 2017, defines the metric. With
the logits y of the last token, and the loss f as a function of these logits, sharpness is

    φ = 100 · (max f(y + z) - f(y)) / (1 + f(y)),   over |z_i| ≤ ε (|y_i| + 1).          (Eq. 1, 2)

SciPy's L-BFGS-B searches for the maximum from z = 0, with default tolerances, in FP64.
Cross-entropy is monotonic in each logit, so its maximum over the box is in the corner that the
gradient at y points to. Losses that are not monotonic within the box need the search.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from fp8pass.compat.attributes import set_attributes
from fp8pass.option_checks import ConfigError, is_number
from fp8pass.tools.running import describe_value, restore_state

EPSILON = 5e-4

_HOW_TO = (
    "loss_fn(model, batch) must return the loss of the last token, computed from the logits of "
    "model(...), like lambda m, b: F.cross_entropy(m(b['input_ids']).logits[:, -1], b['next'])."
)


def sharpness(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    epsilon: float = EPSILON,
    search: bool = True,
) -> float:
    """Return the sharpness of the loss landscape in percent ("To FP8 and Back Again", Eq. 2).

    Sharpness is large before training diverges. The paper measures sharpness on held-out data. The
    model runs once, in evaluation mode and without gradients; its state is restored.

    Args:
        model: called by `loss_fn`. Its logits have the shape [batch, sequence, vocabulary] for a
            language model, or [batch, vocabulary]. The model returns them as a tensor, first in a
            tuple, or as `logits` of an object or mapping.
        loss_fn: `loss_fn(model, batch)` returns a scalar, the mean loss over the last tokens of all
            sequences. Its argument `model` is a stand-in that returns only the logits of the
            last token, [batch, 1, vocabulary] in FP64.
        batch: passed to `loss_fn`. For one sequence the result is the paper's metric. For several
            sequences, one search covers all of them, and f is their mean loss.
        epsilon: ε, the half width of the box relative to |y| + 1.
        search: whether to search the box with L-BFGS-B. Otherwise the loss in the corner that the
            gradient points to counts as the maximum, which gives the same result for cross-entropy.

    Returns:
        φ in percent; the loss itself if the loss is not finite.

    Raises:
        ConfigError: an option has an invalid value, `loss_fn` does not compute the loss of the last
            token, or inference mode is on.
    """
    if not isinstance(search, bool):
        raise ConfigError(f"search must be True or False, got {search!r}.")
    if not is_number(epsilon) or not epsilon > 0:
        raise ConfigError(f"epsilon must be a positive number, got {epsilon!r}.")
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "sharpness needs a gradient, which torch.inference_mode() does not allow. Leave "
            "inference mode first; torch.no_grad() is fine."
        )
    landscape = Landscape(model, loss_fn, batch)
    start = landscape.loss(landscape.logits)
    if not math.isfinite(start):
        return start
    if start <= -1:
        raise ConfigError(
            f"sharpness divides by 1 + loss, so the loss must be above -1, but it is {start:g}. "
            f"{_HOW_TO}"
        )
    half_widths = epsilon * (landscape.logits.abs() + 1)
    largest = (_search_box if search else _compute_corner)(landscape, half_widths)
    return 100 * (largest - start) / (1 + start)


class Landscape:
    """The loss as a function of the last token's logits.

    Attributes:
        logits: the model's logits of the last token, in FP64.
    """

    def __init__(self, model: Any, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> None:
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._output: Any = None
        self._current: Tensor | None = None
        modules = model.modules() if isinstance(model, nn.Module) else ()
        with (
            set_attributes([(module, "training", False) for module in modules]),
            restore_state(model) if isinstance(model, nn.Module) else nullcontext(),
        ):
            self._loss()
        if self._current is None:
            raise ConfigError(f"loss_fn did not call the model. {_HOW_TO}")
        self.logits: Tensor = self._current

    def loss(self, logits: Tensor) -> float:
        return self._compute(logits.detach()).item()

    def loss_and_gradient(self, logits: Tensor) -> tuple[float, Tensor]:
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = self._compute(logits)
            if not loss.requires_grad:
                raise ConfigError(f"The loss does not depend on the last token's logits. {_HOW_TO}")
            (gradient,) = torch.autograd.grad(loss, logits)
        return loss.item(), gradient

    def _compute(self, logits: Tensor) -> Tensor:
        self._current = logits
        return self._loss()

    def _loss(self) -> Tensor:
        try:
            loss = self._loss_fn(self._stand_in, self._batch)
        except (RuntimeError, ValueError, IndexError) as error:
            if self._current is None:  # the model itself failed
                raise
            shape = "×".join(map(str, self._current.shape))
            raise ConfigError(f"loss_fn failed on logits {shape}: {error}. {_HOW_TO}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss_fn returned {describe_value(loss)}, not a scalar. {_HOW_TO}")
        return loss.squeeze()

    def _stand_in(self, *args: Any, **kwargs: Any) -> Any:
        if self._current is None:
            with torch.no_grad():
                self._output = self._model(*args, **kwargs)
            logits = find_logits(self._output)
            last = logits[:, -1:] if logits.ndim > 2 else logits
            self._current = last.detach().double()
        return _replace_logits(self._output, self._current)


def _search_box(landscape: Landscape, half_widths: Tensor) -> float:
    center = landscape.logits
    # L-BFGS-B's tolerances suit the sum over sequences, not the mean.
    count = math.prod(center.shape[:-1])

    def descent(z: np.ndarray) -> tuple[float, np.ndarray]:
        noise = torch.from_numpy(z).to(center.device).view_as(center)
        loss, gradient = landscape.loss_and_gradient(center + noise)
        return -count * loss, -count * gradient.flatten().cpu().numpy()

    bounds = half_widths.flatten().cpu().numpy()
    found = optimize.minimize(
        descent,
        np.zeros_like(bounds),
        method="L-BFGS-B",
        jac=True,
        bounds=optimize.Bounds(-bounds, bounds),
    )
    return float(-found.fun) / count


def _compute_corner(landscape: Landscape, half_widths: Tensor) -> float:
    _, gradient = landscape.loss_and_gradient(landscape.logits)
    return landscape.loss(landscape.logits + half_widths * gradient.sign())


def find_logits(output: Any) -> Tensor:
    """Return the logits in a model's output. Raises ConfigError if it has no logits."""
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "logits"):
        found = output[0] if output else None
    else:
        found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim < 2 or not found.is_floating_point():
        raise ConfigError(
            f"The model returns {describe_value(output)} instead of logits [batch, sequence, "
            "vocabulary]. For sharpness, return the logits alone, first in a tuple, or as .logits."
        )
    return found


def _replace_logits(output: Any, logits: Tensor) -> Any:
    if isinstance(output, Tensor):
        return logits
    if isinstance(output, (tuple, list)) and not hasattr(output, "logits"):
        return (logits, *output[1:])
    changed = copy.copy(output)
    if isinstance(output, Mapping):
        changed["logits"] = logits
    else:
        changed.logits = logits
    return changed
