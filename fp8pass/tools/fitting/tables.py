"""Tables of a fit, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fp8pass.config import bytes_text
from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.candidates import PROCESS_BYTES, Candidate

# What each kind of memory is.
KINDS = {
    "weights": "weights and buffers",
    "states": "states of the optimizer",
    "sums": "sums of gradients",
    "gradients": "gradients",
    "saved": "kept for the backward by compiled graphs",
    "activations": "kept by PyTorch, and results",
    "workspace": "in use by operators",
    "staging": "buffers of streams to the host",
}


def memory_table(candidate: Candidate, gpu: Gpu, host: float) -> Table:
    """What is where at the peak of a step."""
    table = Table(show_footer=True)
    of_gpu, of_host = candidate.gpu_bytes, candidate.host_bytes
    table.add_column("", footer="in all")
    table.add_column("GPU", justify="right", footer=_of(of_gpu, gpu.memory))
    table.add_column("host", justify="right", footer=_of(of_host, host))
    for kind, name in KINDS.items():
        here, there = candidate.gpu.get(kind, 0.0), candidate.host.get(kind, 0.0)
        if kind in ("weights", "states", "gradients", "saved") or here or there:
            table.add_row(name, _size(here), _size(there))
    rest = of_host - sum(candidate.host.values())
    parts = f"CUDA, Python, unused (process {bytes_text(PROCESS_BYTES)})"
    table.add_row(parts, _size(of_gpu - candidate.allocated), _size(rest))
    return table


def ways_table(tried: Sequence[tuple[Candidate, str]], best: Candidate | None) -> Table:
    """The ways to train, from the fastest on."""
    table = Table(title="ways to train, from the fastest on", title_justify="left")
    for column in ("", "GPU", "host", "s a step", "waits for link"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("")
    for candidate, why_not in tried:
        seconds = candidate.seconds
        table.add_row(
            str(candidate.setup),
            _size(candidate.gpu_bytes),
            _size(candidate.host_bytes),
            f"{seconds.total:.3g}",
            f"{seconds.waiting:.3g}" if seconds.waiting else "",
            "◀ fits" if candidate is best else why_not,
        )
    return table


def _size(count: float) -> str:
    return bytes_text(count) if count else ""


def _of(count: float, most: float) -> str:
    return f"{bytes_text(count)} of {bytes_text(most)}"
