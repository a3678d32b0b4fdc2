"""Find the forward values that the backward needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.costs import can_run_again
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.reasons import SavedReason


@dataclass(frozen=True)
class Needs:
    """The forward values that the backward needs."""

    values: list[fx.Node]  # all nodes of the joint graph that do not depend on a gradient, in order
    all: set[fx.Node] = field(default_factory=set)
    # Maps the values that the backward needs exactly to the reasons.
    exact: dict[fx.Node, str] = field(default_factory=dict)

    def relevant_values(self) -> list[fx.Node]:
        return find_relevant(self.values, self.all, can_run_again)


def find_relevant(
    values: list[fx.Node], needed: Iterable[fx.Node], may_run_again: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Return needed values, and the values from which they may be recomputed, in order."""
    found = set(needed)
    for node in reversed(values):
        if node in found and may_run_again(node):
            found.update(node.all_input_nodes)
    return [n for n in values if n in found]


def find_needs(choices: FormatChoices) -> Needs:
    g, backward = choices.rules.graph, choices.rules.backward
    needs = Needs([n for n in g.nodes if n not in backward and n.op != "output"])
    for gradient in graph.outputs(g)[choices.facts.num_fwd_outputs :]:
        if isinstance(gradient, fx.Node) and gradient not in backward:
            needs.all.add(gradient)
            needs.exact[gradient] = SavedReason.GRADIENT
    for node in g.nodes:
        if node in backward and node.op != "output":
            needs.all.update(n for n in node.all_input_nodes if n not in backward)
    for node in needs.values:
        used = node in needs.all or choices.must_be_available(node)
        if used and (reason := choices.why_exact(node)):
            needs.exact.setdefault(node, reason)
    return needs
