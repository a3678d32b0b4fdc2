"""The context that every pass gets together with the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fp8pass.activation_memory.decision import Decision
from fp8pass.config import Config
from fp8pass.graph.joint import JointFacts
from fp8pass.plan import Plan


@dataclass(frozen=True)
class Requests:
    """Optional contents of the plan. `explain` shows them, and computing them takes time.

    Attributes:
        frontier: the trade-off between memory and time, over all budgets.
        least: the smallest memory budget.
        rules: a summary of the error rules.
    """

    frontier: bool = False
    least: bool = False
    rules: bool = False


@dataclass
class Context:
    """The state of one compilation of one graph, which passes read and write.

    Attributes:
        config: the user's choices.
        facts: facts about the joint graph; empty for forward and backward graphs.
        requests: optional contents of the plan.
        plan: the decisions so far, which `explain` shows.
        decisions: how each forward value reaches the backward; set by `plan_saved_values`.
        saved: the nodes that cross into the backward, in order; set by `materialize_plan`.
    """

    config: Config
    facts: JointFacts = field(default_factory=JointFacts)
    requests: Requests = field(default_factory=Requests)
    plan: Plan = field(default_factory=Plan)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    saved: list[fx.Node] = field(default_factory=list)
