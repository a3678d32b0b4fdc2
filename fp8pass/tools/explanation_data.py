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
from fp8pass.tools.running import module_of_run


@dataclass
class ExplanationData:
    """The decisions about a model, as data.

    Attributes:
        config: the configuration that was explained.
        model: name of the model's class.
        parts: paths of the parts that are compiled, each with all below it; () for the whole.
        saved_bytes: bytes that a forward keeps for the backward, measured: in all runs of all
            graphs and outside of them; what several of them keep counts once, parameters never.
        eager_bytes: the same without a compiler.
        graphs: the compiled graphs, in order.
        owners: the path of the module that has a parameter, by the parameter's id.
        linears: the same of the linear layers that a forward runs.
    """

    config: Config
    model: str = ""
    parts: tuple[str, ...] = ()
    saved_bytes: int = 0
    eager_bytes: int = 0
    graphs: list[CompiledGraph] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    linears: dict[int, str] = field(default_factory=dict)

    def modules_of(self, compiled: CompiledGraph) -> list[str]:
        """Paths of the modules that a graph ran in, where its own paths start; '' is the top."""
        found = (module_of_run(run.weights, self.owners) for run in compiled.runs)
        return list(dict.fromkeys(found))

    @property
    def outside_linears(self) -> list[str]:
        """Paths of linear layers that run outside of compiled graphs."""
        weights = (w for g in self.graphs for run in g.runs for w in run.weights.values())
        inside = {self.linears.get(id(w)) for w in weights}
        return [path for path in dict.fromkeys(self.linears.values()) if path not in inside]

    @property
    def outside_bytes(self) -> int:
        """Bytes kept outside of compiled graphs, less those that several graphs count."""
        return self.saved_bytes - sum(g.runs_kept * g.plan.saved_bytes for g in self.graphs)

    @property
    def stock_bytes(self) -> int:
        """Bytes that stock `torch.compile` would keep, with the same graphs."""
        in_graphs = sum(g.runs_kept * (g.plan.stock_bytes or 0) for g in self.graphs)
        return in_graphs + self.outside_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs' code, as JSON-ready data."""
        return {
            "config": {name: _json_ready(x) for name, x in vars(self.config).items()},
            "saved_bytes": self.saved_bytes,
            "stock_bytes": self.stock_bytes,
            "eager_bytes": self.eager_bytes,
            "outside_bytes": self.outside_bytes,
            "parts": list(self.parts),
            "outside_linears": self.outside_linears,
            "graphs": [
                g.plan.to_dict()
                | {"runs": len(g.runs), "modules": self.modules_of(g)}
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
