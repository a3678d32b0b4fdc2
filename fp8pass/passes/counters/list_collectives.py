"""Write into the plan what ranks send each other, and why it is not in 8 bits.

Runs when the graph is as it will be cut, and changes nothing in it.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.graph.collectives import ALL_GATHER, starts_communication
from fp8pass.graph.nodes import tensor
from fp8pass.graph.tags import WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context
from fp8pass.plan import Collective


def list_collectives(gm: fx.GraphModule, ctx: Context) -> None:
    """Add all collectives to the plan, in order."""
    backward = _in_backward(gm.graph)
    for node in gm.graph.nodes:
        if not starts_communication(node):
            continue
        sent = [n for n in node.all_input_nodes if graph.value(n) is not None]
        ctx.plan.collectives.append(
            Collective(
                module=graph.module_path(node),
                op=graph.operator_name(node).removeprefix("_c10d_functional."),
                half="backward" if node in backward else "forward",
                shape=" ".join(graph.shape_text(tensor(n)) for n in sent),
                dtype=" ".join(graph.dtype_text(tensor(n).dtype) for n in sent),
                bytes=sum(map(graph.nbytes, sent)),
                reason=_why_wide(node),
            )
        )


def _in_backward(g: fx.Graph) -> set[fx.Node]:
    """What runs in the backward: what needs a gradient, and what was put there for it."""
    tagged = (n for n in g.nodes if n.meta.get("partitioner_tag") == "is_backward")
    return graph.tangent_dependent(g) | set(tagged)


def _why_wide(node: fx.Node) -> str:
    if node.target is ALL_GATHER:
        return str(node.meta.get(WHY_NOT_QUANTIZED, ""))
    return "sums are not rounded"
