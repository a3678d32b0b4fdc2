"""Plot docs/{convergence,quality_large,model,stability}.png from benchmarks/results/*.json.

python benchmarks/plots.py    what has been measured; needs matplotlib
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from fp8pass.demo.show import running_mean

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
SMOOTHING = 5


def convergence(data: dict[str, Any]) -> Figure:
    """Plot the mean training loss of each variant over seeds, and its difference from BF16."""
    figure, (curves, difference) = pyplot.subplots(
        2, sharex=True, height_ratios=(3, 2), figsize=(8, 7), layout="constrained"
    )
    losses: dict[str, dict[int, list[float]]] = {}
    for r in data["results"]:
        values = [float("nan") if x is None else x for x in r["losses"]]
        losses.setdefault(r["variant"], {})[r["seed"]] = values
    baseline = next(v for v in losses if v.startswith("BF16"))
    steps = data["settings"]["steps"]
    for number, (variant, runs) in enumerate(losses.items()):
        color = f"C{number}"
        seeds = sorted(runs.keys() & losses[baseline].keys())
        loss = _mean([runs[s] for s in runs])
        x = [steps * (i + 1) / len(loss) for i in range(len(loss))]
        curves.plot(x, loss, color=color, label=f"{variant} (seeds: {len(runs)})")
        if seeds:
            pairs = (zip(runs[s], losses[baseline][s], strict=True) for s in seeds)
            versus = [[(x / y - 1) * 100 for x, y in pair] for pair in pairs]
            difference.plot(x, running_mean(_mean(versus), SMOOTHING), color=color)
    curves.set(ylabel="train loss, nats per byte", yscale="log")
    for set_formatter in (curves.yaxis.set_major_formatter, curves.yaxis.set_minor_formatter):
        set_formatter("{x:g}")
    curves.set_title("Same initial weights and batches for each seed")
    curves.legend()
    difference.set(xlabel="step", ylabel=f"% above BF16, mean of {SMOOTHING} points")
    return figure


def _mean(curves: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def stability(data: dict[str, Any]) -> Figure:
    """Plot the final loss by learning rate, and sharpness over steps at the lowest rate."""
    figure, (final, sharp) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    rates = sorted({r["rate"] for r in data["results"]})
    for number, variant in enumerate(dict.fromkeys(r["variant"] for r in data["results"])):
        mine, color = [r for r in data["results"] if r["variant"] == variant], f"C{number}"
        runs = [[_or_nan(r["losses"][-1]) for r in mine if r["rate"] == rate] for rate in rates]
        for rate, losses in zip(rates, runs, strict=True):
            final.plot([rate] * len(losses), losses, ".", color=color)
        means = [sum(x) / len(x) if x else float("nan") for x in runs]
        final.plot(rates, means, color=color, label=variant)
        slowest = [r for r in mine if r["rate"] == rates[0]]
        for i, r in enumerate(slowest):
            steps, corners = [s for s, *_ in r["sharpness"]], [c for _, c, _ in r["sharpness"]]
            label = variant if i == 0 else None
            sharp.plot(steps, [_or_nan(c) for c in corners], color=color, label=label)
    lowest = min(loss for r in data["results"] for loss in r["losses"] if loss is not None)
    # The axis ends below the losses of diverged runs.
    limits = {"bottom": lowest - 0.05, "top": lowest + 1.25}
    final.set(xlabel="learning rate", ylabel="final loss, nats per byte", xscale="log")
    final.set_ylim(**limits)
    sharp.set(xlabel="step", ylabel=f"sharpness at {rates[0]:g}, %", yscale="log")
    final.legend()
    return figure


# Rows of the model benchmark: (variant, optimizer) and label.
MODEL_ROWS = {
    ("bf16 compile", "AdamW"): "BF16 torch.compile",
    ("torchao tensorwise", "AdamW"): "torchao float8",
    ("fp8pass coat", "AdamW"): "fp8pass",
    ("fp8pass coat", "fp8pass AdamW"): "fp8pass and its AdamW",
}


def model(data: dict[str, Any]) -> Figure:
    """Plot tokens per second and peak memory of the 7B model as bars."""
    rows = {(r["variant"], r["optimizer"]): r for r in data["results"] if r["model"] == "7B"}
    labels, colors = list(MODEL_ROWS.values()), ["C7", "C7", "C0", "C0"]
    figure, (speed, memory) = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 2.4), layout="constrained"
    )
    for axes, title, values in (
        (speed, "tokens per second", [rows[row]["tokens_per_second"] for row in MODEL_ROWS]),
        (memory, "peak GiB", [rows[row]["peak_bytes"] / 2**30 for row in MODEL_ROWS]),
    ):
        bars = axes.barh(labels, values, color=colors)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
        axes.set(title=title, xticks=[], xlim=(0, 1.15 * max(values)))
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    speed.invert_yaxis()
    figure.supxlabel(f"Llama-2-7B shape, 2 × 2048 tokens, {data['gpu']}", fontsize="small")
    return figure


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


PLOTS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "convergence": convergence,
    "quality_large": convergence,
    "model": model,
    "stability": stability,
}


def main() -> None:
    """Make the plots of all results."""
    for name, plot in PLOTS.items():
        path = HERE / f"results/{name}.json"
        if not path.exists():
            continue
        figure = plot(json.loads(path.read_text()))
        figure.savefig(DOCS / f"{name}.png", dpi=150)
        pyplot.close(figure)
        print(f"wrote {DOCS / name}.png")


if __name__ == "__main__":
    main()
