"""Drop the logits that a model returns beside its loss, so that the output head can run in chunks.

Models of Hugging Face return logits together with the loss. Training needs only the loss, but a
returned tensor must exist as a whole:

    before   logits = linear(x, W);  loss = cross_entropy(logits, y);  return loss, logits
    after    logits = linear(x, W);  loss = cross_entropy(logits, y);  return loss, placeholder

The placeholder has the shape and dtype of the logits, and one NaN in memory. A program that uses
the logits gets NaN instead of wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx
from torch.nn import functional as F

LOSSES = (F.cross_entropy, F.nll_loss, F.log_softmax)
# Operators between the GEMM of a head and its loss. Their first tensor holds the logits.
BETWEEN = {
    *("float", "to", "type", "view", "reshape", "flatten", "contiguous", "getitem", "mul"),
    *("truediv", "tanh", "log_softmax"),
}


def drop_logits(gm: fx.GraphModule) -> None:
    """Replace logits among the outputs of a Dynamo graph by placeholders, if the graph has a loss.

    The graph is changed in place.
    """
    output = next(n for n in gm.graph.nodes if n.op == "output")
    logits = {x for n in gm.graph.nodes if n.target in LOSSES for x in _logits_of(n)}
    returned = {n for n in logits if output in n.users}
    for node in returned:
        with gm.graph.inserting_before(output):
            number = gm.graph.call_method("new_full", (node, (), math.nan))
            placeholder = gm.graph.call_method("expand_as", (number, node))
        output.replace_input_with(node, placeholder)
    if returned:
        gm.recompile()


def _logits_of(loss: fx.Node) -> Iterator[fx.Node]:
    """Yield the values between a loss and the GEMM that computes its logits, and the GEMM."""
    node = loss.args[0] if loss.args else loss.kwargs.get("input")
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        yield node
        name = node.target if isinstance(node.target, str) else node.target.__name__
        if name not in BETWEEN:
            return
        node = next((x for x in node.args if isinstance(x, fx.Node)), None)
