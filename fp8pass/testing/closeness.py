"""Decide whether a training step is as close to the exact step as rounding allows.

The exact step runs in eager PyTorch and fp64. A tensor's error is relative to the norm of the exact
tensor. For gradients, this norm counts as at least a thousandth of the largest gradient norm,
because some gradients are only noise, e.g. of a bias before a normalization. The accepted error is

    2 · √(n² + s²) + 5 · p + r

    n: largest error of the model with simulated rounding (noise.py), over all seeds. Some seeds run
       in the model's own dtype, because simulated rounding may interact with rounding to this
       dtype.
    s: for gradients, the larger of the rounding error of saved tensors (a plan may save gelu'(x)
       instead of x) and the largest error that the plan predicts for one saved value (x² and x³ may
       be recomputed from x).
    p: error of the unmodified model in its own dtype.
    r: 1e-4, or one ulp of the dtype if that is more, because p may be zero by chance.

A zero gradient has the error 1, and a gradient multiplied by k has the error |k - 1|. Such faults
are found if the accepted error is at most `JUDGED`. The accepted error is larger if an argmax
flips, or if a normalization divides by almost zero. The tensor then only has to be finite, nonzero
and at most 10 times too large.

Noise is random, so it is measured again with more seeds before a complaint.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.testing.noise import Formats, Noise
from fp8pass.testing.steps import TrainingStep, step

JUDGED = 0.75
FLOOR = 1e-4
FEW_SEEDS = 3  # for a first judgement, which is final if there are no complaints
PLAIN_SEEDS = 4  # one of every 4 seeds runs in the model's own dtype
Batch = Sequence[Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Verdict:
    """The result of a comparison of steps."""

    # One line for each fault.
    complaints: list[str] = field(default_factory=list)
    judged: int = 0  # tensors compared with their accepted error
    unjudged: int = 0  # tensors whose accepted error is larger than `JUDGED`
    worst: float = 0.0  # largest ratio of error to accepted error of the judged tensors

    def judge(
        self, name: str, tensors: Sequence[Tensor | None], least: float, saved: float
    ) -> None:
        """Judge one tensor.

        Args:
            name: name of the tensor, for complaints.
            tensors: the tensor, then the same tensor of the exact, the plain and the noisy steps.
            least: lower limit of the norm by which the error is divided.
            saved: `s` in the formula in the module's docstring.
        """
        got, want, plain, *noisy = tensors
        assert want is not None
        assert plain is not None
        x = torch.zeros_like(want) if got is None else got
        if x.shape != want.shape:
            self.complaints.append(f"{name} has shape {tuple(x.shape)}, not {tuple(want.shape)}")
            return
        if x.dtype != plain.dtype:
            self.complaints.append(f"{name} is {x.dtype}, not {plain.dtype}")
        if not want.is_floating_point():
            return
        if not x.isfinite().all():
            self.complaints.append(f"{name} is not finite")
            return
        noise = max((error(n, want, least) for n in noisy if n is not None), default=0.0)
        rounding = error(plain, want, least)
        ulp = max(FLOOR, torch.finfo(x.dtype).eps)
        accepted = 2 * math.hypot(noise, saved) + 5 * rounding + ulp
        if accepted <= JUDGED:
            off = error(x, want, least)
            self.judged += 1
            self.worst = max(self.worst, off / accepted)
            if off > accepted:
                self.complaints.append(
                    f"{name} has error {off:.3g}, above the accepted {accepted:.3g}"
                    f" (plain {rounding:.2g}, noise {noise:.2g})"
                )
            return
        self.unjudged += 1
        norms = [float(n.double().norm()) for n in (want, plain, *noisy) if n is not None]
        if not all(map(math.isfinite, norms)):
            return  # e.g. after rounding, no element equals the maximum
        norm = float(x.double().norm())
        if norm > 10 * max(norms) + 1e-6 or (norm == 0 and min(norms) > 1e-6):
            self.complaints.append(
                f"{name} has norm {norm:.3g}, outside of {min(norms):.3g} to {max(norms):.3g}"
            )


@dataclass
class Reference:
    """Steps to compare with: exact, plain (the model as it is), and noisy (computed on demand).

    Attributes:
        model: the model in its own dtype. Every run copies the model.
        batches: returns new tensors in each call, because a step may write to its batch.
        formats: the formats to which a recipe rounds.
        run: wraps the model (e.g. with autocast) for the steps that run in the model's own dtype.
        wide: dtype of exact steps and of most noisy steps.
        between: `between(model, i)` changes the model before step `i`.
        noisy: the noisy steps of each seed so far.
    """

    model: nn.Module
    batches: Callable[[], Sequence[Batch]]
    formats: Formats
    run: Wrap = lambda program: program
    wide: torch.dtype = torch.float64
    between: Callable[[nn.Module, int], None] = lambda model, i: None
    noisy: list[list[TrainingStep]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exact = self._run_steps(self.wide, None)
        self.plain = self._run_steps(None, None, self.run)

    def _run_steps(
        self, dtype: torch.dtype | None, noise: Noise | None, run: Wrap = lambda program: program
    ) -> list[TrainingStep]:
        model = copy.deepcopy(self.model)
        batches = self.batches()
        if dtype is not None:
            model, batches = model.to(dtype), [in_dtype(b, dtype) for b in batches]
        steps = []
        with noise.enter() if noise else contextlib.nullcontext():
            for i, batch in enumerate(batches):
                self.between(model, i)
                steps.append(step(run(model), model, batch))
        return steps

    def measure(self, seeds: int) -> None:
        """Compute noisy steps until `noisy` contains the steps of `seeds` seeds."""
        rounds = any((self.formats.forward, self.formats.saved))
        for seed in range(len(self.noisy), seeds if rounds else 0):
            noise = Noise(self.formats, seed)
            if seed % PLAIN_SEEDS == PLAIN_SEEDS - 1:
                self.noisy.append(self._run_steps(None, noise, self.run))
            else:
                self.noisy.append(self._run_steps(self.wide, noise))

    def judge(
        self, steps: Sequence[TrainingStep], expected: float = 0.0, more: int = 96
    ) -> Verdict:
        """Judge whether `steps` are as close to the exact steps as the noise of few seeds allows.

        `expected` is the largest gradient error that a plan predicts for one saved value. If there
        are complaints, the steps are judged again with `more` seeds.
        """
        self.measure(FEW_SEEDS)
        verdict = self._judge(steps, expected)
        if verdict.complaints and self.formats.forward and len(self.noisy) < more:
            self.measure(more)
            verdict = self._judge(steps, expected)
        return verdict

    def _judge(self, steps: Sequence[TrainingStep], expected: float) -> Verdict:
        verdict = Verdict()
        saved = max(self.formats.saved_error, expected)
        for i, got in enumerate(steps):
            versions = got, self.exact[i], self.plain[i], *(n[i] for n in self.noisy)
            gradients = [g for g in self.exact[i].gradients.values() if g is not None]
            least = 1e-3 * max((float(g.norm()) for g in gradients), default=0.0)
            for name, tensors in _align(versions):
                limits = (least, saved) if "gradient" in name else (0.0, 0.0)
                verdict.judge(f"step {i}: {name}", tensors, *limits)
        return verdict


def error(x: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Return the norm of the error, divided by the norm of `want` or by `least` if it is larger."""
    norm, gap = float(want.norm()), float((x.double() - want).norm())
    return gap / max(norm, least, 1e-30) if math.isfinite(gap) else math.inf


def _align(steps: Sequence[TrainingStep]) -> Iterator[tuple[str, list[Tensor | None]]]:
    """Yield the name of each output, gradient and buffer, and its tensors in all `steps`.

    The second step must be the exact step. The first yielded item is the concatenation of all
    gradients.
    """
    exact = steps[1]
    names = [name for name, want in exact.gradients.items() if want is not None]
    if names:
        yield "all gradients", [_concatenate(s, exact, names) for s in steps]
    for i in range(len(exact.outputs)):
        yield f"output {i}", [s.outputs[i] for s in steps]
    for name in names:
        yield f"gradient of {name}", [s.gradients[name] for s in steps]
    for name in exact.buffers:
        yield f"buffer {name}", [s.buffers[name] for s in steps]


def _concatenate(got: TrainingStep, exact: TrainingStep, names: list[str]) -> Tensor:
    """Concatenate gradients, with zeros for gradients that are missing or have a wrong shape."""
    parts = []
    for name in names:
        x, want = got.gradients[name], exact.gradients[name]
        assert want is not None
        parts.append(torch.zeros_like(want) if x is None or x.shape != want.shape else x)
    return torch.cat([x.flatten() for x in parts])


def in_dtype(batch: Batch, dtype: torch.dtype) -> list[Any]:
    """Detach the floating-point tensors of a batch, and convert them to `dtype`."""
    return [
        x.detach().to(dtype).requires_grad_(x.requires_grad)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in batch
    ]
