"""Linear layers in graphs that an operator calls: `torch.cond`, `scan`, `while_loop`, `map`.

No pass rewrites these graphs, so that their layers stay in high precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.joint import JointFacts
from fp8pass.graph.linear_layers import Layer, find_layers


def layers_in_called_graphs(gm: fx.GraphModule, facts: JointFacts) -> Iterator[tuple[str, Layer]]:
    """The layers that the forward of a joint graph calls, with the name of the operator."""
    backward = graph.tangent_dependent(gm.graph)
    for call in gm.graph.nodes:
        if call in backward or not compat.calls_graphs(call):
            continue
        operands = [n for n in call.all_input_nodes if n.op != "get_attr"]
        for reference in (n for n in call.all_input_nodes if n.op == "get_attr"):
            called = getattr(gm, reference.target)
            if isinstance(called, fx.GraphModule):
                inner = _facts_of(called, operands, facts)
                for layer in find_layers(called.graph, inner):
                    yield graph.operator_name(call), layer


def _facts_of(called: fx.GraphModule, operands: list[Any], facts: JointFacts) -> JointFacts:
    """What is known of the inputs of a called graph: they are the last operands of the call."""
    inputs = [n for n in called.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(reversed(inputs), reversed(operands), strict=False))
    return JointFacts(
        parameters=frozenset(n for n, operand in pairs if operand in facts.parameters),
        weights=frozenset(n for n, operand in pairs if operand in facts.weights),
    )
