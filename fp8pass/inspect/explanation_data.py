"""The decisions about a model as data, from which tables and the report are made."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.passes.runner import PassRecord


@dataclass
class ExplanationData:
    """The decisions about a model, as data.

    Attributes:
        config: the configuration that was explained.
        model: name of the model's class.
        eager_bytes: bytes that the model keeps for its backward without a compiler, measured.
        graphs: the compiled graphs, in order.
    """

    config: Config
    model: str = ""
    eager_bytes: int = 0
    graphs: list[CompiledGraph] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward over all runs of all graphs, parameters not counted."""
        return sum(g.runs * g.plan.saved_bytes for g in self.graphs)

    @property
    def stock_bytes(self) -> int:
        """Bytes that stock `torch.compile` would keep for the same graphs."""
        return sum(g.runs * (g.plan.stock_bytes or 0) for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs' code, as JSON-ready data."""
        return {
            "config": {name: _json_ready(x) for name, x in vars(self.config).items()},
            "saved_bytes": self.saved_bytes,
            "stock_bytes": self.stock_bytes,
            "eager_bytes": self.eager_bytes,
            "graphs": [
                g.plan.to_dict()
                | {"runs": g.runs}
                | {"pass_seconds": {_pass_name(p): p.seconds for p in g.passes}}
                for g in self.graphs
            ],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The explanation as JSON text, also written to `path` if one is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text


def _json_ready(value: Any) -> Any:
    """An option's value as JSON can hold it: without infinity and tuples."""
    return str(value) if value == math.inf else json.loads(json.dumps(value))


def _pass_name(record: PassRecord) -> str:
    """The name of a pass; for passes of a half with the half before it."""
    halves = ("forward", "backward")
    return f"{record.graph}.{record.name}" if record.graph in halves else record.name
