"""A tiny decoder that is trained with any combination of features, and without fp8pass.

A `Training` is built in the order in which users do it: model, weights, compilation, optimizer,
tools, steps. A feature changes some of these stages (`features.py`). The *plain* training with the
same features leaves out those that only fp8pass has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size

SIZE = Size(64, 2, 2, 2, 128, seq=32, batch=4, steps=16, peak_lr=5e-3)
CHANGE = SIZE.steps // 2  # the step before which features that interrupt a training do so


class Feature:
    """What a user adds to a training. A stage that a feature does not change is left alone.

    Attributes:
        name: of the feature.
        ours: whether only fp8pass has it: the plain training goes without.
        one_of: a choice of which a training makes one: features of the same choice are no pair.
    """

    ours = False
    one_of = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def configure(self, t: Training) -> None:
        """Change options before anything is made."""

    def change_model(self, t: Training) -> None:
        """Change the model before it is compiled."""

    def start(self, t: Training) -> None:
        """Begin to use the compiled model and the optimizer."""

    def before_step(self, t: Training, step: int) -> None:
        """Act between two steps."""

    def between_backward_and_step(self, t: Training, step: int) -> None:
        """Act while gradients are waiting for the optimizer."""

    def after_step(self, t: Training, step: int) -> None:
        """Act after the optimizer, before gradients are dropped."""

    def finish(self, t: Training) -> None:
        """Act after the last step."""


@dataclass
class Training:
    """A model with its optimizer; see the module's docstring.

    Attributes:
        options: of fp8pass.
        dtype: of the weights.
        autocast: the dtype that the forward computes in; None is that of the weights.
        optimizer_options: of fp8pass's AdamW; None is PyTorch's.
        accumulate: micro-batches of a step.
        losses: of the steps.
        steps_in_backward: whether `loss.backward()` updates the weights.
    """

    features: tuple[Feature, ...]
    plain: bool
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    optimizer_options: dict[str, Any] | None = None
    accumulate: int = 1
    losses: list[float] = field(default_factory=list)
    steps_in_backward: bool = False
    monitor: fp8pass.Monitor | None = None
    scaler: Any = None

    def __post_init__(self) -> None:
        if self.plain:
            self.features = tuple(f for f in self.features if not f.ours)
        self._each("configure")
        torch.manual_seed(0)
        self.model: nn.Module = Decoder(SIZE).to(self.dtype)
        self._each("change_model")
        self.initial = weights_of(self.model)
        if not self.plain:
            config = fp8pass.Config.recipe(
                self.options.pop("recipe", "coat"), **self.options, compiler="eager"
            )
            self.model.compile(backend=fp8pass.backend(config, monitor=self.monitor))
        self.optimizer = self._new_optimizer()
        self._each("start")

    def _each(self, stage: str, *args: Any) -> None:
        for feature in self.features:
            getattr(feature, stage)(self, *args)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"lr": SIZE.peak_lr, "betas": (0.9, 0.95)}
        if self.plain or self.optimizer_options is None:
            return torch.optim.AdamW(parameters, **options)
        return fp8pass.optim.AdamW(parameters, **options, **self.optimizer_options)

    def add_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train more parameters from now on."""
        added = list(parameters)
        for parameter in added:
            parameter.requires_grad_()
        self.optimizer.add_param_group({"params": added})

    def loss(self, batch: Tensor, model: Any = None) -> Tensor:
        """The loss of a batch."""
        enabled = self.autocast is not None
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=enabled):
            return (self.model if model is None else model)(batch[:, :-1], batch[:, 1:])

    def run(self) -> Training:
        """Train."""
        for step, batches in enumerate(batches_of(self.accumulate)):
            self._each("before_step", step)
            total = 0.0
            for batch in batches:
                loss = self.loss(batch) / self.accumulate
                total += loss.item()
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            self._each("between_backward_and_step", step)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self._each("after_step", step)
            self.optimizer.zero_grad()
            self.losses.append(total)
        self._each("finish")
        return self


def batches_of(accumulate: int) -> list[list[Tensor]]:
    """Micro-batches of all steps: repeated sequences of few bytes, which are quickly learned."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(8, (64,), generator=generator).repeat(SIZE.seq)
    draw = random.Random(0)

    def batch() -> Tensor:
        starts = [draw.randrange(len(text) - SIZE.seq - 1) for _ in range(SIZE.batch)]
        return torch.stack([text[s : s + SIZE.seq + 1] for s in starts])

    return [[batch() for _ in range(accumulate)] for _ in range(SIZE.steps)]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of what a model saves, in FP32."""
    state = model.state_dict()
    return {name: x.detach().clone().float() for name, x in state.items()}


@dataclass
class Outcome:
    """What is compared of a training with the same one without fp8pass."""

    complaints: list[str] = field(default_factory=list)

    def check(self, holds: bool, complaint: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.complaints.append(complaint)


# Of 16 steps, from a loss of 5.5 to about 2: seeds differ by a few percent.
LOSS = 0.08
COSINE = 0.15  # of a change with that of the plain training; Adam amplifies noise in few steps


def compare(ours: Training, plain: Training) -> list[str]:
    """What is wrong with a training beside the plain one."""
    outcome = Outcome()
    last = slice(-4, None)
    mean, want = (sum(t.losses[last]) / 4 for t in (ours, plain))
    outcome.check(abs(mean / want - 1) < LOSS, f"the loss ends at {mean:.3f}, not at {want:.3f}")
    found, wanted = weights_of(ours.model), weights_of(plain.model)
    outcome.check(found.keys() == wanted.keys(), "state_dict has other names")
    for name in found.keys() & wanted.keys():
        change = found[name] - ours.initial[name]
        want_change = wanted[name] - plain.initial[name]
        if not want_change.any():
            outcome.check(not change.any(), f"{name} changed, though it is frozen")
            continue
        cosine = torch.cosine_similarity(change.flatten(), want_change.flatten(), dim=0).item()
        outcome.check(cosine > COSINE, f"{name} changed in another direction: cosine {cosine:.2f}")
    _check_saved(ours, outcome)
    return outcome.complaints


def _check_saved(t: Training, outcome: Outcome) -> None:
    """A new model that loads what was saved gives the loss of the one that was trained."""
    fresh = Decoder(SIZE).to(t.dtype)
    fresh.load_state_dict(copy.deepcopy(t.model.state_dict()))
    (batch,) = batches_of(1)[0]
    with torch.no_grad():
        mine, theirs = t.loss(batch).item(), t.loss(batch, fresh).item()
    near = abs(mine / theirs - 1) < 0.02
    outcome.check(near, f"the saved model has a loss of {theirs:.3f}, the trained one {mine:.3f}")
