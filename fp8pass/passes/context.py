"""The context that every pass receives together with the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fp8pass.activation_memory.decision import Decision
from fp8pass.config import Config
from fp8pass.graph.joint_facts import JointFacts
from fp8pass.plan import Plan


@dataclass(frozen=True)
class Requests:
    """The optional parts of the plan to compute. They take time, so only reports request them.

    Attributes:
        frontier: the costs of the plans for other memory budgets.
        least: the smallest memory budget that can be met.
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
        facts: facts about the graph before any pass; empty for the lowering passes.
        requests: the optional parts of the plan to compute.
        plan: the decisions so far, which `explain` shows.
        decisions: how the backward gets each forward value: saved, in which format, or recomputed;
            set by `plan_saved_values`.
        saved: the forward nodes whose results the backward reads, in order; set by
            `materialize_plan`.
    """

    config: Config
    facts: JointFacts = field(default_factory=JointFacts)
    requests: Requests = field(default_factory=Requests)
    plan: Plan = field(default_factory=Plan)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    saved: list[fx.Node] = field(default_factory=list)
