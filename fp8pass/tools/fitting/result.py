"""`Fit`: what training takes of a GPU and its host, and the fastest way that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8pass.config import ConfigError, bytes_text
from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.candidates import PROCESS_BYTES, Candidate
from fp8pass.tools.fitting.replay import Moment
from fp8pass.tools.fitting.setup import config_text
from fp8pass.tools.fitting.tables import memory_table, ways_table
from fp8pass.tools.fitting.timeline import plot_timeline
from fp8pass.tools.terminal import text_of


@dataclass
class Fit:
    """What training takes; print it, or use `lines`, `best`, `to_json()` and `plot()`.

    Attributes:
        model: name of the model's class.
        gpu: the GPU, with the memory that there is.
        host: bytes of the host that there are.
        accumulate: micro-batches of a step.
        blocks: paths of the modules that are compiled one by one; none if the model is as a whole.
        tried: the ways to train that were looked at, from the fastest on, each with why it does not
            fit.
        best: the one that fits; None if none does.
        notes: what there is to know besides, as sentences.
        moments: bytes alive over a forward and backward of the best way, or of the smallest.
    """

    model: str
    gpu: Gpu
    host: float
    accumulate: int
    blocks: tuple[str, ...]
    tried: list[tuple[Candidate, str]] = field(default_factory=list)
    best: Candidate | None = None
    notes: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether there is a way to train."""
        return self.best is not None

    @property
    def shown(self) -> Candidate:
        """The best way, or else the one that takes least of the GPU."""
        return self.best or min((c for c, _ in self.tried), key=lambda c: c.gpu_bytes)

    @property
    def lines(self) -> str:
        """The best way as Python to paste.

        Raises:
            ConfigError: none fits; the message says what is least and what is in the way.
        """
        if self.best is None:
            raise ConfigError(self.why_not)
        return self.best.setup.lines(self.accumulate, self.blocks)

    @property
    def why_not(self) -> str:
        """Why nothing fits; '' if something does."""
        if self.fits:
            return ""
        if self.host < PROCESS_BYTES:
            return (
                f"{self.model} does not fit a host of {bytes_text(self.host)}: Python, PyTorch and "
                f"the driver take {bytes_text(PROCESS_BYTES)} of it, whatever else is there. Take "
                "a larger host; no other way to train was tried."
            )
        least, gpu = self.shown, bytes_text(self.gpu.memory)
        why = least.why_not(self.gpu.memory, self.host)
        return (
            f"{self.model} does not fit a GPU of {gpu} and a host of {bytes_text(self.host)}. The "
            f"least is {bytes_text(least.gpu_bytes)} of the GPU and {bytes_text(least.host_bytes)} "
            f"of the host ({least.setup}): {why}. {self._advice(least)}"
        )

    def _advice(self, least: Candidate) -> str:
        if least.gpu_bytes <= self.gpu.memory:
            return "Take states of fewer bytes, or leave more on the GPU."
        kinds = {k: least.gpu[k] for k in ("weights", "saved", "activations", "workspace")}
        largest = max(kinds, key=kinds.__getitem__)
        if largest == "weights":
            return "The weights alone are in the way: shard the model over several GPUs."
        return (
            f"Its {largest}, {bytes_text(kinds[largest])} in the {least.peak}, grow with the "
            "micro-batch: take a smaller one and accumulate more of them"
            + (", or compile the layers one by one (blocks=)." if not self.blocks else ".")
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready data; sizes in bytes, times in seconds."""
        return {
            "model": self.model,
            "gpu": asdict(self.gpu),
            "host_bytes": self.host,
            "accumulate": self.accumulate,
            "blocks": list(self.blocks),
            "fits": self.fits,
            "lines": self.lines if self.fits else None,
            "best": _data(self.best, "") if self.best else None,
            "tried": [_data(candidate, why) for candidate, why in self.tried],
            "notes": self.notes,
            "why_not": self.why_not,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def plot(self, path: str | Path) -> None:
        """Draw the GPU's memory by kind over a forward and backward into an image file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not write files of this extension.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "plot needs matplotlib: pip install matplotlib", name="matplotlib"
            ) from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        plot_timeline(axes, self.shown.gpu, self.moments, self.gpu.memory)
        axes.legend(loc="upper left", fontsize="small", ncols=2)
        figure.savefig(path)

    def __str__(self) -> str:
        return text_of(self._parts())

    def _telling(self) -> list[tuple[Candidate, str]]:
        """The ways to train that have as much in the same places as what is shown, or least."""
        least: dict[object, Candidate] = {}
        for candidate, _ in self.tried:
            place = _place(candidate)
            least[place] = min(least.get(place, candidate), candidate, key=lambda c: c.gpu_bytes)
        own = _place(self.shown)
        return [(c, why) for c, why in self.tried if _place(c) == own or c is least[_place(c)]]

    def _parts(self) -> Iterator[Any]:
        shown = self.shown
        yield f"{self.model} on {self.gpu.name}: {shown.setup}. At the peak, in the {shown.peak}:"
        yield memory_table(shown, self.gpu, self.host)
        yield ways_table(self._telling(), self.best)
        yield from self.notes
        yield f"\n{self.lines}" if self.fits else f"\n{self.why_not}"


def _place(candidate: Candidate) -> tuple[bool, tuple[str, ...]]:
    return candidate.setup.attach, candidate.setup.offload


def _data(candidate: Candidate, why_not: str) -> dict[str, Any]:
    setup = candidate.setup
    return {
        "config": config_text(setup.config),
        "attach": setup.attach,
        "offload": list(setup.offload),
        "optimizer": "torch" if setup.preset is None else setup.preset,
        "gpu": candidate.gpu,
        "host": candidate.host,
        "allocated_bytes": candidate.allocated,
        "gpu_bytes": candidate.gpu_bytes,
        "host_bytes": candidate.host_bytes,
        "peak": candidate.peak,
        "seconds": {**asdict(candidate.seconds), "total": candidate.seconds.total},
        "why_not": why_not,
    }
