"""`fp8pass.Monitor`: samples statistics of quantized tensors at regular steps."""

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
from fp8pass.option_checks import ConfigError, checked_patterns, is_whole
from fp8pass.stability.callbacks import StepObserver
from fp8pass.stability.monitor.findings import Findings, Measured
from fp8pass.stability.monitor.statistics import (
    LANDSCAPE,
    TensorName,
    TensorStatistics,
    make_row,
    merge,
)
from fp8pass.stability.monitor.writers import CsvWriter, TensorBoardWriter

log = logging.getLogger("fp8pass")

MOST_PRINTED = 40  # rows of `print(monitor)`

# Number of changes of a weight within a sample that cause no warning, because some optimizers run a
# forward with perturbed weights.
MOST_CHANGES = 1


class Monitor(StepObserver):
    """Measures amax, saturation, underflow and SQNR of every quantized tensor in sampled steps.

    Pass a monitor to `fp8pass.backend(config, monitor=monitor)`, and call `monitor.step()` after
    each optimizer step. In a sampled step the graphs run op by op, with the time and memory of
    eager execution. Forwards under `torch.no_grad()` are not sampled. In distributed training each
    process measures its own tensors, so pass `csv` and `tensorboard` in one process only.

    Args:
        every: number of steps from one sample to the next.
        csv: path of a CSV file. Each sample appends one line for each tensor.
        tensorboard: a folder, or a `SummaryWriter`. Each sample writes scalars to it.
        sharpness: a function that is called after each sampled step, such as `lambda:
            fp8pass.sharpness(model, loss_fn, batch)`. Its result, in percent, is a separate row.
        model: the whole model, for paths in the model. Only needed if its parts are compiled
            separately. Callbacks set it.
        fallback: patterns of module paths, as in `Config.skip`. Each graph is compiled a third
            time, with the matched layers in high precision, and a `Guard` may switch to this
            version.

    Attributes:
        sampling: whether the current step is sampled.
        falls_back: whether the version with `fallback` layers in high precision runs.
        steps: number of optimizer steps done.
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
        if not is_whole(every) or every < 1:
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
        self.latest: list[TensorStatistics] = []
        self._writers: list[CsvWriter | TensorBoardWriter] = []
        if csv is not None:
            self._writers.append(CsvWriter(csv))
        if tensorboard is not None:
            self._writers.append(TensorBoardWriter(tensorboard))
        self._sharpness = sharpness
        self._findings = Findings()
        self._totals: dict[tuple[str, TensorName], Tensor] = {}
        self._modules: dict[int, str] | None = None
        # By address of a weight: number of changes in this sample, and last seen version.
        self._changes: dict[int, tuple[int, int]] = {}
        self._warned = False

    def step(self) -> None:
        """Count an optimizer step, and report its sample if it was sampled.

        Call this after the optimizer step, once for all micro-batches. The call waits for the
        device only in sampled steps.
        """
        if self.sampling:
            self._finish_sample()
        self.resume(self.steps + 1)

    def resume(self, steps: int) -> None:
        """Continue a training, for example from a checkpoint, that has done `steps` steps."""
        self.steps = steps
        self.sampling = bool(self.every) and steps % self.every == 0
        self._totals.clear()
        self._changes.clear()
        self._modules = None  # an optimizer may have moved parameters

    def close(self) -> None:
        """Stop sampling, and close files."""
        self.sampling = False
        self.every = 0
        for writer in self._writers:
            writer.close()

    def _begin(self, model: Any, optimizers: Sequence[Any], steps: int) -> None:
        if self.model is None:
            self.model = model
        self.resume(steps)

    def _end_step(self, loss: Any, gradient_norm: Any) -> None:
        self.step()

    def module_of(self, weight: Tensor) -> str | None:
        """Return the path of the module that owns a weight, if known."""
        if self._modules is None:
            named = self.model.named_parameters() if self.model is not None else ()
            self._modules = {
                p.data_ptr(): graph.clean_path(name.rpartition(".")[0]) for name, p in named
            }
        return self._modules.get(weight.data_ptr())

    def saw(self, weight: Tensor) -> None:
        """Warn that `step()` was not called if a weight changes several times within a sample."""
        version = compat.version_of(weight)
        changes, before = self._changes.get(weight.data_ptr(), (0, version))
        changes += version != before
        self._changes[weight.data_ptr()] = changes, version
        if changes > MOST_CHANGES and not self._warned:
            self._warned = True
            log.warning(
                "The Monitor still measures step %d, although the weights have changed %d times "
                "since then. So training runs slowly, op by op. Call monitor.step() after each "
                "optimizer step, or pass monitor.hugging_face() or monitor.lightning() to a "
                "Trainer's callbacks.",
                *(self.steps, changes),
            )

    def record(self, prefix: str, name: TensorName, totals: Tensor) -> None:
        """Add a tensor's totals. The tensor belongs to the compiled submodule at path `prefix`."""
        before = self._totals.get((prefix, name))
        self._totals[prefix, name] = totals if before is None else merge(before, totals)

    def _finish_sample(self) -> None:
        if not self._totals and not self._sharpness:
            return
        found = []
        numbers = _copy_to_host(list(self._totals.values()))
        for (prefix, name), totals in zip(list(self._totals), numbers, strict=True):
            module = ".".join(part for part in (prefix, name.module) if part)
            found.append(Measured(make_row(self.steps, module, name, totals), name))
        self.latest = [y.row for y in found]
        if self._sharpness:
            sharpness = float(self._sharpness())
            self.latest.append(TensorStatistics(self.steps, "", LANDSCAPE, sharpness=sharpness))
        for writer in self._writers:
            writer.write(self.latest)
        for message in self._findings.find_new(found):
            log.warning("%s", message)

    def _why_empty(self) -> str:
        if self._totals:
            return "The first sample is not complete: call monitor.step() at the end of the step."
        if self.steps:
            return (
                f"Nothing sampled by step {self.steps}: no graph with this monitor quantizes "
                "tensors. Compile with backend=fp8pass.backend(config, monitor=monitor) and a "
                "recipe other than 'exact', and call monitor.step() after each optimizer.step()."
            )
        return (
            "Nothing sampled yet: no step has run. Compile with backend=fp8pass.backend(config, "
            "monitor=monitor), train, and call monitor.step() after each optimizer.step()."
        )

    def __str__(self) -> str:
        """Return the latest sample as a table, sorted by nonfinite elements, underflow and SQNR."""
        if not self.latest:
            return self._why_empty()
        buffer = io.StringIO()
        Console(file=buffer, width=140).print(_make_table(self.latest))
        return buffer.getvalue()


def _copy_to_host(totals: list[Tensor]) -> list[list[float]]:
    if len({t.device for t in totals}) == 1:
        return torch.stack(totals).tolist()
    return [t.tolist() for t in totals]


def _make_table(rows: list[TensorStatistics]) -> Table:
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
    for r in worst[:MOST_PRINTED]:
        shares = f"{r.saturated:.2%}", f"{r.underflow:.2%}"
        numbers = f"{r.amax:.3g}", *shares, f"{r.sqnr_db:.1f}", str(r.nonfinite or "")
        table.add_row(r.module, r.tensor, r.scales, r.format, *numbers)
    table.caption = (
        "saturated: elements rounded to the largest value of the format; an amax may be among them"
    )
    if len(rows) > MOST_PRINTED:
        table.caption += f"; and {len(rows) - MOST_PRINTED} more rows in monitor.latest"
    return table
