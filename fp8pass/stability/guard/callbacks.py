"""Callbacks that call a guard's `step()` in the training loops of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fp8pass.stability.monitor.callbacks import first_of, lightning_steps


class Watcher(Protocol):
    """The part of a `Guard` that callbacks use."""

    def watch(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        """Set the model and its optimizer."""

    def step(self, loss: Any = None, *, gradient_norm: Any = None) -> None:
        """Count an optimizer step."""

    def resume(self, steps: int) -> None:
        """Continue after `steps` optimizer steps."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""


def hugging_face(guard: Watcher) -> Any:
    """A `transformers.TrainerCallback`.

    Its state is in checkpoints, as that of other callbacks, and comes back where
    `TrainingArguments(restore_callback_states_from_checkpoint=True)` says so.

    Raises:
        ImportError: transformers is not installed.
    """
    library = first_of("transformers")
    states = first_of("transformers.trainer_callback")

    class TrainerGuardCallback(library.TrainerCallback, states.ExportableState):  # type: ignore[name-defined]
        logged: Mapping[str, float] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs["optimizer"]
            guard.watch(kwargs.get("model"), getattr(optimizer, "optimizer", optimizer))
            guard.resume(state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                self.logged = logs

        # After the step, when gradients are still there.
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs, self.logged = self.logged, {}
            guard.step(logs.get("loss"), gradient_norm=logs.get("grad_norm"))

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"guarded": guard.state_dict()}}

        @property
        def guarded(self) -> dict[str, Any]:
            return guard.state_dict()

        @guarded.setter
        def guarded(self, state: Mapping[str, Any]) -> None:
            guard.load_state_dict(state)

    return TrainerGuardCallback()


def lightning(guard: Watcher) -> Any:
    """A callback of Lightning, from `lightning` or `pytorch_lightning`.

    Raises:
        ImportError: neither is installed.
    """

    class LightningGuardCallback(lightning_steps()):  # type: ignore[misc]
        def begin(self, trainer: Any, module: Any, steps: int) -> None:
            guard.watch(module, trainer.optimizers[0])
            guard.resume(steps)

        def end_step(self, outputs: Any) -> None:
            guard.step(_loss(outputs))

        def state_dict(self) -> dict[str, Any]:
            return guard.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            guard.load_state_dict(state_dict)

    return LightningGuardCallback()


def _loss(outputs: Any) -> Any:
    """The loss that a training step returned, if it did."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
