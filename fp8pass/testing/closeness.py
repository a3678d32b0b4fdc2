"""Whether a training step is as close to the exact one as rounding allows.

The reference is the model in eager PyTorch and fp64. The error of a tensor is the norm of its
difference over its norm, or over a thousandth of the largest gradient's if a gradient is smaller
than that: some, as that of a bias before a norm, are nothing but noise. Accepted is

    2 · √(n² + s²) + 5 · p + r

    n: the largest error of the fake-quantized model, over seeds (noise.py), some in its own dtype:
       what is rounded to it beside other values may not be what the plain model rounds
    s: for gradients, the rounding error of the format of saved values: where autograd saves x, a
       plan may keep what the gradient is multiplied by, gelu'(x) say; or the largest error through
       one value that the plan expects: of x it computes x² and x³ again, which autograd saves
    p: the error of the plain model in its own dtype
    r: 1e-4, or an ulp of a coarser dtype: rounding may take a plain result of one to it by chance

A gradient of cosine c has an error of at least √(1 - c²) (0.95 at 0.3), one of zeros 1, one of a
wrong scale s |s - 1|, and NaN is never accepted. So they are seen wherever at most `JUDGED` is
accepted. Where more would be, the model is chaotic there (an argmax flips, a norm divides by nearly
nothing): only that numbers are finite, not zero and not 10 times too large is asked for, and the
tensor counts as unjudged.

Noise is random, so before a complaint is raised it is measured again with more seeds.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.testing.noise import Formats, Noise
from fp8pass.testing.steps import TrainingStep, step

JUDGED = 0.75
FLOOR = 1e-4
PLAIN_SEEDS = 4  # noise of one seed in so many is that of the model in its own dtype
Batch = Sequence[Any]


@dataclass
class Verdict:
    """What is wrong, and how many tensors were held against noise."""

    complaints: list[str] = field(default_factory=list)
    judged: int = 0
    unjudged: int = 0
    worst: float = 0.0  # largest share of an accepted error


@dataclass
class Reference:
    """A model's exact steps and the noise around them, measured as far as asked for.

    Attributes:
        model: in its own dtype; it is copied for every run.
        batches: makes the batches, each time anew since programs may write to them.
        formats: what a recipe rounds.
        run: how a step runs the model, under autocast for example.
        wide: the dtype of exact steps and of those with noise.
        between: `between(model, i)` changes the model before step `i`.
    """

    model: nn.Module
    batches: Callable[[], Sequence[Batch]]
    formats: Formats
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda program: program
    wide: torch.dtype = torch.float64
    between: Callable[[nn.Module, int], None] = lambda model, i: None
    noisy: list[list[TrainingStep]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exact = self._steps(self.wide, None)
        self.plain = self._steps(None, None, self.run)

    def _steps(
        self,
        dtype: torch.dtype | None,
        noise: Noise | None,
        run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda program: program,
    ) -> list[TrainingStep]:
        model = copy.deepcopy(self.model)
        batches = self.batches()
        if dtype is not None:
            model, batches = model.to(dtype), [in_dtype(b, dtype) for b in batches]
        steps = []
        with noise.entered() if noise else contextlib.nullcontext():
            for i, batch in enumerate(batches):
                self.between(model, i)
                steps.append(step(run(model), model, batch))
        return steps

    def measure(self, seeds: int) -> None:
        """Have noise of at least so many seeds."""
        rounds = any((self.formats.forward, self.formats.saved))
        for seed in range(len(self.noisy), seeds if rounds else 0):
            noise = Noise(self.formats, seed)
            if seed % PLAIN_SEEDS == PLAIN_SEEDS - 1:
                self.noisy.append(self._steps(None, noise, self.run))
            else:
                self.noisy.append(self._steps(self.wide, noise))

    def judge(
        self, steps: Sequence[TrainingStep], expected: float = 0.0, seeds: int = 3, more: int = 96
    ) -> Verdict:
        """Whether `steps` are as close as noise of that many seeds allows.

        `expected` is the largest error of a gradient that a plan expects of one saved value.
        """
        self.measure(seeds)
        verdict = self._verdict(steps, expected)
        if verdict.complaints and self.formats.forward and len(self.noisy) < more:
            self.measure(more)
            verdict = self._verdict(steps, expected)
        return verdict

    def _verdict(self, steps: Sequence[TrainingStep], expected: float) -> Verdict:
        verdict = Verdict()
        saved = max(self.formats.saved_error, expected)
        for i, got in enumerate(steps):
            noisy = [n[i] for n in self.noisy]
            gradients = [g for g in self.exact[i].gradients.values() if g is not None]
            least = 1e-3 * max((float(g.norm()) for g in gradients), default=0.0)
            for name, x, want, plain, *noised in _aligned(
                got, self.exact[i], self.plain[i], *noisy
            ):
                of_gradient = "gradient" in name
                _judge(
                    f"step {i}: {name}", x, want, plain, noised,
                    least if of_gradient else 0.0,
                    saved if of_gradient else 0.0,
                    verdict,
                )  # fmt: skip
        return verdict


def _judge(
    name: str,
    x: Tensor | None,
    want: Tensor,
    plain: Tensor,
    noised: list[Tensor],
    least: float,
    saved: float,
    to: Verdict,
) -> None:
    if x is None:
        x = torch.zeros_like(want)
    if x.shape != want.shape:
        to.complaints.append(f"{name} has shape {tuple(x.shape)}, not {tuple(want.shape)}")
        return
    if x.dtype != plain.dtype:
        to.complaints.append(f"{name} is {x.dtype}, not {plain.dtype}")
    if not want.is_floating_point():
        return
    if not x.isfinite().all():
        to.complaints.append(f"{name} is not finite")
        return
    noise = max((error(n, want, least) for n in noised), default=0.0)
    rounding = error(plain, want, least)
    ulp = max(FLOOR, torch.finfo(x.dtype).eps)
    accepted = 2 * math.hypot(noise, saved) + 5 * rounding + ulp
    off = error(x, want, least)
    if accepted <= JUDGED:
        to.judged += 1
        to.worst = max(to.worst, off / accepted)
        if off > accepted:
            to.complaints.append(
                f"{name} is off by {off:.3g}, accepted is {accepted:.3g}"
                f" (plain {rounding:.2g}, noise {noise:.2g})"
            )
        return
    to.unjudged += 1
    norms = [float(n.double().norm()) for n in (want, plain, *noised)]
    norm = float(x.double().norm())
    if norm > 10 * max(norms) + 1e-6 or (norm == 0 and min(norms) > 1e-6):
        to.complaints.append(
            f"{name} has norm {norm:.3g}, not {min(norms):.3g} to {max(norms):.3g}"
        )


def error(x: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Norm of the difference over the norm of `want`, but at least over `least`."""
    norm, gap = float(want.norm()), float((x.double() - want).norm())
    return gap / max(norm, least, 1e-30) if math.isfinite(gap) else math.inf


def _aligned(*steps: TrainingStep) -> Iterator[tuple[Any, ...]]:
    """Name and tensors of all results that the second step, the exact one, has.

    All gradients together are one more.
    """
    got, exact, *rest = steps
    names = [name for name, want in exact.gradients.items() if want is not None]
    if names:
        yield ("all gradients", *(_together(s.gradients, exact.gradients, names) for s in steps))
    for i, want in enumerate(exact.outputs):
        yield (f"output {i}", got.outputs[i], want, *(s.outputs[i] for s in rest))
    for kind, of in (("gradient of", "gradients"), ("buffer", "buffers")):
        for name, want in getattr(exact, of).items():
            if want is not None:
                others = (getattr(s, of)[name] for s in rest)
                yield (f"{kind} {name}", getattr(got, of)[name], want, *others)


def _together(
    gradients: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None], names: list[str]
) -> Tensor:
    """Gradients as one vector; what is missing or has another shape is zero."""
    parts = []
    for name in names:
        got, want = gradients[name], exact[name]
        assert want is not None
        if got is None or got.shape != want.shape:
            got = torch.zeros_like(want)
        parts.append(got.flatten())
    return torch.cat(parts)


def in_dtype(batch: Batch, dtype: torch.dtype) -> list[Any]:
    """The floating point tensors of a batch in another dtype, as leaves of their own."""
    return [
        x.detach().to(dtype).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in batch
    ]
