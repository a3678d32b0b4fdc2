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

    class LightningMonitorCallback(lightning_steps()):  # type: ignore[misc]
        def begin(self, trainer: Any, module: Any, steps: int) -> None:
            _begin(monitor, module, steps)

        def end_step(self, outputs: Any) -> None:
            monitor.step()

    return LightningMonitorCallback()


def lightning_steps() -> Any:
    """A class of Lightning's callbacks that follow optimizer steps: `begin` and `end_step`.

    Raises:
        ImportError: neither `lightning` nor `pytorch_lightning` is installed.
    """
    library = first_of("lightning.pytorch", "pytorch_lightning")

    class LightningSteps(library.Callback):  # type: ignore[name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen = trainer.global_step
            self.begin(trainer, pl_module, self.seen)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
        ) -> None:
            # With gradient accumulation only the last batch ends a step.
            if trainer.global_step != self.seen:
                self.seen = trainer.global_step
                self.end_step(outputs)

        def begin(self, trainer: Any, module: Any, steps: int) -> None:
            """The training of a module begins after so many steps."""
            raise NotImplementedError

        def end_step(self, outputs: Any) -> None:
            """An optimizer step has ended; `outputs` are those of its last batch."""
            raise NotImplementedError

    return LightningSteps


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
