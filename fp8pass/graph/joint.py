"""Facts about a joint graph, forward and backward in one, that are known before any pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from fp8pass import compat


@dataclass(frozen=True)
class JointFacts:
    """How long the inputs of a joint graph live, and where its forward ends.

    Attributes:
        parameters: inputs that live through the step whatever we do: parameters and buffers.
        weights: those of them that are an `nn.Parameter`, trained or frozen.
        leaves: other inputs that autograd keeps alive: leaves that require a gradient.
        activations: inputs that require a gradient and are no leaves: outputs of other graphs.
        overwritten: inputs that the forward writes to, such as running statistics. The backward
            cannot read what they were.
        num_fwd_outputs: how many of the graph's outputs belong to the forward.
    """

    parameters: frozenset[fx.Node] = field(default_factory=frozenset)
    weights: frozenset[fx.Node] = field(default_factory=frozenset)
    leaves: frozenset[fx.Node] = field(default_factory=frozenset)
    activations: frozenset[fx.Node] = field(default_factory=frozenset)
    overwritten: frozenset[fx.Node] = field(default_factory=frozenset)
    num_fwd_outputs: int = 0

    def is_free(self, node: fx.Node) -> bool:
        """Whether using `node` in the backward keeps nothing alive that would not be anyway."""
        lives_on = node in self.parameters or node in self.leaves
        return lives_on and node not in self.overwritten

    def map_to_copy(self, copies: Mapping[fx.Node, fx.Node]) -> JointFacts:
        """The same about a copy of the graph."""
        return JointFacts(
            frozenset(copies[n] for n in self.parameters),
            frozenset(copies[n] for n in self.weights),
            frozenset(copies[n] for n in self.leaves),
            frozenset(copies[n] for n in self.activations),
            frozenset(copies[n] for n in self.overwritten),
            self.num_fwd_outputs,
        )


def overwritten_inputs(g: fx.Graph) -> frozenset[fx.Node]:
    """The inputs of a graph that some operator in it writes to."""
    found = set()
    for node in g.nodes:
        if node.op == "call_function" and compat.is_operator(node.target):
            arguments = compat.schema_of(node.target).arguments
            for given, argument in zip(node.args, arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found.add(given)
    return frozenset(n for n in found if isinstance(n, fx.Node) and n.op == "placeholder")


def select_inputs(nodes: Collection[fx.Node], indices: frozenset[int]) -> frozenset[fx.Node]:
    """Those of `nodes` that are the inputs `indices` of the Dynamo graph."""
    return frozenset(n for n in nodes if compat.input_index(n) in indices)
