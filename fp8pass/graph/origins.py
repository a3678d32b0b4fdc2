"""What the values of a forward are computed from: parameters, constants or the data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import ALL_GATHER
from fp8pass.graph.joint import JointFacts


@dataclass(frozen=True)
class Origins:
    """The nodes of a forward that do not depend on the data. All others are activations.

    Attributes:
        weights: the parameters.
        computed: those computed from parameters, whatever buffers, constants and random numbers
            (DropConnect's mask) take part, without a product of two matrices.
        products: those with such a product on the way.
        constants: buffers, tensors that a module has as attributes, and what is computed from these
            or from nothing.
    """

    weights: frozenset[fx.Node]
    computed: set[fx.Node]
    products: set[fx.Node]
    constants: set[fx.Node]

    @classmethod
    def of(cls, g: fx.Graph, facts: JointFacts) -> Origins:
        """Read off a graph, forward and backward in one."""
        computed, products = set(facts.weights), set[fx.Node]()
        constants, noise = set(facts.parameters - facts.weights), set[fx.Node]()
        for node in g.nodes:
            if node.op in ("placeholder", "output"):
                continue
            # A size, as that of an expanded table, says nothing about elements.
            operands = {n for n in node.all_input_nodes if not compat.is_sym_node(n)}
            from_parameters = operands & (computed | products)
            if operands - from_parameters - constants - noise:
                continue
            if from_parameters:
                multiplies = _multiplies_matrices(node) or operands & products
                (products if multiplies else computed).add(node)
            elif kind(node) is Kind.RANDOM or operands & noise:
                noise.add(node)
            else:
                constants.add(node)
        return cls(facts.weights, computed, products, constants)

    def is_activation(self, node: fx.Node) -> bool:
        """Whether a value depends on the data, or is random."""
        return not (node in self.computed or node in self.products or node in self.constants)

    def has_elements_of_parameters(self, node: fx.Node) -> bool:
        """Whether the elements of a matrix are those of parameters, changed, moved or added to.

        A buffer does not become a weight by a learned factor, nor does a product of matrices.
        """
        seen, pending = {node}, [node]
        while pending:
            current = pending.pop()
            if not _multiplies_matrices(current):
                pending += [n for n in current.all_input_nodes if n not in seen]
                seen.update(current.all_input_nodes)
        elements = sum(graph.numel(graph.tensor(n)) for n in seen & self.weights)
        elements += sum(_elements_of_others(n) for n in seen if graph.is_call(n, ALL_GATHER))
        return elements >= graph.numel(graph.tensor(node))


def _elements_of_others(gather: fx.Node) -> int:
    """How many elements of a gathered parameter other ranks have."""
    shard: fx.Node = gather.args[0]  # type: ignore[assignment]
    return graph.numel(graph.tensor(gather)) - graph.numel(graph.tensor(shard))


def _multiplies_matrices(node: fx.Node) -> bool:
    """Whether `node` is a product of two matrices: one with a vector is a part of spectral norm."""
    val = graph.value(node)
    is_product = kind(node) in (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)
    return is_product and (val is None or val.ndim >= 2)
