"""The context that every pass receives together with the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fp8pass.activation_memory.decision import Decision
from fp8pass.activation_memory.stock import StockPartition
from fp8pass.config import Config
from fp8pass.graph.joint_facts import JointFacts
from fp8pass.plan import Plan


@dataclass(frozen=True)
class Requests:
    """Requests of tools: optional parts of the plan, which take time, and graphs to compare."""

    frontier: bool = False  # the costs of the plans for other memory budgets
    least: bool = False  # the smallest memory budget that can be met
    rules: bool = False  # a summary of the error rules
    separate_adapters: bool = False  # one GEMM for each adapter, as in the original graph


@dataclass
class Context:
    """The state of one compilation of one graph, which passes read and write."""

    config: Config
    # Facts about the graph before any pass; empty for the lowering passes.
    facts: JointFacts = field(default_factory=JointFacts)
    requests: Requests = field(default_factory=Requests)
    plan: Plan = field(default_factory=Plan)
    # The time that FP8 GEMMs save in a step, in seconds; infinite if it is not known.
    spare_seconds: float = 0.0
    # Why faster kernels would not make a step faster, or ''.
    launch_limit: str = ""
    # PyTorch's partition of the graph, if the graph uses it; set by `plan_saved_values`.
    stock: StockPartition | None = None
    # How the backward gets each forward value: saved, in which format, or recomputed; set by
    # `plan_saved_values`.
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    # The forward nodes whose results the backward reads, in order; set by `materialize_plan`.
    saved: list[fx.Node] = field(default_factory=list)
