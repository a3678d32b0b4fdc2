"""Train one variant, and measure its loss, speed and memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8pass.demo.data import Data
from fp8pass.demo.model import new_model
from fp8pass.demo.sizes import Size
from fp8pass.tools.saved_bytes import saved_bytes


@dataclass
class Run:
    """The results of one variant. `peak_bytes` is None on a CPU."""

    variant: str
    losses: list[float]
    held_out_loss: float
    tokens_per_second: float
    saved_bytes: int
    peak_bytes: int | None


class Meter:
    """Measures time and peak memory since its creation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._now()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def read(self) -> tuple[float, int | None]:
        """Return the elapsed seconds, and the peak bytes (None on a CPU)."""
        seconds = self._now() - self.start
        on_gpu = self.device.type == "cuda"
        return seconds, torch.cuda.max_memory_allocated(self.device) if on_gpu else None


Compile = Callable[[nn.Module], Any]
OnStep = Callable[[int], None]


def run_variant(
    name: str, compile_model: Compile, data: Data, size: Size, seed: int, on_step: OnStep
) -> Run:
    """Train one variant, and measure it. Call `on_step(step)` after each step."""
    device = data.train.device
    model = compile_model(new_model(size, seed, device))
    losses, tokens_per_second, peak_bytes = train(model, data, size, seed, on_step)
    return Run(
        name,
        losses=losses,
        held_out_loss=held_out_loss(model, data, size),
        tokens_per_second=tokens_per_second,
        saved_bytes=saved_bytes(model, *next(data.train_batches(size, seed))),
        peak_bytes=peak_bytes,
    )


def train(
    model: Any, data: Data, size: Size, seed: int, on_step: OnStep
) -> tuple[list[float], float, int | None]:
    """Return the losses of all steps, the tokens per second, and the peak bytes.

    Speed and peak are measured after the first steps, because the first step compiles.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    device = data.train.device
    first_steps = min(5, size.steps - 1)
    losses = []
    for step, (tokens, targets) in enumerate(data.train_batches(size, seed)):
        if step == first_steps:
            meter = Meter(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, size)
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        on_step(step + 1)
    seconds, peak_bytes = meter.read()
    tokens_per_second = (size.steps - first_steps) * size.tokens / seconds
    return [x.item() for x in losses], tokens_per_second, peak_bytes


def learning_rate(step: int, size: Size) -> float:
    """Return the learning rate: linear warm-up for 1/5 of the steps, then a cosine to peak/10."""
    warm_up = max(1, size.steps // 5)
    progress = max(0, step - warm_up) / (size.steps - warm_up)
    return size.peak_lr * min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))


def held_out_loss(model: Any, data: Data, size: Size) -> float:
    # Under `no_grad`, PyTorch would compile the model again.
    losses = [model(*batch).item() for batch in data.held_out_batches(size)]
    return sum(losses) / len(losses)


def free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
