"""Callbacks that call a monitor's `step()` in the training loops of other libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from torch import nn


class StepCounter(Protocol):
    """The part of a `Monitor` that callbacks use."""

    model: nn.Module | None

    def step(self) -> None:
        """Count an optimizer step."""

    def resume(self, steps: int) -> None:
        """Continue after `steps` optimizer steps."""


def hugging_face(monitor: StepCounter) -> Any:
    """A `transformers.TrainerCallback`.

    Raises:
        ImportError: transformers is not installed.
    """
    library = first_of("transformers")

    class TrainerMonitorCallback(library.TrainerCallback):  # type: ignore[name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _begin(monitor, kwargs.get("model"), state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.step()

    return TrainerMonitorCallback()


def lightning(monitor: StepCounter) -> Any:
    """A callback of Lightning, from `lightning` or `pytorch_lightning`.

    Raises:
        ImportError: neither is installed.
    """
    library = first_of("lightning.pytorch", "pytorch_lightning")

    class LightningMonitorCallback(library.Callback):  # type: ignore[name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen = trainer.global_step
            _begin(monitor, pl_module, self.seen)

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            # With gradient accumulation only the last batch ends a step.
            if trainer.global_step != self.seen:
                self.seen = trainer.global_step
                monitor.step()

    return LightningMonitorCallback()


def _begin(monitor: StepCounter, model: Any, steps: int) -> None:
    """Give the monitor its model, if it has none, and the number of steps done."""
    if monitor.model is None:
        monitor.model = model
    monitor.resume(steps)


def first_of(*modules: str) -> Any:
    """The first module that can be imported."""
    for module in modules:
        try:
            return import_module(module)
        except ImportError as error:
            failure = error
    names = [m.partition(".")[0].replace("_", "-") for m in modules]
    raise ImportError(
        f"This callback needs {' or '.join(names)}: pip install {names[0]}"
    ) from failure
