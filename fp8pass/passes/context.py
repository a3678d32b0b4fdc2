"""What every pass is given besides the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx

from fp8pass.config import Config
from fp8pass.plan import Plan

if TYPE_CHECKING:
    from fp8pass.passes.decision import Decision


@dataclass
class Context:
    """One compilation of one joint graph.

    Attributes:
        config: the user's choices.
        parameters: inputs that live through the step whatever we do: parameters and buffers.
        held: other inputs that autograd keeps alive: leaves that require a gradient.
        activations: inputs that require a gradient and are no leaves: outputs of other graphs.
        num_fwd_outputs: how many of the joint graph's outputs belong to the forward.
        extras: what `explain` asked for besides: `frontier`, to trace memory against time, `rules`,
            to summarize the error rules.
        plan: what has been decided so far, for people; passes add to it.
        decisions: how each forward value reaches the backward, by `save_plan`.
        saved: the nodes that cross into the backward, in order, by `materialize`.
    """

    config: Config
    parameters: frozenset[fx.Node]
    held: frozenset[fx.Node]
    activations: frozenset[fx.Node]
    num_fwd_outputs: int
    extras: frozenset[str] = frozenset()
    plan: Plan = field(default_factory=Plan)
    decisions: dict[fx.Node, Decision] = field(default_factory=dict)
    saved: list[fx.Node] = field(default_factory=list)

    def is_free(self, node: fx.Node) -> bool:
        """Whether using `node` in the backward keeps nothing alive that would not be anyway."""
        return node in self.parameters or node in self.held
