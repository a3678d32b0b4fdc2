"""Decide whether the values of a forward depend on parameters, constants or the data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import ALL_GATHER
from fp8pass.graph.joint_facts import JointFacts


@dataclass(frozen=True)
class Origins:
    """The nodes of a forward that do not depend on the data. Other nodes are activations."""

    weights: frozenset[fx.Node]  # the parameters
    # The parameters, and values computed from parameters without a matmul. The computation may also
    # read buffers, constants and random numbers, such as DropConnect's mask.
    computed: set[fx.Node]
    products: set[fx.Node]  # values computed from parameters by at least one matmul
    # Buffers, tensor attributes of modules, and values computed only from them.
    constants: set[fx.Node]

    @classmethod
    def of(cls, g: fx.Graph, facts: JointFacts) -> Origins:
        computed, products = set(facts.weights), set[fx.Node]()
        constants, noise = set(facts.parameters - facts.weights), set[fx.Node]()
        for node in g.nodes:
            if node.op in ("placeholder", "output"):
                continue
            # Symbolic sizes do not count as operands: a table that is expanded to an activation's
            # size is not an activation.
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
        """Whether a matrix has at most as many elements as the parameters that it is computed from.

        This is false for the product of a buffer and a learned factor, which is not a weight.
        Parameters that enter the matrix only through a matmul do not count.
        """
        found = graph.ancestors([node], passes=lambda n: not _multiplies_matrices(n))
        elements = sum(graph.numel(graph.tensor(n)) for n in found & self.weights)
        elements += sum(_elements_of_others(n) for n in found if graph.is_call(n, ALL_GATHER))
        return elements >= graph.numel(graph.tensor(node))


def _elements_of_others(gather: fx.Node) -> int:
    shard: fx.Node = gather.args[0]  # type: ignore[assignment]
    return graph.numel(graph.tensor(gather)) - graph.numel(graph.tensor(shard))


def _multiplies_matrices(node: fx.Node) -> bool:
    """Whether `node` multiplies two matrices. False for matrix-vector products (spectral norm)."""
    val = graph.value(node)
    is_product = kind(node) in (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)
    return is_product and (val is None or val.ndim >= 2)
