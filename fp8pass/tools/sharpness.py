"""`fp8pass.sharpness`: how far the loss rises within a small box around the last token's logits.

FP8 and back, section 3.1, after Keskar et al. 2017. Of the logits y that a model gives for the last
token, and the loss f of these alone, sharpness is

    φ = 100 · (max f(y + z) - f(y)) / (1 + f(y)),   over |z_i| ≤ ε (|y_i| + 1).          (Eq. 1, 2)

The model runs once. The search is L-BFGS-B from z = 0, SciPy's with its tolerances, in fp64.

Cross-entropy rises or falls with each logit wherever it is, so that its largest value in the box is
in the corner that the gradient at y points to. `search=False` computes that corner alone, on the
model's device: two losses and a gradient. What it leaves out is the search, which matters to losses
that turn within the box.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

from fp8pass.config import ConfigError
from fp8pass.tools.running import unchanged

EPSILON = 5e-4

_HOW_TO = (
    "loss_fn(model, batch) is the loss of the last token alone, computed from what model(...) "
    "returns, as lambda m, b: F.cross_entropy(m(b['input_ids']).logits[:, -1], b['next'])."
)


def sharpness(
    model: nn.Module | Callable[..., Any],
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    epsilon: float = EPSILON,
    search: bool = True,
) -> float:
    """Sharpness of the loss landscape in percent (FP8 and back, Eq. 2): large before divergence.

    The paper measures on data that is not trained on. The model runs once, in evaluation mode and
    without gradients, and is left as it was.

    Args:
        model: called by `loss_fn`. It returns logits [..., vocabulary], [batch, sequence,
            vocabulary] of a language model: a tensor, a tuple that begins with one, or an object or
            a mapping that has them as `logits`.
        loss_fn: `loss_fn(model, batch)` gives the mean loss of the last token of each sequence, one
            number. It is called with a stand-in for the model that returns the logits of the last
            token alone, [batch, 1, vocabulary] in fp64.
        batch: passed to `loss_fn`. Sequences of a batch are searched together: with one, this is
            the paper's metric, with more the ratio of mean rise and mean loss.
        epsilon: ε, the half width of the box relative to |y| + 1.
        search: whether to search the box with L-BFGS-B; else the rise in the corner that the
            gradient points to, which is the same for cross-entropy.

    Returns:
        φ in percent; what is not finite, where the loss is not.

    Raises:
        ConfigError: an option has an invalid value, `loss_fn` computes another loss, or inference
            mode is on.
    """
    if not isinstance(search, bool):
        raise ConfigError(f"search must be True or False, got {search!r}.")
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not epsilon > 0:
        raise ConfigError(f"epsilon must be a positive number, got {epsilon!r}.")
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "Sharpness takes a gradient, and nothing has one under torch.inference_mode(): leave "
            "it before, or use torch.no_grad() in its place."
        )
    landscape = Landscape(model, loss_fn, batch)
    start = landscape.loss(landscape.logits)
    if not math.isfinite(start):
        return start
    if start <= -1:
        raise ConfigError(
            f"Sharpness is a rise over 1 + loss, and loss_fn gave {start:g}. {_HOW_TO}"
        )
    half_widths = epsilon * (landscape.logits.abs() + 1)
    largest = (_searched if search else _in_corner)(landscape, half_widths)
    return 100 * (largest - start) / (1 + start)


class Landscape:
    """The loss as a function of the last token's logits.

    Attributes:
        logits: of the last token, as the model gave them, fp64.
    """

    def __init__(self, model: Any, loss_fn: Callable[[Any, Any], Tensor], batch: Any) -> None:
        self._model, self._loss_fn, self._batch = model, loss_fn, batch
        self._output: Any = None
        self._current: Tensor | None = None
        with (
            _evaluating(model),
            unchanged(model) if isinstance(model, nn.Module) else nullcontext(),
        ):
            self._loss()
        self.logits = self._logits_then()

    def loss(self, logits: Tensor) -> float:
        """The loss at other logits."""
        return self._at(logits.detach()).item()

    def loss_and_gradient(self, logits: Tensor) -> tuple[float, Tensor]:
        """The loss at other logits, and its gradient."""
        logits = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = self._at(logits)
            if not loss.requires_grad:
                raise ConfigError(f"The loss does not depend on the last token's logits. {_HOW_TO}")
            (gradient,) = torch.autograd.grad(loss, logits)
        return loss.item(), gradient

    def _logits_then(self) -> Tensor:
        """The logits that the stand-in has returned last."""
        if self._current is None:
            raise ConfigError(f"loss_fn has not called the model. {_HOW_TO}")
        return self._current

    def _at(self, logits: Tensor) -> Tensor:
        self._current = logits
        return self._loss()

    def _loss(self) -> Tensor:
        try:
            loss = self._loss_fn(self._stand_in, self._batch)
        except (RuntimeError, ValueError, IndexError) as error:
            if self._current is None:  # it is the model that fails
                raise
            shape = "×".join(map(str, self._current.shape))
            raise ConfigError(f"loss_fn failed on logits {shape}: {error}. {_HOW_TO}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss_fn gave {_described(loss)}, no single number. {_HOW_TO}")
        return loss.squeeze()

    def _stand_in(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returned, with the current logits of the last token."""
        if self._current is None:
            with torch.no_grad():
                self._output = self._model(*args, **kwargs)
            logits = logits_of(self._output)
            last = logits[:, -1:] if logits.ndim > 2 else logits
            self._current = last.detach().double()
        return _with_logits(self._output, self._logits_then())


def _searched(landscape: Landscape, half_widths: Tensor) -> float:
    """The largest loss that L-BFGS-B finds in the box."""
    center = landscape.logits
    # Of a mean loss, the gradient of each sequence is as if it were alone: tolerances are for that.
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


def _in_corner(landscape: Landscape, half_widths: Tensor) -> float:
    """The loss in the corner of the box that the gradient points to."""
    _, gradient = landscape.loss_and_gradient(landscape.logits)
    return landscape.loss(landscape.logits + half_widths * gradient.sign())


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returns.

    Raises:
        ConfigError: there are none.
    """
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "logits"):
        found = output[0] if output else None
    else:
        found = getattr(output, "logits", output)
    if not isinstance(found, Tensor) or found.ndim < 2 or not found.is_floating_point():
        raise ConfigError(
            f"The model returns {_described(output)}, no logits [batch, sequence, vocabulary]: for "
            "sharpness it must return them, alone, first in a tuple, or as .logits."
        )
    return found


def _with_logits(output: Any, logits: Tensor) -> Any:
    """An output like another one, with other logits."""
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


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode meanwhile; afterwards each module has its own mode again."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
