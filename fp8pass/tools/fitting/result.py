"""`Fit`: the memory that training needs on a GPU and its host, and the fastest setup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from fp8pass.hardware import GIB, REFERENCE, Gpu
from fp8pass.option_checks import ConfigError, bytes_text
from fp8pass.tools.fitting.candidates import PROCESS_BYTES, Candidate
from fp8pass.tools.fitting.planned import Moment
from fp8pass.tools.fitting.setup import format_config
from fp8pass.tools.output import Result, make_figure, pick_unit

MEMORY_KINDS = {
    "weights": ("weights and buffers", "#4c78a8"),
    "states": ("states of the optimizer", "#9ecae9"),
    "sums": ("accumulated gradients", "#bab0ac"),
    "staging": ("GPU buffers for offload", "#79706e"),
    "saved": ("saved by compiled graphs", "#f58518"),
    "activations": ("saved outside of graphs, and results of graphs", "#ffbf79"),
    "gradients": ("gradients", "#54a24b"),
    "workspace": ("workspace of operators", "#e45756"),
}
# Name of a GPU of which only the memory is known.
UNNAMED = "unnamed GPU"
# The table of memory lists these kinds even if they take no memory.
ALWAYS = ("weights", "states", "gradients", "saved")


@dataclass(repr=False)
class Fit(Result):
    """Result of `fit`: the memory and time of training.

    Print this object, or use `lines`, `best`, `to_json()` and `plot()`.

    Attributes:
        model: name of the model's class.
        gpu: the GPU, with its available memory.
        host: available bytes of host memory.
        accumulate: number of micro-batches of a step.
        blocks: paths of the modules that are compiled one by one; empty for the whole model.
        parameters: number of the model's parameters.
        dtype: dtype of most parameters.
        inputs: shape of the first input of a micro-batch, as text.
        tried: the training setups that were evaluated, the fastest first. Each is paired with the
            reason why it does not fit, or '' if it fits.
        best: the fastest setup that fits; None if no setup fits.
        notes: further remarks, as sentences.
        moments: bytes alive at each moment of a forward and backward, for the candidate `shown`.
    """

    model: str
    gpu: Gpu
    host: float
    accumulate: int
    blocks: tuple[str, ...]
    parameters: int
    dtype: str
    inputs: str
    tried: list[tuple[Candidate, str]] = field(default_factory=list)
    best: Candidate | None = None
    notes: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether a setup fits."""
        return self.best is not None

    @property
    def shown(self) -> Candidate:
        """The best setup; if no setup fits, the candidate that needs the least GPU memory."""
        return self.best or min((c for c, _ in self.tried), key=lambda c: c.gpu_bytes)

    @property
    def lines(self) -> str:
        """The best setup, as Python code to paste.

        Raises:
            ConfigError: no setup fits; the message is `why_not`.
        """
        if self.best is None:
            raise ConfigError(self.why_not)
        return self.best.setup.lines(self.accumulate, self.blocks)

    @property
    def why_not(self) -> str:
        """Why no setup fits, with the memory of the smallest setup; '' if a setup fits."""
        if self.fits:
            return ""
        if self.host < PROCESS_BYTES:
            return (
                f"{self.model} does not fit a host of {bytes_text(self.host)}: Python, PyTorch and "
                f"the driver alone take {bytes_text(PROCESS_BYTES)}. Use a host with more memory."
            )
        least, gpu = self.shown, bytes_text(self.gpu.memory)
        why = least.why_not(self.gpu.memory, self.host)
        return (
            f"{self.model} does not fit a GPU of {gpu} and a host of {bytes_text(self.host)}. The "
            f"setup with the least GPU memory takes {bytes_text(least.gpu_bytes)} on the GPU and "
            f"{bytes_text(least.host_bytes)} on the host ({least.setup}): {why}. "
            f"{self._advise(least)}"
        )

    def _advise(self, least: Candidate) -> str:
        if least.gpu_bytes <= self.gpu.memory:
            return "Use smaller optimizer states, or offload less."
        kinds = {k: least.gpu[k] for k in ("weights", "saved", "activations", "workspace")}
        largest = max(kinds, key=kinds.__getitem__)
        if kinds["weights"] > self.gpu.memory:
            return "The weights alone are too large: shard the model over several GPUs."
        if largest == "weights":
            return (
                "The largest part is the weights. Store them in BF16 (model.bfloat16(), or --dtype "
                "bfloat16) if they are not yet, or shard the model over several GPUs."
            )
        return (
            f"The largest part is {largest}, {bytes_text(kinds[largest])} in the {least.peak}. Use "
            "smaller micro-batches and accumulate more of them"
            + ("." if self.blocks else ", or compile the layers one by one (blocks=).")
        )

    def _summary(self) -> str:
        how = f"fits with {self.shown.setup}" if self.fits else "does not fit"
        used, available = bytes_text(self.shown.gpu_bytes), bytes_text(self.gpu.memory)
        return f"{self.model} on {self.gpu.name}: {how}, {used} of {available}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data; sizes in bytes, times in seconds."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "inputs": self.inputs,
            "gpu": asdict(self.gpu),
            "host_bytes": self.host,
            "accumulate": self.accumulate,
            "blocks": list(self.blocks),
            "fits": self.fits,
            "lines": self.lines if self.fits else None,
            "best": _to_dict(self.best, "") if self.best else None,
            "tried": [_to_dict(candidate, why) for candidate, why in self.tried],
            "notes": self.notes,
            "why_not": self.why_not,
        }

    def plot(self, path: str | Path) -> None:
        """Plot the GPU's memory by kind over a forward and backward, into an image file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not write files of this extension.
        """
        figure = make_figure("plot", figsize=(8, 4))
        axes = figure.add_subplot(ylabel="GiB", xlabel="forward, backward", xticks=[])
        standing, count = self.shown.gpu, len(self.moments)
        heights = {
            kind: [getattr(m, kind, standing[kind]) / GIB for m in self.moments]
            for kind in MEMORY_KINDS
        }  # bytes of kinds that are not fields of a moment are alive all the time
        shown = {kind: values for kind, values in heights.items() if max(values, default=0) > 0}
        colors = [MEMORY_KINDS[kind][1] for kind in shown]
        axes.stackplot(
            range(count), *shown.values(), labels=list(shown), colors=colors, step="post"
        )
        begins = next((i for i, m in enumerate(self.moments) if m.backward), count)
        axes.axvline(begins, color="black", linewidth=0.8, linestyle=":")
        axes.axhline(self.gpu.memory / GIB, color="black", linewidth=0.8)
        axes.set(xlim=(0, max(count - 1, 1)))
        axes.legend(loc="upper left", fontsize="small", ncols=2)
        figure.savefig(path)

    def _parts(self) -> Iterator[Any]:
        shown = self.shown
        yield self._planned_text
        yield f"{shown.setup}. Memory at the peak, in the {shown.peak}:"
        yield self._make_memory_table()
        yield self._make_candidates_table()
        yield from self.notes
        yield f"\n{self.lines}" if self.fits else f"\n{self.why_not}"

    @property
    def _planned_text(self) -> str:
        batch = f"micro-batch {self.inputs}" + f" × {self.accumulate}" * (self.accumulate > 1)
        model = f"{self.model} {_format_count(self.parameters)}, {self.dtype}"
        gpu = f"{self.gpu.name} of {bytes_text(self.gpu.memory)}"
        return f"{model} · {batch} · {gpu} ({self._rates_text})"

    @property
    def _rates_text(self) -> str:
        no_fp8 = "" if self.gpu.has_fp8 else "; no FP8 tensor cores: linear layers in 16 bits"
        if self.gpu.rates != "assumed":
            return f"rates: {self.gpu.rates}{no_fp8}"
        why = "no GPU was named" if self.gpu.name == UNNAMED else "fit does not know this GPU"
        return f"speed unknown: {why}; times are for an {REFERENCE}{no_fp8}"

    def _make_memory_table(self) -> Table:
        shown, table = self.shown, Table(show_footer=True)
        table.add_column("", footer="total")
        sizes = {"GPU": (shown.gpu_bytes, self.gpu.memory), "host": (shown.host_bytes, self.host)}
        for title, (used, available) in sizes.items():
            footer = f"{bytes_text(used)} of {bytes_text(available)}"
            table.add_column(title, justify="right", footer=footer)
        for kind, (name, _) in MEMORY_KINDS.items():
            here, there = shown.gpu.get(kind, 0.0), shown.host.get(kind, 0.0)
            if kind in ALWAYS or here or there:
                table.add_row(name, _format_size(here), _format_size(there))
        table.add_row(
            f"unused memory, CUDA context, Python process ({bytes_text(PROCESS_BYTES)})",
            _format_size(shown.gpu_bytes - shown.allocated),
            _format_size(shown.host_bytes - sum(shown.host.values())),
        )
        return table

    def _make_candidates_table(self) -> Table:
        """Make the table of training setups, the fastest first.

        All setups with the `step_in_backward` and `offload` of `shown` have a row. For each other
        pair of these options, only the setup with the least GPU memory has a row.
        """
        least: dict[object, Candidate] = {}
        for candidate, _ in self.tried:
            place = _find_place(candidate)
            least[place] = min(least.get(place, candidate), candidate, key=lambda c: c.gpu_bytes)
        table = Table(title="training setups, the fastest first", title_justify="left")
        table.add_column("")
        of = f" ({REFERENCE})" if self.gpu.rates == "assumed" else ""
        for column in ("GPU", "host", f"s per step{of}", "s waiting"):
            table.add_column(column, justify="right")
        table.add_column("")
        for candidate, why_not in self.tried:
            place = _find_place(candidate)
            if place != _find_place(self.shown) and candidate is not least[place]:
                continue
            seconds = candidate.seconds
            table.add_row(
                str(candidate.setup),
                _format_size(candidate.gpu_bytes),
                _format_size(candidate.host_bytes),
                f"{seconds.total:.3g}",
                f"{seconds.waiting:.3g}" if seconds.waiting else "",
                "◀ fits" if candidate is self.best else why_not,
            )
        return table


def _find_place(candidate: Candidate) -> tuple[bool, tuple[str, ...]]:
    return candidate.setup.step_in_backward, candidate.setup.offload


def _format_size(count: float) -> str:
    return bytes_text(count) if count else ""


def _format_count(count: int) -> str:
    """Format a number, e.g. `6.7B` or `125M`."""
    size, unit = pick_unit(count, {"B": 1e9, "M": 1e6, "K": 1e3, "": 1})
    return f"{size:.3g}{unit}" if size < 1000 else f"{size:.0f}{unit}"


def _to_dict(candidate: Candidate, why_not: str) -> dict[str, Any]:
    setup, seconds = candidate.setup, candidate.seconds
    return {
        "config": format_config(setup.config),
        "step_in_backward": setup.step_in_backward,
        "offload": list(setup.offload),
        "optimizer": "coat",
        "gpu": candidate.gpu,
        "host": candidate.host,
        "allocated_bytes": candidate.allocated,
        "gpu_bytes": candidate.gpu_bytes,
        "host_bytes": candidate.host_bytes,
        "peak": candidate.peak,
        "seconds": {**asdict(seconds), "total": seconds.total},
        "why_not": why_not,
    }
