"""The culprits found, as text, as JSON and as options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from fp8pass.config import Config
from fp8pass.tools.bisection.units import Unit, options_for
from fp8pass.tools.diagnosis import finite
from fp8pass.tools.folding import path_pattern
from fp8pass.tools.terminal import named, table, text_of


@dataclass(frozen=True)
class Culprit(Unit):
    """A linear layer or saved tensor that causes much of the error by itself.

    Attributes:
        error_before: error of the gradients with the culprits found before it exact.
        error_after: error of the gradients with this one exact, too.
    """

    error_before: float
    error_after: float


@dataclass
class Bisection:
    """Where a gradient error comes from; print it, or look at `culprits`.

    Errors are of all gradients together, relative to those of recipe `exact`: ‖wrong - exact‖₂ /
    ‖exact‖₂, infinite where they are not finite.

    Attributes:
        config: the configuration that was examined.
        error: the error of the gradients.
        culprits: the units that cause most of it, in the order found.
        units: number of linear layers and saved tensors that are not exact.
        probes: number of compilations.
        spread: whether no other unit stands out, so that the remaining error comes from many.
        parts: paths of the parts that are compiled, from which names start; () for the whole.
    """

    config: Config
    error: float
    culprits: list[Culprit] = field(default_factory=list)
    units: int = 0
    probes: int = 0
    spread: bool = True
    parts: tuple[str, ...] = ()

    @property
    def remaining(self) -> float:
        """The error with the culprits exact."""
        return self.culprits[-1].error_after if self.culprits else self.error

    @property
    def suggested(self) -> dict[str, Any]:
        """Options that keep the culprits exact, in addition to those of the configuration."""
        return options_for(self.culprits, self.config)

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, also written to `path` if one is given."""
        data = {
            "error": self.error,
            "remaining": self.remaining,
            "culprits": [asdict(c) | {"fix": c.fix} for c in self.culprits],
            "suggested": self.suggested,
            "units": self.units,
            "probes": self.probes,
            "spread": self.spread,
            "parts": self.parts,
        }
        text = json.dumps(finite(data), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def __str__(self) -> str:
        return text_of([*([self._table()] if self.culprits else []), *self._conclusions()])

    def _table(self) -> Table:
        columns = "kind", "error before", "with it exact"
        made = table("what the gradient error comes from", "name", *columns)
        for c in self.culprits:
            errors = f"{c.error_before:.3g}", f"{c.error_after:.3g}"
            made.add_row(named(c.name), c.kind, *errors)
        return made

    def _conclusions(self) -> Iterator[str]:
        if not self.units:
            yield (
                "Nothing to bisect: no linear layer runs in FP8, no saved tensor is in low bits. "
                "fp8pass.explain(model, ...) says why."
            )
            return
        yield (
            f"Relative error of the gradients: {self.error:.3g}, with {self.units} linear layers "
            f"and saved tensors in low bits. Took {self.probes} compilations."
        )
        if self.remaining and self.spread:
            single = "single one else" if self.culprits else "single one"
            yield f"No {single} stands out: the error is spread."
        elif self.remaining:
            yield "There may be more: raise most."
        if self.culprits:
            if self.parts:
                yield (
                    "Only parts of the model are compiled, and names start there: in "
                    f"{path_pattern(self.parts)}. Equal parts share them."
                )
            yield f"To keep them exact, add to options: {self.suggested!r}"
