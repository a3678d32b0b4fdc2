"""Callbacks for the trainers of Hugging Face and Lightning, shared by `Monitor` and `Guard`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


class StepObserver(ABC):
    """An object that a trainer notifies of each optimizer step, through a callback.

    If a subclass has `state_dict` and `load_state_dict`, checkpoints contain its state.
    """

    def hugging_face(self) -> Any:
        """Return a callback for `transformers.Trainer`. Do not call `step()` yourself.

        A Guard receives the loss and gradient norm only when the Trainer logs them: set
        `logging_steps` to 1 or a few. Checkpoints contain the Guard's state, which is restored with
        `TrainingArguments(restore_callback_states_from_checkpoint=True)`.
        """
        return make_trainer_callback(self)

    def lightning(self) -> Any:
        """Return a callback for Lightning's `Trainer`. Do not call `step()` yourself."""
        return make_lightning_callback(self)

    @abstractmethod
    def _begin(self, model: Any, optimizers: Sequence[Any], steps: int) -> None:
        """Start to watch a training that has done `steps` optimizer steps already."""

    @abstractmethod
    def _end_step(self, loss: Any, gradient_norm: Any) -> None:
        """Count an optimizer step. Called before gradients are zeroed; arguments may be None."""


def make_trainer_callback(observer: Any) -> Any:
    library = _import_first("transformers")
    states = _import_first("transformers.trainer_callback")

    class TrainerStepCallback(library.TrainerCallback):  # type: ignore[name-defined]
        logged: Mapping[str, float] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs.get("optimizer")
            optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
            observer._begin(kwargs.get("model"), [optimizer], state.global_step)

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                self.logged = logs

        # The Trainer calls this after the optimizer step and before zero_grad().
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs, self.logged = self.logged, {}
            observer._end_step(logs.get("loss"), logs.get("grad_norm"))

    if not hasattr(observer, "state_dict"):
        return TrainerStepCallback()

    class TrainerGuardCallback(TrainerStepCallback, states.ExportableState):  # type: ignore[name-defined]
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"guarded": observer.state_dict()}}

        @property
        def guarded(self) -> dict[str, Any]:
            return observer.state_dict()

        @guarded.setter
        def guarded(self, state: Mapping[str, Any]) -> None:
            observer.load_state_dict(state)

    return TrainerGuardCallback()


def make_lightning_callback(observer: Any) -> Any:
    library = _import_first("lightning.pytorch", "pytorch_lightning")

    class LightningStepCallback(library.Callback):  # type: ignore[name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen = trainer.global_step
            observer._begin(pl_module, trainer.optimizers, self.seen)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
        ) -> None:
            # With gradient accumulation only the last batch completes an optimizer step.
            if trainer.global_step != self.seen:
                self.seen = trainer.global_step
                loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
                observer._end_step(loss, None)

    if not hasattr(observer, "state_dict"):
        return LightningStepCallback()

    # Lightning stores the states of callbacks by the qualified names of their classes. So a Guard's
    # callback has its own class, and checkpoints lose its state if the class is renamed or moved.
    class LightningGuardCallback(LightningStepCallback):
        def state_dict(self) -> dict[str, Any]:
            return observer.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            observer.load_state_dict(state_dict)

    return LightningGuardCallback()


def _import_first(*modules: str) -> Any:
    for module in modules:
        try:
            return import_module(module)
        except ImportError as error:
            failure = error
    names = [m.partition(".")[0].replace("_", "-") for m in modules]
    raise ImportError(
        f"This callback needs {' or '.join(names)}: pip install {names[0]}"
    ) from failure
