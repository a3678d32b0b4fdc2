"""A plot of the GPU's memory by kind over a forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8pass.tools.fitting.replay import KINDS, Moment

GIB = 1 << 30
STANDING = ("weights", "states", "sums", "staging")
COLORS = {
    "weights": "#4c78a8",
    "states": "#9ecae9",
    "sums": "#bab0ac",
    "staging": "#79706e",
    "saved": "#f58518",
    "activations": "#ffbf79",
    "gradients": "#54a24b",
    "workspace": "#e45756",
}


def plot_timeline(
    axes: Any,
    standing: Mapping[str, float],
    moments: Sequence[Moment],
    limit: float | None = None,
) -> None:
    """Draw what is alive at each of the moments, one kind on top of the other, in GiB.

    Args:
        axes: of matplotlib.
        standing: bytes that are there all the time, by kind.
        moments: of a micro-batch.
        limit: bytes of the GPU, as a line.
    """
    heights: dict[str, list[float]] = {
        kind: [standing[kind] / GIB] * len(moments) for kind in STANDING
    }
    heights |= {kind: [getattr(m, kind) / GIB for m in moments] for kind in KINDS}
    shown = {kind: values for kind, values in heights.items() if max(values, default=0) > 0}
    axes.stackplot(
        range(len(moments)),
        *shown.values(),
        labels=list(shown),
        colors=[COLORS[kind] for kind in shown],
        step="post",
    )
    begins = next((i for i, m in enumerate(moments) if m.backward), len(moments))
    axes.axvline(begins, color="black", linewidth=0.8, linestyle=":")
    if limit is not None:
        axes.axhline(limit / GIB, color="black", linewidth=0.8)
    axes.set(ylabel="GiB", xlim=(0, max(len(moments) - 1, 1)), xticks=[])
    axes.set_xlabel("forward, backward")
