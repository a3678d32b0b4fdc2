"""Linear layers in graphs that `torch.cond`, `scan`, `while_loop` and `map` call.

The passes do not rewrite these graphs, so their layers stay in high precision.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.linear_layers import Layer, find_layers


def layers_in_called_graphs(gm: fx.GraphModule, facts: JointFacts) -> Iterator[tuple[str, Layer]]:
    """Yield the layers in graphs that the forward calls, each after the name of the operator."""
    backward = graph.tangent_dependent(gm.graph)
    for call in gm.graph.nodes:
        if call in backward or not compat.calls_graphs(call):
            continue
        operands = [n for n in call.all_input_nodes if n.op != "get_attr"]
        for reference in (n for n in call.all_input_nodes if n.op == "get_attr"):
            called = getattr(gm, reference.target)
            if isinstance(called, fx.GraphModule):
                # The inputs of the called graph are the last operands of the call.
                inputs = [n for n in called.graph.nodes if n.op == "placeholder"]
                pairs = zip(reversed(inputs), reversed(operands), strict=False)
                for layer in find_layers(called.graph, facts.map_to_subgraph(pairs)):
                    yield graph.operator_name(call), layer
