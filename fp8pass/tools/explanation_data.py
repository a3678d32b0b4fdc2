"""fp8pass's decisions about a model as data, for the tables and the report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config, Simulation
from fp8pass.graph.classify import Kind, kind
from fp8pass.passes.runner import PassRecord
from fp8pass.plan import SavedTensor
from fp8pass.tools.output import Result
from fp8pass.tools.running import find_module_of_run

OPERAND_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@dataclass(repr=False)
class ExplanationData(Result):
    """fp8pass's decisions about a model, as data.

    Attributes:
        config: the configuration that was explained.
        model: name of the model's class.
        parts: paths of the compiled parts; () if the model is compiled as a whole.
        is_compiled: whether the user has compiled the model, or a part of it, with fp8pass.
        saved_bytes: measured bytes that a forward saves for the backward, inside and outside of
            graphs. Shared tensors are counted once, and parameters are not counted.
        eager_bytes: measured bytes that a forward saves without a compiler.
        graphs: the compiled graphs, in order.
        owners: path of each parameter's module, by the parameter's id.
        linears: path of each linear layer that a forward runs, by the ids of its parameters.
        convolutions: number of convolution modules. Convolutions never run in FP8.
        convolution_share: share of the model's parameters that belong to convolutions.
    """

    config: Config
    model: str = ""
    parts: tuple[str, ...] = ()
    is_compiled: bool = True
    saved_bytes: int = 0
    eager_bytes: int = 0
    graphs: list[CompiledGraph] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    linears: dict[int, str] = field(default_factory=dict)
    convolutions: int = 0
    convolution_share: float = 0.0

    def modules_of(self, compiled: CompiledGraph) -> list[str]:
        """Return the paths of the modules that run a graph; '' is the model itself."""
        found = (find_module_of_run(run.weights, self.owners) for run in compiled.runs)
        return list(dict.fromkeys(found))

    @property
    def outside_linears(self) -> list[str]:
        """Paths of linear layers that run outside of compiled graphs."""
        weights = (w for g in self.graphs for run in g.runs for w in run.weights.values())
        inside = {self.linears.get(id(w)) for w in weights}
        return [path for path in dict.fromkeys(self.linears.values()) if path not in inside]

    @property
    def outside_bytes(self) -> int:
        """Measured bytes minus the bytes that the plans of all compiled graphs save.

        A positive difference is the number of bytes saved outside of graphs. The difference is
        negative if several graphs save the same tensors, because the measurement counts such
        tensors only once.
        """
        return self.saved_bytes - sum(g.runs_kept * g.plan.saved_bytes for g in self.graphs)

    @property
    def stock_bytes(self) -> int:
        """Bytes that stock `torch.compile` would save with the same graphs."""
        in_graphs = sum(g.runs_kept * (g.plan.stock_bytes or 0) for g in self.graphs)
        return in_graphs + self.outside_bytes

    @property
    def graph_breaks(self) -> int:
        """Number of places where PyTorch split the model; 0 if only parts are compiled."""
        runs = sum(len(g.runs) for g in self.graphs)
        return 0 if self.parts else max(runs - 1, 0)

    def _summary(self) -> str:
        linears = [y for g in self.graphs for _ in g.runs for y in g.plan.linears]
        rewritten = sum(bool(y.fp8 or y.simulated) for y in linears)
        stock, saved = (x / 2**20 for x in (self.stock_bytes, self.saved_bytes))
        graphs = f"{len(self.graphs)} graph{'s' * (len(self.graphs) != 1)}"
        return (
            f"{self.model}, {graphs}, {rewritten} of {len(linears)} linear layers rewritten, "
            f"{saved:.3g} MiB saved instead of {stock:.3g} MiB; print the explanation to see tables"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the graphs' code, as JSON-ready data."""
        return {
            # JSON has neither infinity nor tuples.
            "config": {
                name: str(x) if x == math.inf else json.loads(json.dumps(x, default=_to_plain))
                for name, x in vars(self.config).items()
            },
            "saved_bytes": self.saved_bytes,
            "stock_bytes": self.stock_bytes,
            "eager_bytes": self.eager_bytes,
            "outside_bytes": self.outside_bytes,
            "parts": list(self.parts),
            "outside_linears": self.outside_linears,
            "graph_breaks": self.graph_breaks,
            "convolutions": self.convolutions,
            "convolution_share": self.convolution_share,
            "graphs": [
                g.plan.to_dict()
                | {"runs": len(g.runs), "modules": self.modules_of(g)}
                | {"pass_seconds": {_name_pass(p): p.seconds for p in g.passes}}
                for g in self.graphs
            ],
        }


def describe_operands(compiled: CompiledGraph) -> list[SavedTensor]:
    """Return a graph's saved tensors. Saved operands of FP8 GEMMs have an FP8 format in the result.

    The plan lists these operands as `exact`, because the graph saves their FP8 data unchanged.
    """
    nodes = {n.name: n for n in compiled.gm.graph.nodes}
    return [_describe_operand(s, nodes[s.name]) for s in compiled.plan.saved]


def _describe_operand(saved: SavedTensor, node: fx.Node) -> SavedTensor:
    if saved.dtype not in OPERAND_FORMATS or kind(node) is not Kind.QUANTIZE:
        return saved
    return replace(saved, saved_as=OPERAND_FORMATS[saved.dtype])


def _to_plain(option: object) -> object:
    """Convert an option that JSON cannot represent."""
    return vars(option) if isinstance(option, Simulation) else f"{option}"


def _name_pass(record: PassRecord) -> str:
    halves = ("forward", "backward")
    return f"{record.graph}.{record.name}" if record.graph in halves else record.name
