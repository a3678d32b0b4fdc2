"""Run PyTorch's own partitioner on a joint graph: compare its saved bytes, or take its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.decision import Decision, Decisions, decide_free
from fp8pass.activation_memory.format_choices import CHEAP_TO_RECOMPUTE
from fp8pass.activation_memory.needs import Needs
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.joint_facts import JointFacts


@dataclass(frozen=True)
class StockPartition:
    halves: tuple[fx.GraphModule, fx.GraphModule]  # the forward and the backward
    # Bytes of each saved tensor, by name. Parameters and leaves are left out.
    saved: dict[str, int]
    # The names of all values that the forward graph passes to the backward graph.
    crossing: frozenset[str]

    @property
    def bytes(self) -> int:
        return sum(self.saved.values())


def partition_stock(
    gm: fx.GraphModule, joint_inputs: Sequence[object], facts: JointFacts
) -> StockPartition:
    """Partition a copy of a joint graph as stock `torch.compile` does."""
    primals = [n for n in gm.graph.nodes if compat.is_primal(n)]
    forward, backward = compat.stock_partition(
        graph.copy_module(gm),
        joint_inputs,
        num_fwd_outputs=facts.num_fwd_outputs,
        static_lifetime_input_indices=[i for i, n in enumerate(primals) if n in facts.parameters],
    )
    free = {n.name for n in facts.parameters | facts.leaves}
    saved = graph.outputs(forward.graph)[facts.num_fwd_outputs :]
    sizes = {n.name: graph.nbytes(n) for n in saved if isinstance(n, fx.Node)}
    counted = {name: size for name, size in sizes.items() if name not in free}
    return StockPartition((forward, backward), counted, frozenset(sizes))


def plan_as_stock(stock: StockPartition, facts: JointFacts, needs: Needs, reason: str) -> Decisions:
    """Return the plan of stock `torch.compile`, with `reason` for its saved values."""

    def decide(node: fx.Node) -> Decision:
        if facts.is_free(node):
            return decide_free(node, facts)
        is_saved = node.name in stock.crossing or node.op == "placeholder"
        return Decision(EXACT, 0, reason) if is_saved else CHEAP_TO_RECOMPUTE

    return {node: decide(node) for node in needs.values}
