"""The output of the demo: progress, a table, the loss curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8pass import hardware
from fp8pass.demo.train import Run


@contextmanager
def progress_bar(console: Console, names: list[str], steps: int) -> Iterator[Callable[..., None]]:
    """Show a bar for each variant. Yield `update(name, step, loss)`; no loss means compiling."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks = {n: bars.add_task(n, start=False, total=steps, status="waiting") for n in names}

        def update(name: str, step: int, loss: float | None = None) -> None:
            bars.start_task(tasks[name])
            status = "compiling" if loss is None else f"loss {loss:.3f}"
            # Without a total the bar pulses.
            total = None if loss is None else steps
            bars.update(tasks[name], completed=step, total=total, status=status)

        yield update


def make_table(runs: list[Run]) -> Table:
    """Return a table with a row for each run."""
    table = Table(title="With stock torch.compile and with fp8pass", title_justify="left")
    table.add_column("\nvariant", no_wrap=True)
    columns = ("train\nloss", "held-out\nloss", "\ntokens/s", "saved for\nbackward", "peak\nmemory")
    for column in columns:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.variant,
            f"{run.final_loss:.3f}",
            f"{run.held_out_loss:.3f}",
            f"{run.tokens_per_second:,.0f}",
            _format_mib(run.activation_bytes),
            "n/a" if run.peak_bytes is None else _format_mib(run.peak_bytes),
        )
    return table


def _format_mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def make_notes(device: torch.device) -> Iterator[str]:
    """Yield notes on how to read the table."""
    if device.type == "cpu":
        yield (
            "A CPU emulates FP8, so fp8pass does not make training faster here, and PyTorch does "
            "not count peak memory. Losses and the bytes saved for the backward are as on a GPU."
        )
    if reason := hardware.why_no_fp8_gemm(device):
        yield f"Linear layers stayed in BF16: {reason}."


def write_plot(runs: list[Run], folder: Path) -> str:
    """Plot the losses to `folder`. Return a line with the path, or how to install matplotlib."""
    path = folder / "loss.png"
    try:
        plot_losses(runs, path)
    except ImportError:
        return "No loss curves: matplotlib is missing. Install it: pip install 'fp8pass[demo]'"
    return f"Loss curves: {path}"


def plot_losses(runs: list[Run], path: Path) -> None:
    """Write both loss curves and their difference as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, difference) = pyplot.subplots(
        2, sharex=True, height_ratios=(3, 1), figsize=(8, 6), layout="constrained"
    )
    window = max(1, len(runs[0].losses) // 20)
    for run, color, style in zip(runs, ("C0", "C1"), ("-", "--"), strict=True):
        curves.plot(run.losses, color=color, alpha=0.3, linewidth=0.8)
        curves.plot(running_mean(run.losses, window), style, color=color, label=run.variant)
    curves.set(ylabel=f"train loss, nats per byte (bold: mean of {window} steps)")
    curves.set_title("Same initial weights, same batches")
    curves.legend()
    added = [b - a for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
    difference.axhline(0, color="C0", linewidth=0.8)
    difference.plot(added, color="C1", alpha=0.3, linewidth=0.8)
    difference.plot(running_mean(added, window), color="C1")
    difference.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and its predecessors, of up to `window` values."""
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(chunk) / len(chunk) for chunk in recent]
