"""Cut a joint graph into regions. Error rules are derived region by region.

A region is a maximal set of connected pointwise operators, casts, views and reductions of the
forward and the backward. A region ends at GEMMs, attention, inputs, outputs, and at

- a *junction*, a sum of independent values (`x + attention(x)`), or a difference of two values
  (`differences.py`). Without junctions, the residual stream would join all layers;
- *movement* of elements (slices, concatenations, gathers), which does not change relative errors;
- a *discrete* value, such as an index. The backward reads the value from the forward, because
  recomputing the value from an inexact operand may change it completely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from networkx.utils import UnionFind
from torch import fx

from fp8pass import graph
from fp8pass.error_analysis.differences import COPIES, Differences
from fp8pass.error_analysis.signs import KnownSign, infer_signs
from fp8pass.graph.classify import PARTIAL_VIEWS, Kind, kind
from fp8pass.graph.nodes import aten
from fp8pass.graph.patterns import SUM_OPERATORS, filled_with
from fp8pass.graph.pointwise import POINTWISE

DERIVABLE = (Kind.POINTWISE, Kind.REDUCTION, Kind.VIEW)

FORMULAS = {op: row.formula for op, row in POINTWISE.items() if row.formula is not None}

COMPARISONS = {
    *(aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar),
    *(aten.gt.Tensor, aten.ge.Tensor, aten.lt.Tensor, aten.le.Tensor),
}

# Results of these kinds are not constants, even if all operands are constants.
ORIGINS = (Kind.INPUT, Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION, Kind.OTHER, Kind.COLLECTIVE)


class Role(Enum):
    VALUE = "value"  # computed in the forward: may be stored inexactly
    GRADIENT = "gradient"  # depends on a gradient from outside
    CONSTANT = "constant"  # parameters, masks, tables: always exact


@dataclass(eq=False)
class Region:
    """One region: its nodes, its inputs and its outputs."""

    nodes: list[fx.Node] = field(default_factory=list)  # In the order of the graph.
    # Nodes outside the region that members use, with their roles.
    inputs: dict[fx.Node, Role] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    backward: set[fx.Node] = field(default_factory=set)
    nonpositive: set[fx.Node] = field(default_factory=set)  # the inputs without positive elements

    @property
    def values(self) -> list[fx.Node]:
        return [n for n, role in self.inputs.items() if role is Role.VALUE]

    @property
    def cached(self) -> list[fx.Node]:
        """The forward members that the backward reads, which Case 2 of AGoQ also stores.

        Values that no forward operator uses are skipped, because the backward computes them.
        """
        members, forward = set(self.nodes), set[fx.Node]()
        for node in reversed(self.nodes):
            used = any(u in forward or u not in members for u in node.users)
            if used and node not in self.backward:
                forward.add(node)
        return [
            n for n in self.nodes if n in forward and any(u in members - forward for u in n.users)
        ]

    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for regions of equal structure and shapes."""
        number = {n: i for i, n in enumerate((*self.inputs, *self.nodes))}
        roles = tuple(
            (role, graph.shape_text(graph.tensor(n)), filled_with(n), n in self.nonpositive)
            for n, role in self.inputs.items()
        )
        members = tuple(
            (
                n.target,
                repr(fx.map_arg((n.args, n.kwargs), lambda x: ("node", number.get(x)))),
                graph.shape_text(val) if (val := graph.value(n)) is not None else "",
                n in self.backward,
                n in self.outputs,
            )
            for n in self.nodes
        )
        return roles, members


def is_movement(node: fx.Node) -> bool:
    return kind(node) is Kind.MOVEMENT or graph.operator_of(node).target in PARTIAL_VIEWS


def _has_formula(node: fx.Node) -> bool:
    """Whether a region may contain the node. Pointwise operators without a formula end a region."""
    return kind(node) is not Kind.POINTWISE or node.target in FORMULAS.keys() | COPIES


class Splitter:
    """Assigns the nodes of a joint graph to regions.

    Args:
        g: the joint graph.
        backward: the nodes that depend on a gradient from outside.
        exact: inputs that are always exact: parameters, tables, data.

    Attributes:
        constants: after `split`, the nodes computed from `exact` inputs and discrete values alone.
        discrete: after `split`, discrete values, such as an index computed from floats.
        junctions: after `split`, the sums, differences and movements at which regions end.
        differences: after `split`, the nodes that must not be computed from inexact values.
    """

    def __init__(self, g: fx.Graph, backward: set[fx.Node], exact: set[fx.Node]) -> None:
        self.graph, self.backward, self.exact = g, backward, exact
        self.junctions: set[fx.Node] = set()
        self.constants: set[fx.Node] = set()
        self.discrete: set[fx.Node] = set()
        signs = infer_signs(g)
        self.differences = Differences(self.constants, signs)
        self._nonpositive = {n for n, sign in signs.items() if KnownSign.NONPOSITIVE in sign}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self._members: dict[fx.Node, None] = {}

    def split(self) -> list[Region]:
        for node in self.graph.nodes:
            if node.op != "output":
                self._place(node)
        connected = UnionFind(self._members)
        for node in self._members:
            connected.union(node, *(n for n in node.all_input_nodes if n in self._members))
        regions: dict[fx.Node, Region] = {}
        for node in self._members:
            self._add(regions.setdefault(connected[node], Region()), node)
        return list(regions.values())

    def _place(self, node: fx.Node) -> None:
        sources = frozenset[fx.Node]().union(*(self._sources[n] for n in node.all_input_nodes))
        junction = is_movement(node) or self._is_junction(node)
        is_origin = kind(node) in ORIGINS or node.target is aten.embedding.default
        if node in self.exact or not (sources or is_origin):
            self.constants.add(node)
            self._sources[node] = frozenset()
        elif self._is_discrete(node):
            self.discrete.add(node)
            self._sources[node] = frozenset()
        elif junction or kind(node) not in DERIVABLE or not _has_formula(node):
            self._sources[node] = frozenset((node,))
        else:
            self._sources[node] = sources
            self._members[node] = None
        if junction:
            self.junctions.add(node)

    def _is_discrete(self, node: fx.Node) -> bool:
        """Whether a forward node has integers or booleans that no formula of a region computes."""
        if node in self.backward or graph.value(node) is None or graph.is_float(node):
            return False
        derivable = kind(node) in (Kind.POINTWISE, Kind.VIEW) and not is_movement(node)
        rounds = (
            any(graph.is_float(n) for n in node.all_input_nodes) and node.target not in COMPARISONS
        )
        return not derivable or not _has_formula(node) or rounds

    def _is_junction(self, node: fx.Node) -> bool:
        if node not in self.backward and self.differences.is_of_equals(node):
            return True
        operands = node.all_input_nodes
        if node.target not in SUM_OPERATORS or len(operands) != 2:
            return False
        first, second = (self._sources[n] for n in operands)
        return bool(first and second) and not first & second

    def _add(self, region: Region, node: fx.Node) -> None:
        region.nodes.append(node)
        if node in self.backward:
            region.backward.add(node)
        for operand in node.all_input_nodes:
            if operand not in self._members and graph.value(operand) is not None:
                region.inputs[operand] = self._role(operand)
                if operand in self._nonpositive:
                    region.nonpositive.add(operand)
        if graph.is_float(node) and any(u not in self._members for u in node.users):
            region.outputs.append(node)

    def _role(self, node: fx.Node) -> Role:
        if node in self.constants or node in self.discrete:
            return Role.CONSTANT
        return Role.GRADIENT if node in self.backward else Role.VALUE
