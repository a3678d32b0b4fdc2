"""The features whose pairs are trained. One table: the tests and the documentation read it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from training import CHANGE, Feature, Training, batches_of

import fp8pass


class Option(Feature):
    """Options of the compilation."""

    ours = True

    def __init__(self, name: str, one_of: str = "", **options: Any) -> None:
        super().__init__(name)
        self.one_of, self.options = one_of, options

    def configure(self, t: Training) -> None:
        t.options |= self.options


class Optimizer(Feature):
    """fp8pass's AdamW."""

    ours = True
    one_of = "optimizer"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name)
        self.options = options

    def configure(self, t: Training) -> None:
        t.optimizer_options = self.options


class Attach(Optimizer):
    """Updates within the backward."""

    def configure(self, t: Training) -> None:
        super().configure(t)
        t.steps_in_backward = True

    def start(self, t: Training) -> None:
        fp8pass.optim.attach(t.model, t.optimizer, accumulate=t.accumulate)


class Frozen(Feature):
    """All linear layers of blocks but the last's are frozen; with fp8pass in FP8."""

    def __init__(self, name: str, *, quantized: bool) -> None:
        super().__init__(name)
        self.quantized = quantized
        self.one_of = "weights"

    def change_model(self, t: Training) -> None:
        t.model.layers[0].requires_grad_(False)
        if self.quantized and not t.plain:
            fp8pass.freeze(t.model)


class OffloadedWeights(Feature):
    """Weights in host memory, FP8 data on the device."""

    ours = True
    one_of = "weights"

    def change_model(self, t: Training) -> None:
        with patch("fp8pass.optim.weights.SMALLEST", 1):
            fp8pass.optim.offload_weights(t.model, "cpu")

    def configure(self, t: Training) -> None:
        t.dtype = torch.bfloat16
        t.optimizer_options = t.optimizer_options or {}


class Unfrozen(Feature):
    """A block that is trained from the middle of the training on."""

    one_of = "weights"

    def change_model(self, t: Training) -> None:
        t.model.layers[0].requires_grad_(False)

    def before_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            t.add_trained(t.model.layers[0].parameters())


class Precision(Feature):
    """Dtypes of weights and of the forward."""

    one_of = "precision"

    def __init__(
        self, name: str, dtype: torch.dtype, autocast: torch.dtype | None, scaled: bool = False
    ) -> None:
        super().__init__(name)
        self.dtype, self.autocast, self.scaled = dtype, autocast, scaled

    def configure(self, t: Training) -> None:
        t.dtype, t.autocast = self.dtype, self.autocast
        t.scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if self.scaled else None


class Accumulation(Feature):
    """Two micro-batches in each step."""

    def configure(self, t: Training) -> None:
        t.accumulate = 2


class SameWeights(Accumulation):
    """Weights that are quantized once for all micro-batches of a step."""

    ours = False

    def configure(self, t: Training) -> None:
        super().configure(t)
        if not t.plain:
            t.options |= {"weight_codes": "1MiB"}

    def before_step(self, t: Training, step: int) -> None:
        if not t.plain:
            t.same = fp8pass.same_weights()
            t.same.__enter__()

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if not t.plain:
            t.same.__exit__(None, None, None)


class Clipping(Feature):
    """Gradients clipped by their global norm."""

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if t.scaler:
            t.scaler.unscale_(t.optimizer)
        if t.steps_in_backward:
            raise Impossible("attach updates weights before all gradients are known")
        nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)


class Average(Feature):
    """An exponential average of the weights, which takes their place in the middle."""

    def start(self, t: Training) -> None:
        t.average = {n: p.detach().clone().float() for n, p in t.model.named_parameters()}

    def after_step(self, t: Training, step: int) -> None:
        with torch.no_grad():
            for name, p in t.model.named_parameters():
                t.average[name].lerp_(p.detach().float(), 0.5)
                if step == CHANGE and p.requires_grad:
                    p.copy_(t.average[name])


class Loading(Feature):
    """A checkpoint of model and optimizer that is saved and loaded two steps later."""

    def before_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            t.saved = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
        if step == CHANGE + 2:
            model, optimizer = t.saved
            t.model.load_state_dict(model)
            t.optimizer.load_state_dict(optimizer)


class Checkpointing(Feature):
    """Activation checkpointing of each block."""

    def change_model(self, t: Training) -> None:
        for layer in t.model.layers:
            forward = layer.forward
            layer.forward = _checkpointed(forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)

    return run


class Evaluation(Feature):
    """Losses without gradients between steps."""

    def before_step(self, t: Training, step: int) -> None:
        if step % 4 == 3:
            t.model.eval()
            with torch.no_grad():
                t.loss(batches_of(1)[0][0])
            t.model.train()


class Watched(Feature):
    """A Monitor that samples every third step."""

    ours = True

    def configure(self, t: Training) -> None:
        t.monitor = fp8pass.Monitor(every=3)

    def after_step(self, t: Training, step: int) -> None:
        assert t.monitor is not None
        t.monitor.step()


class Guarded(Feature):
    """A Guard that would lower the learning rate."""

    ours = True

    def start(self, t: Training) -> None:
        t.guard = fp8pass.Guard(
            model=t.model, optimizer=t.optimizer, act=("lower lr", "roll back"), every=2
        )

    def after_step(self, t: Training, step: int) -> None:
        t.guard.step(torch.tensor(t.losses[-1] if t.losses else 5.5))

    def finish(self, t: Training) -> None:
        assert not t.guard.events, t.guard.events


class Tool(Feature):
    """A tool that runs a step of its own between a backward and the optimizer."""

    ours = True

    def __init__(self, name: str, tool: Callable[..., Any]) -> None:
        super().__init__(name)
        self.tool = tool

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            self.tool(t.model, lambda model, batch: t.loss(batch, model), batches_of(1)[0][0])


class Explained(Feature):
    """explain in the middle of training."""

    ours = True

    def between_backward_and_step(self, t: Training, step: int) -> None:
        if step == CHANGE:
            batch = batches_of(1)[0][0]
            fp8pass.explain(t.model, batch[:, :-1], batch[:, 1:])


class Impossible(Exception):
    """Why two features cannot be combined, found by the training itself."""


FEATURES: tuple[Feature, ...] = (
    Option("recipe linear", "recipe", recipe="linear"),
    Option("recipe agoq", "recipe", recipe="agoq"),
    Option("recipe exact", "recipe", recipe="exact"),
    Option("memory budget", memory_budget=0.5),
    Option("head in chunks", head_chunks=2),
    Option("precise accumulation", fast_accumulation=()),
    Optimizer("fp8pass AdamW"),
    Optimizer("preset fp8-lm", preset="fp8-lm"),
    Optimizer("preset coat-paper", preset="coat-paper"),
    Attach("attach"),
    Frozen("frozen weights", quantized=False),
    Frozen("frozen weights in FP8", quantized=True),
    OffloadedWeights("weights in host memory"),
    Unfrozen("a block unfrozen later"),
    Precision("BF16 weights", torch.bfloat16, None),
    Precision("BF16 autocast", torch.float32, torch.bfloat16),
    Precision("FP16 autocast, GradScaler", torch.float32, torch.float16, scaled=True),
    Accumulation("micro-batches"),
    SameWeights("same_weights"),
    Clipping("clipping"),
    Average("averaged weights"),
    Loading("checkpoint loaded"),
    Checkpointing("activation checkpointing"),
    Evaluation("evaluation"),
    Watched("Monitor"),
    Guarded("Guard"),
    Tool("diagnose", fp8pass.diagnose),
    Tool("calibrate", fp8pass.calibrate),
    Explained("explain"),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """All pairs of features that are not alternatives."""
    for a, b in itertools.combinations(FEATURES, 2):
        if not a.one_of or a.one_of != b.one_of:
            yield a, b
