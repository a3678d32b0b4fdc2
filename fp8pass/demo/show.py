"""The output of the demo: progress, a table, conclusions, and the loss curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fp8pass import hardware
from fp8pass.demo.train import Run
from fp8pass.option_checks import bytes_text
from fp8pass.tools.output import make_figure


@contextmanager
def show_progress(console: Console, names: list[str], steps: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar for each variant. Yield `update(name, step)`; step 0 means compiling."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bars:
        tasks = {n: bars.add_task(n, start=False, total=steps, status="waiting") for n in names}

        def update(name: str, step: int) -> None:
            bars.start_task(tasks[name])
            # Without a total, the bar pulses.
            total, status = (steps, "") if step else (None, "compiling")
            bars.update(tasks[name], completed=step, total=total, status=status)

        yield update


def make_table(runs: list[Run]) -> Table:
    """Make a table of the results. It omits the peak memory if the peak was not measured."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("variant", no_wrap=True)
    counts_peak = runs[0].peak_bytes is not None
    for column in ("held-out loss", "tokens/s", "saved for backward", *["peak"] * counts_peak):
        table.add_column(column, justify="right")
    for run in runs:
        sizes = (run.saved_bytes, run.peak_bytes)
        table.add_row(
            run.variant,
            f"{run.held_out_loss:.3f}",
            f"{run.tokens_per_second:,.0f}",
            *(bytes_text(size) for size in sizes if size is not None),
        )
    return table


def list_conclusions(runs: list[Run], device: torch.device) -> Iterator[str]:
    stock, ours, other_seed = runs
    saved, stock_saved = bytes_text(ours.saved_bytes), bytes_text(stock.saved_bytes)
    share = ours.saved_bytes / stock.saved_bytes
    yield f"Memory: fp8pass saves {saved} for the backward instead of {stock_saved} ({share:.0%})."
    loss, by_chance = (x.held_out_loss / stock.held_out_loss - 1 for x in (ours, other_seed))
    compared = "no more" if abs(loss) <= abs(by_chance) else "more"
    yield (
        f"Loss: fp8pass changes the loss by {loss:+.1%}, {compared} than another seed of "
        f"torch.compile ({by_chance:+.1%})."
    )
    speed = ours.tokens_per_second / stock.tokens_per_second
    yield f"Speed: {speed:.2f}× the tokens/s of torch.compile.{explain_speed(device)}"


def explain_speed(device: torch.device) -> str:
    """Return why FP8 GEMMs do not run on `device`, or ''."""
    if device.type == "cpu":
        return " A CPU emulates FP8 in FP32, so this ratio does not predict the speed on a GPU."
    reason = hardware.why_no_fp8_gemm(device)
    return f" Linear layers stayed in BF16: {reason}." if reason else ""


def write_plot(runs: list[Run], folder: Path) -> str:
    """Plot the loss curves. Return a line with the file's path, or with the reason for no plot."""
    try:
        figure = make_figure("the demo", figsize=(8, 6))
    except ImportError:
        return "No loss curves, because matplotlib is missing: pip install 'fp8pass[demo]'"
    curves, difference = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    stock, ours, _ = runs
    window = max(1, len(stock.losses) // 20)
    for run, color, style in zip(runs, ("C0", "C1", "C7"), ("-", "--", ":"), strict=True):
        curves.plot(running_mean(run.losses, window), style, color=color, label=run.variant)
    curves.set(ylabel=f"train loss, nats per byte (mean of {window} steps)")
    curves.set_title("The first two runs have the same initial weights and the same batches")
    curves.legend()
    added = [b - a for a, b in zip(stock.losses, ours.losses, strict=True)]
    difference.axhline(0, color="C0", linewidth=0.8)
    difference.plot(added, color="C1", alpha=0.3, linewidth=0.8)
    difference.plot(running_mean(added, window), color="C1")
    difference.set(xlabel="step", ylabel="fp8pass − torch.compile")
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    return f"Loss curves: {path}"


def running_mean(values: list[float], window: int) -> list[float]:
    """Replace each value by the mean of the last `window` values up to it."""
    recent = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(chunk) / len(chunk) for chunk in recent]
