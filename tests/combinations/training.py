"""Train a tiny decoder with any combination of features, and without fp8pass.

A `Training` is built in the order of a user's script: model, weights, compilation and distribution,
optimizer, tools, steps. A feature changes some of these stages (`features.py`). The *plain*
training leaves out the features that only fp8pass has.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import fp8pass
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size

MUON_LR = 0.02
SIZE = Size(64, 2, 2, 2, 128, seq=32, batch=4, steps=16, peak_lr=5e-3)
CHANGE = SIZE.steps // 2  # features interrupt a training before this step
MEASURED = range(CHANGE + 1, SIZE.steps, 2)  # steps with checked gradients


class Feature:
    """An addition to a training. A stage that a feature does not change is left alone.

    Attributes:
        name: the name of the feature.
        ours: whether only fp8pass has it, so that the plain training goes without.
        one_of: a choice that a training makes once. Features of the same choice are alternatives
            and not a pair.
        ranks: how many ranks the feature needs.
        size: the size of the decoder, if the feature needs a larger one.
    """

    ours = False
    one_of = ""
    ranks = 1
    size = SIZE

    def __init__(self, name: str) -> None:
        self.name = name

    def configure(self, t: Training) -> None:
        """Change options before anything is made."""

    def add_layers(self, t: Training, model: nn.Module) -> None:
        """Add layers to a new model, also to models that a training is compared with."""

    def change_model(self, t: Training) -> None:
        """Change the model before it is compiled."""

    def after_distribution(self, t: Training) -> None:
        """Change the distributed model before the optimizer is made."""

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


class Way(Feature):
    """How the ranks share a training. This class is the training in one process.

    Attributes:
        ranks_per_batch: how many ranks compute the same micro-batch together.
        backwards: how many backwards a rank runs for each micro-batch of the user.
        shards: whether ranks have shards of parameters.
        averages_sums: whether sums of gradients are averaged over ranks in the backward.
    """

    one_of = "ranks"
    ranks_per_batch = 1
    backwards = 1
    shards = False
    averages_sums = False

    def configure(self, t: Training) -> None:
        t.way = self

    def distribute(self, t: Training) -> None:
        """Compile the model, and distribute it."""
        t.compile_in_place(t.model)

    def reduces(self, t: Training, last: bool) -> AbstractContextManager[Any]:
        """Return a context that reduces gradients in the last backward of a step only."""
        return nullcontext()

    def backward(self, t: Training, batch: Tensor) -> float:
        """Run forward and backward of a micro-batch, and return its part of the step's loss."""
        loss = t.loss(batch) / t.accumulate
        (t.scaler.scale(loss) if t.scaler else loss).backward()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, t: Training, batch: Tensor) -> float:
        """Return the loss of a batch, without gradients."""
        return t.loss(batch).item()

    def clip(self, t: Training, norm: float) -> None:
        """Clip the gradients by their global norm."""
        nn.utils.clip_grad_norm_(t.model.parameters(), norm)

    def use_tool(self, t: Training, tool: Any) -> None:
        """Run a tool that takes a model, a loss function and a batch."""
        tool(t.outer, lambda model, batch: t.loss(batch, model), t.batches[0][0])

    def explain(self, t: Training) -> None:
        """Explain the model."""
        batch = t.batches[0][0]
        fp8pass.explain(t.outer, batch[:, :-1], batch[:, 1:])

    def weights(self, t: Training) -> dict[str, Tensor]:
        """Return a copy of the whole state dict, in FP32."""
        return weights_of(t.model)

    def gradients(self, t: Training) -> dict[str, Tensor]:
        """Return a copy of all gradients, in FP32 and without the factor of a scaler."""
        scale = t.scaler.get_scale() if t.scaler else 1.0
        named = t.model.named_parameters()
        return {name: whole(p.grad).float() / scale for name, p in named if p.grad is not None}

    def check_replicas(self, t: Training) -> None:
        """Raise Drifted if ranks have different values of a parameter that they all have."""
        mine = weights_of(t.model)
        copies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(copies, mine)
        for name, x in mine.items():
            if not all(torch.equal(x, copy[name]) for copy in copies):
                raise Drifted(f"the copies of {name} on different ranks have drifted apart")


class Drifted(AssertionError):
    """Raised where replicas differ after training."""


ALONE = Way("one process")


@dataclass
class Training:
    """A model with its optimizer; see the module's docstring.

    Attributes:
        options: the options of fp8pass.
        size: the size of the decoder.
        dtype: the dtype of the weights.
        autocast: the dtype of autocast, or None without autocast.
        param_dtype: the dtype that FSDP2 gathers weights in, or None for the dtype of the weights.
        optimizer_options: the options of fp8pass's optimizers, or None for PyTorch's optimizers.
        muon: whether Muon trains the matrices of hidden layers.
        accumulate: micro-batches of a step.
        losses: the losses of the steps, the mean over ranks.
        steps_in_backward: whether `loss.backward()` updates the weights.
        max_norm: the norm to which gradients are clipped, if they are.
        attached: what `step_in_backward` returned, if the backward updates the weights.
        way: how ranks share the training.
        model: the decoder, or the part of it that this rank trains in a pipeline.
        outer: the module that is called: the model, or DistributedDataParallel around it.
        logits: the logits of the last micro-batch, if the model returns them, too.
        patches: contexts that end with the training.
        measured: weights and gradients, by step.
    """

    features: tuple[Feature, ...]
    plain: bool
    options: dict[str, Any] = field(default_factory=dict)
    size: Size = SIZE
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    optimizer_options: dict[str, Any] | None = None
    muon: bool = False
    accumulate: int = 1
    losses: list[float] = field(default_factory=list)
    steps_in_backward: bool = False
    max_norm: float | None = None
    monitor: fp8pass.Monitor | None = None
    scaler: Any = None
    attached: Any = None
    way: Way = ALONE
    logits: Any = None
    patches: ExitStack = field(default_factory=ExitStack)
    measured: dict[int, Any] = field(default_factory=dict)

    def run(self) -> Training:
        """Train."""
        self.size = max((f.size for f in self.features), key=lambda size: size.dim)
        if self.plain:
            self.features = tuple(f for f in self.features if not f.ours)
        with self.patches:
            self._prepare()
            for step, batches in enumerate(self.batches):
                self._each("before_step", step)
                self.losses.append(self._mean(self._backwards(batches)))
                if step in MEASURED and not self.plain:
                    self.measured[step] = self.way.weights(self), self.way.gradients(self)
                self._each("between_backward_and_step", step)
                self._step()
                self._each("after_step", step)
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            self._each("finish")
        if self.way.ranks > 1:
            self.way.check_replicas(self)
        return self

    def _prepare(self) -> None:
        self._each("configure")
        rank = dist.get_rank() if self.way.ranks > 1 else 0
        self.batches = batches_of(self.accumulate, rank // self.way.ranks_per_batch)
        torch.manual_seed(0)
        self.model = self.new_model().to(self.dtype)
        self.outer: nn.Module = self.model
        self._each("change_model")
        self.initial = weights_of(self.model)
        self.config = fp8pass.Config.recipe(
            self.options.pop("recipe", "coat"), **self.options, compiler="eager"
        )
        self.way.distribute(self)
        self._each("after_distribution")
        self.optimizers = self._new_optimizers()
        self._each("start")

    def new_model(self) -> nn.Module:
        """Return a model as features build it, in FP32."""
        model = Decoder(self.size)
        self._each("add_layers", model)
        return model

    def _each(self, stage: str, *args: Any) -> None:
        for feature in self.features:
            getattr(feature, stage)(self, *args)

    def _step(self) -> None:
        """Run the step of each optimizer."""
        for optimizer in self.optimizers:
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler:
            self.scaler.update()

    def _backwards(self, batches: list[Tensor]) -> float:
        """Run the backwards of a step, and return its loss on this rank."""
        total = 0.0
        for i, batch in enumerate(batches):
            with self.way.reduces(self, last=i == len(batches) - 1):
                total += self.way.backward(self, batch)
        return total

    def _mean(self, loss: float) -> float:
        """Return the mean of a loss over ranks."""
        if self.way.ranks == 1:
            return loss
        total = torch.tensor(loss)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def compile_in_place(self, module: nn.Module, config: fp8pass.Config | None = None) -> None:
        """Compile a module with fp8pass; the plain training is eager."""
        if not self.plain:
            module.compile(backend=fp8pass.backend(config or self.config, monitor=self.monitor))

    def _new_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return AdamW, and Muon before it if `muon` is set."""
        matrices, others = self._split(p for p in self.model.parameters() if p.requires_grad)
        theirs = self.plain or self.optimizer_options is None
        module, ours = (torch.optim, {}) if theirs else (fp8pass.optim, self.optimizer_options)
        adamw = module.AdamW(others, self.size.peak_lr, (0.9, 0.95), **ours)
        if not matrices:
            return [adamw]
        if theirs and self.way.shards:  # PyTorch's Muon takes minutes for DTensors
            return [fp8pass.optim.Muon(matrices, MUON_LR, momentum_format="fp32"), adamw]
        return [module.Muon(matrices, MUON_LR, **ours), adamw]

    def _split(self, parameters: Iterable[nn.Parameter]) -> tuple[list[Any], list[Any]]:
        """Return the parameters for Muon, and the parameters for AdamW."""
        matrices = fp8pass.optim.split_parameters(self.model)[0] if self.muon else []
        of_muon, found = {id(p) for p in matrices}, list(parameters)
        return [p for p in found if id(p) in of_muon], [p for p in found if id(p) not in of_muon]

    def add_trained(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train more parameters from now on."""
        added = list(parameters)
        for parameter in added:
            parameter.requires_grad_()
        if not added:
            return
        if self.attached:
            self.attached.detach()
        for optimizer, found in zip(self.optimizers[::-1], self._split(added)[::-1], strict=False):
            optimizer.add_param_group({"params": found})
        if self.attached:
            self.step_in_backward()

    def step_in_backward(self) -> None:
        """Update the weights in the backward from now on."""
        backwards = self.accumulate * self.way.backwards
        self.attached = fp8pass.optim.step_in_backward(
            self.model, *self.optimizers, accumulate=backwards, max_norm=self.max_norm
        )
        if self.way.averages_sums:
            fp8pass.distributed.average_sums(self.attached)

    def first_block(self) -> list[nn.Parameter]:
        """Return the parameters of the first block that this rank has."""
        named = self.model.named_parameters()
        return [p for name, p in named if name.startswith("layers.0.")]

    def loss(self, batch: Tensor, model: Any = None) -> Tensor:
        """The loss of a batch."""
        enabled = self.autocast is not None
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=enabled):
            result = (self.outer if model is None else model)(batch[:, :-1], batch[:, 1:])
        if isinstance(result, tuple):
            result, self.logits = result
        return result


def batches_of(accumulate: int, share: int = 0) -> list[list[Tensor]]:
    """Return the micro-batches of all steps: repeated sequences of few bytes, learned quickly.

    Each `share` of the ranks has different batches.
    """
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(8, (64,), generator=generator).repeat(SIZE.seq)
    draw = random.Random(share)

    def batch() -> Tensor:
        starts = [draw.randrange(len(text) - SIZE.seq - 1) for _ in range(SIZE.batch)]
        return torch.stack([text[s : s + SIZE.seq + 1] for s in starts])

    return [[batch() for _ in range(accumulate)] for _ in range(SIZE.steps)]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the values of a model's state dict, in FP32."""
    return values_of(model.state_dict())


def values_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in FP32. FP8 data of a checkpoint are multiplied by their scales."""
    found = {name: whole(x).clone().float() for name, x in state.items()}
    scales = {name: found.pop(f"{name}_scale") for name in state if f"{name}_scale" in state}
    return {name: x * scales.get(name, 1.0) for name, x in found.items()}


def whole(x: Tensor) -> Tensor:
    """Return all shards of a tensor, detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


@dataclass
class Outcome:
    """Complaints from the comparison of a training with the plain training."""

    complaints: list[str] = field(default_factory=list)

    def check(self, holds: bool, complaint: str) -> None:
        """Add a complaint unless `holds`."""
        if not holds:
            self.complaints.append(complaint)


# Of 16 steps, from a loss of 5.5 to about 2: seeds differ by a few percent.
LOSS = 0.08
# Relative errors of each gradient and of all gradients together, for the same weights and batches:
# medians over some steps, because rounding in the forward can turn the gradient of a single step. A
# gradient that is lost has an error of 1, and all gradients at half their length have 0.5.
GRADIENT = 0.9
GRADIENTS = 0.45
# The cosine of the change of a weight with its change in the plain training, which finds lost
# updates. It is a weak test of gradients, because Adam amplifies noise. A block that is unfrozen
# after 8 of 16 steps reaches 0.28 to 0.59 in plain PyTorch with 5 to 10% of noise in the gradients,
# and less after more steps.
COSINE = 0.15


def compare(ours: Training, plain: Training) -> list[str]:
    """Compare a training with the plain training, and return complaints."""
    outcome = Outcome()
    last = slice(-4, None)
    mean, want = (sum(t.losses[last]) / 4 for t in (ours, plain))
    outcome.check(abs(mean / want - 1) < LOSS, f"the loss ends at {mean:.3f}, not at {want:.3f}")
    found, wanted = (t.way.weights(t) for t in (ours, plain))
    outcome.check(found.keys() == wanted.keys(), "state_dict has other names")
    for name in found.keys() & wanted.keys():
        change = found[name] - ours.initial[name]
        want_change = wanted[name] - plain.initial[name]
        if not want_change.any():
            # FSDP2 rounds the values of an FP8 checkpoint to the dtype of the model.
            before, after = (x.to(ours.dtype) for x in (ours.initial[name], found[name]))
            outcome.check(torch.equal(before, after), f"{name} changed, though it is frozen")
            continue
        # The direction of a change by a few units in the last place is random.
        smallest = 4 * torch.finfo(ours.dtype).eps * ours.initial[name].norm()
        if want_change.norm() < smallest:
            continue
        cosine = torch.cosine_similarity(change.flatten(), want_change.flatten(), dim=0).item()
        outcome.check(cosine > COSINE, f"{name} changed in another direction: cosine {cosine:.2f}")
    _check_gradients(ours, outcome)
    _check_saved(ours, found, outcome)
    return outcome.complaints


def _check_gradients(t: Training, outcome: Outcome) -> None:
    """Check gradients of some steps, which a training that steps in the backward frees."""
    errors: dict[str, list[float]] = {}
    for step, (weights, found) in t.measured.items():
        wanted = _exact_gradients(t, step, weights)
        for name, x in found.items():
            errors.setdefault(name, []).append(_relative([x], [wanted[name]]))
        if found:
            error = _relative(found.values(), [wanted[name] for name in found])
            errors.setdefault("", []).append(error)
    for name, of_steps in errors.items():
        error, limit = statistics.median_low(of_steps), GRADIENT if name else GRADIENTS
        what = f"the gradient of {name}" if name else "all gradients together"
        outcome.check(error < limit, f"{what}: an error of {error:.3f}")


def _exact_gradients(t: Training, step: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a step on all ranks, in eager PyTorch and FP32."""
    model = t.new_model()
    model.load_state_dict(weights)
    shares = range(t.way.ranks // t.way.ranks_per_batch)
    batch = torch.cat([x for share in shares for x in batches_of(t.accumulate, share)[step]])
    model(batch[:, :-1], batch[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _relative(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    mine, theirs = (torch.cat([x.flatten() for x in xs]) for xs in (found, wanted))
    return ((mine - theirs).norm() / theirs.norm()).item()


def _check_saved(t: Training, weights: dict[str, Tensor], outcome: Outcome) -> None:
    """Check that a new model with the saved weights has the loss of the trained model."""
    fresh = t.new_model().to(t.dtype)
    fresh.load_state_dict(weights)
    (batch,) = batches_of(1)[0]
    mine = t.way.evaluate(t, batch)
    with torch.no_grad():
        theirs = t.loss(batch, fresh).item()
    near = abs(mine / theirs - 1) < 0.02
    outcome.check(near, f"the saved model has a loss of {theirs:.3f}, the trained one {mine:.3f}")
