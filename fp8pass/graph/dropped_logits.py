"""Drop the logits that a model returns alongside its loss. The output head can then run in chunks.

Chunks never hold the logits of all tokens, so the model cannot return them:

    before   logits = linear(x, W);  loss = cross_entropy(logits, y);  return loss, logits
    after    logits = linear(x, W);  loss = cross_entropy(logits, y);  return loss, placeholder

The placeholder is one NaN in memory, in the dtype of the logits and expanded to their shape. A
program that uses the logits gets NaN instead of wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

LOSSES = (F.cross_entropy, F.nll_loss, F.log_softmax, torch.log_softmax, "log_softmax")
# Operators that may lie between the GEMM of an output head and the loss. Their first tensor operand
# holds the logits.
BETWEEN = {
    *("float", "to", "type", "view", "reshape", "flatten", "contiguous", "getitem", "mul"),
    *("truediv", "tanh"),
}


def drop_logits(gm: fx.GraphModule) -> None:
    """Replace logits among the outputs of a Dynamo graph by placeholders, if the graph has a loss.

    The graph is changed in place.
    """
    output = gm.graph.output_node()
    returned = find_returned_logits(gm)
    for node in returned:
        with gm.graph.inserting_before(output):
            number = gm.graph.call_method("new_full", (node, (), math.nan))
            placeholder = gm.graph.call_method("expand_as", (number, node))
        output.replace_input_with(node, placeholder)
    if returned:
        gm.recompile()


def find_returned_logits(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the logits among the outputs of a Dynamo graph that computes a loss of them.

    Logits may be cast before they are returned, e.g. by accelerate with mixed precision.
    """
    losses = [n for n in gm.graph.nodes if n.target in LOSSES]
    inputs = [n.args[0] if n.args else n.kwargs.get("input") for n in losses]
    logits = {x for node in inputs for x in _path_to_gemm(node)}
    outputs = gm.graph.output_node().all_input_nodes
    return [n for n in outputs if not logits.isdisjoint(_path_to_gemm(n))]


def _path_to_gemm(node: Any) -> Iterator[fx.Node]:
    """Yield `node` and the values that it was cast or viewed from, up to the result of a GEMM."""
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        yield node
        if getattr(node.target, "__name__", node.target) not in BETWEEN:
            return
        node = next((x for x in node.args if isinstance(x, fx.Node)), None)
