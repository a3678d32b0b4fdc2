"""`fp8pass.Monitor`: samples statistics of quantized tensors every so many steps."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fp8pass import compat, graph
from fp8pass.config import ConfigError, checked_patterns
from fp8pass.stability.monitor import callbacks
from fp8pass.stability.monitor.findings import Findings, Measured
from fp8pass.stability.monitor.statistics import (
    LANDSCAPE,
    Row,
    TensorName,
    landscape_row,
    merged,
    row_of,
)
from fp8pass.stability.monitor.writers import CsvWriter, TensorBoardWriter

log = logging.getLogger("fp8pass")

SHOWN = 40  # rows of a printed monitor

# So often the weights may change in one sample: some optimizers run a step's forward with others.
MOST_CHANGES = 1


class Monitor:
    """Measures amax, saturation, underflow and SQNR of every quantized tensor, now and then.

    Pass it to `fp8pass.backend(config, monitor=monitor)` and call `step()` after each optimizer
    step. The first step is sampled and then every `every`-th: its graphs run op by op and each
    tensor is measured on its device. The steps between run as without a monitor. A sampled step
    takes the time and the memory of eager execution. Warnings go to the logger `fp8pass`.

    Forwards under `torch.no_grad()` are not sampled. In distributed training each process measures
    its own tensors: give `csv` and `tensorboard` in one of them.

    Args:
        every: steps from one sample to the next.
        csv: a file to append to, a line for each tensor and sample.
        tensorboard: a folder or a `SummaryWriter` to write scalars to.
        sharpness: called after each sampled step, `lambda: fp8pass.sharpness(model, loss_fn,
            batch)`; its result is a row of its own, without a module. Not measured by default.
        model: the module that paths start from. Needed only if parts of a model are compiled on
            their own, whose tensors would have equal names; callbacks set it.
        fallback: patterns of module paths, as in `Config.skip`. Each graph is compiled a third
            time, with these layers in high precision, for a `Guard` to switch to: `("*",)` are all.

    Attributes:
        sampling: whether the current step is sampled.
        falls_back: whether the version with layers in high precision runs; it is not sampled.
        steps: optimizer steps done.
        latest: rows of the last sample, in the order in which tensors were first quantized.

    Raises:
        ConfigError: an argument has a wrong type or value.
        ImportError: `tensorboard` is a folder, and TensorBoard is not installed.
    """

    def __init__(
        self,
        every: int = 1000,
        *,
        csv: str | Path | None = None,
        tensorboard: Any = None,
        sharpness: Callable[[], float] | None = None,
        model: nn.Module | None = None,
        fallback: str | Sequence[str] = (),
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"every must be a whole number of steps, at least 1, got {every!r}.")
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if sharpness is not None and not callable(sharpness):
            raise ConfigError(
                "sharpness must be a function without arguments, such as lambda: "
                f"fp8pass.sharpness(model, loss_fn, batch), got {sharpness!r}."
            )
        self.every = every
        self.model = model
        self.steps = 0
        self.sampling = True
        self.fallback = checked_patterns("fallback", fallback)
        self.falls_back = False
        self.latest: list[Row] = []
        self._writers: list[CsvWriter | TensorBoardWriter] = []
        if csv is not None:
            self._writers.append(CsvWriter(csv))
        if tensorboard is not None:
            self._writers.append(TensorBoardWriter(tensorboard))
        self._sharpness = sharpness
        self._findings = Findings()
        self._totals: dict[tuple[str, TensorName], Tensor] = {}
        self._modules: dict[int, str] | None = None
        # By its address, how often a weight has changed in this sample, and its version.
        self._changes: dict[int, tuple[int, int]] = {}
        self._warned = False

    def step(self) -> None:
        """Count an optimizer step, and report it if it was sampled.

        Call it after the step, once for all micro-batches. It waits for the device only if the step
        was sampled.
        """
        if self.sampling:
            self._finish_sample()
        self.resume(self.steps + 1)

    def resume(self, steps: int) -> None:
        """Continue after `steps` optimizer steps, as when training resumes from a checkpoint."""
        self.steps = steps
        self.sampling = bool(self.every) and steps % self.every == 0
        self._totals.clear()
        self._changes.clear()
        self._modules = None  # an optimizer may have moved parameters

    def close(self) -> None:
        """Stop sampling, and close the files that were opened."""
        self.sampling = False
        self.every = 0
        for writer in self._writers:
            writer.close()

    def hugging_face(self) -> Any:
        """A callback for `transformers.Trainer`, in place of calls to `step()`.

        Raises:
            ImportError: transformers is not installed.
        """
        return callbacks.hugging_face(self)

    def lightning(self) -> Any:
        """A callback for Lightning's `Trainer`, in place of calls to `step()`.

        Raises:
            ImportError: neither `lightning` nor `pytorch_lightning` is installed.
        """
        return callbacks.lightning(self)

    def module_of(self, weight: Tensor) -> str | None:
        """Path in the model of the module that has a weight; None if unknown."""
        if self._modules is None:
            named = self.model.named_parameters() if self.model is not None else ()
            self._modules = {
                p.data_ptr(): graph.clean_path(name.rpartition(".")[0]) for name, p in named
            }
        return self._modules.get(weight.data_ptr())

    def saw(self, weight: Tensor) -> None:
        """Note that a sampled forward runs with a weight as it is now.

        Weights that change in a sample are those of steps that were not counted; all of them run op
        by op then.
        """
        version = compat.version_of(weight)
        changes, before = self._changes.get(weight.data_ptr(), (0, version))
        changes += version != before
        self._changes[weight.data_ptr()] = changes, version
        if changes > MOST_CHANGES and not self._warned:
            self._warned = True
            log.warning(
                "step %d is still being sampled, op by op, although the weights have changed %d "
                "times: call monitor.step() after each optimizer step, or give "
                "monitor.hugging_face() or monitor.lightning() to a Trainer's callbacks.",
                *(self.steps, changes),
            )

    def record(self, prefix: str, name: TensorName, totals: Tensor) -> None:
        """Add the statistics of one tensor in the part of the model with the path `prefix`."""
        before = self._totals.get((prefix, name))
        self._totals[prefix, name] = totals if before is None else merged(before, totals)

    def _finish_sample(self) -> None:
        """Make rows of the recorded statistics, write them, and warn."""
        if not self._totals and not self._sharpness:
            return
        names = list(self._totals)
        found = []
        for (prefix, name), totals in zip(names, _on_cpu(list(self._totals.values())), strict=True):
            module = ".".join(part for part in (prefix, name.module) if part)
            found.append(Measured(row_of(self.steps, module, name, totals), name))
        self.latest = [y.row for y in found]
        if self._sharpness:
            self.latest.append(landscape_row(self.steps, float(self._sharpness())))
        for writer in self._writers:
            writer.write(self.latest)
        for message in self._findings.new(found):
            log.warning("%s", message)

    def _why_empty(self) -> str:
        """Why there is no sample, and what to do."""
        if self._totals:
            return "Nothing sampled yet: a step is being sampled, call monitor.step() at its end."
        if self.steps:
            return (
                f"Nothing sampled by step {self.steps}: no graph that was compiled with this "
                "monitor quantized a tensor in training. Compile with "
                "backend=fp8pass.backend(config, monitor=monitor), not in recipe 'exact', and call "
                "monitor.step() after optimizer.step()."
            )
        return (
            "Nothing sampled yet: no step has run. Compile with backend=fp8pass.backend(config, "
            "monitor=monitor), train, and call monitor.step() after each optimizer.step()."
        )

    def __str__(self) -> str:
        """The latest sample as a table, the worst first."""
        if not self.latest:
            return self._why_empty()
        buffer = io.StringIO()
        Console(file=buffer, width=140).print(_table(self.latest))
        return buffer.getvalue()


def _on_cpu(totals: list[Tensor]) -> list[list[float]]:
    """Statistics of tensors, on any devices, as numbers."""
    if len({t.device for t in totals}) == 1:
        return torch.stack(totals).tolist()
    return [t.tolist() for t in totals]


def _table(rows: list[Row]) -> Table:
    title = f"Quantized tensors in step {rows[0].step}"
    if rows[-1].tensor == LANDSCAPE:
        title += f"; sharpness {rows[-1].sharpness:.3g}%"
        rows = rows[:-1]
    worst = sorted(rows, key=lambda r: (-r.nonfinite, -r.underflow, r.sqnr_db))
    table = Table(title=title, title_justify="left")
    for column in ("module", "tensor", "scales", "format"):
        table.add_column(column)
    for column in ("amax", "saturated", "underflow", "SQNR dB", "not finite"):
        table.add_column(column, justify="right")
    has_mu = any(r.mu != 1 for r in rows)
    if has_mu:
        table.add_column("µ", justify="right")
    for r in worst[:SHOWN]:
        shares = f"{r.saturated:.2%}", f"{r.underflow:.2%}"
        numbers = f"{r.amax:.3g}", *shares, f"{r.sqnr_db:.1f}", str(r.nonfinite or "")
        mu = (f"{r.mu:.3g}",) if has_mu else ()
        table.add_row(r.module, r.tensor, r.scales, r.format, *numbers, *mu)
    table.caption = "saturated: at the largest code, near which each scale puts its largest value"
    if len(rows) > SHOWN:
        table.caption += f"; and {len(rows) - SHOWN} more rows in monitor.latest"
    return table
