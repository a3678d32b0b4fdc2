"""Facts about the inputs of a joint graph (a graph of forward and backward)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fp8pass import compat


@dataclass(frozen=True)
class JointFacts:
    """Which inputs of a joint graph stay alive, and how many outputs the forward has."""

    # Parameters and buffers, which stay alive throughout the step.
    parameters: frozenset[fx.Node] = field(default_factory=frozenset)
    # The nodes of `parameters` that are an `nn.Parameter`, trained or frozen.
    weights: frozenset[fx.Node] = field(default_factory=frozenset)
    # Leaf tensors that require a gradient and are not parameters. Autograd keeps leaves alive.
    leaves: frozenset[fx.Node] = field(default_factory=frozenset)
    # Inputs that require a gradient and are not leaves. Another graph computed them, e.g. before a
    # graph break.
    activations: frozenset[fx.Node] = field(default_factory=frozenset)
    # Inputs that the forward writes to, such as running statistics. The backward cannot read their
    # old values.
    overwritten: frozenset[fx.Node] = field(default_factory=frozenset)
    # The number of outputs of the forward, which come first among the outputs of the joint graph.
    num_fwd_outputs: int = 0

    def is_free(self, node: fx.Node) -> bool:
        """Whether saving the input `node` for backward is free, because it stays alive anyway."""
        is_alive = node in self.parameters or node in self.leaves
        return is_alive and node not in self.overwritten

    def map_to_copy(self, copies: Mapping[fx.Node, fx.Node]) -> JointFacts:
        sets: dict[str, Any] = {
            name: frozenset(copies[n] for n in nodes)
            for name, nodes in vars(self).items()
            if name != "num_fwd_outputs"
        }
        return replace(self, **sets)

    def map_to_subgraph(self, inputs: Iterable[tuple[fx.Node, fx.Node]]) -> JointFacts:
        """Return which placeholders of a subgraph are parameters, given (placeholder, argument)
        pairs.
        """
        pairs = list(inputs)
        return JointFacts(
            parameters=frozenset(n for n, value in pairs if value in self.parameters),
            weights=frozenset(n for n, value in pairs if value in self.weights),
        )


def overwritten_inputs(g: fx.Graph) -> frozenset[fx.Node]:
    found = set()
    for node in g.nodes:
        if node.op == "call_function" and compat.is_operator(node.target):
            arguments = compat.schema_of(node.target).arguments
            for operand, argument in zip(node.args, arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found.add(operand)
    return frozenset(n for n in found if isinstance(n, fx.Node) and n.op == "placeholder")


def select_inputs(nodes: Collection[fx.Node], indices: frozenset[int]) -> frozenset[fx.Node]:
    return frozenset(n for n in nodes if compat.input_index(n) in indices)
