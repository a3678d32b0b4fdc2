"""Add the collectives of a graph to the plan."""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.graph.collectives import ALL_GATHER, ALL_TO_ALL, starts_communication
from fp8pass.graph.nodes import tensor
from fp8pass.graph.tags import WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context
from fp8pass.plan import Collective


def describe_graph(gm: fx.GraphModule, ctx: Context) -> None:
    """Add all collectives, in graph order, to the plan."""
    backward = graph.tangent_dependent(gm.graph)
    ctx.plan.collectives += [
        _describe(node, backward) for node in gm.graph.nodes if starts_communication(node)
    ]


def _describe(collective: fx.Node, backward: set[fx.Node]) -> Collective:
    sent = [n for n in collective.all_input_nodes if graph.value(n) is not None]
    is_backward = collective.meta.get("partitioner_tag") == "is_backward"
    moves_data = collective.target in (ALL_GATHER, ALL_TO_ALL)
    return Collective(
        module=graph.module_path(collective),
        op=graph.operator_name(collective).removeprefix("_c10d_functional."),
        half="backward" if is_backward or collective in backward else "forward",
        shape=" ".join(graph.shape_text(tensor(n)) for n in sent),
        dtype=" ".join(graph.dtype_text(tensor(n).dtype) for n in sent),
        bytes=sum(map(graph.nbytes, sent)),
        reason=collective.meta.get(WHY_NOT_QUANTIZED, "" if moves_data else "sums are not rounded"),
    )
