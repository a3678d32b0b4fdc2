"""Gather parameters and FP8 data again in the backward, so that no gathered tensor is saved.

    before   w = wait_tensor(all_gather(W))        saved: w, or a tensor computed from w
    after    w = wait_tensor(all_gather(W))        saved: the shard W
             w' = wait_tensor(all_gather(W))       in the backward

This pass marks gathers of tensors that are computed from parameters alone (SimpleFSDP), and gathers
of FP8 data (`gather_quantized`). `materialize_plan` emits the recomputation.

The choice does not depend on anything that may differ between ranks, such as sizes or free memory,
because all ranks must run the same collectives. So gathered tensors are never saved.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.classify import AMAX_OPERATORS, VIEWS
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR, find_gathers
from fp8pass.graph.nodes import aten
from fp8pass.graph.origins import Origins
from fp8pass.graph.patterns import CASTS
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# Operators that only copy, convert or rearrange the elements of their operand.
CARRIERS = {
    *(WAIT_TENSOR, ALL_GATHER, aten.cat.default, aten.clone.default, *VIEWS, *CASTS),
    *(fp8.quantize.default, fp8.as_codes.default, fp8.transpose.default),
}


def repeat_gathers(gm: fx.GraphModule, ctx: Context) -> None:
    found = list(find_gathers(gm.graph))
    if not found:
        return  # graphs without gathers skip the slow analysis below
    backward, origins = graph.tangent_dependent(gm.graph), Origins.of(gm.graph, ctx.facts)
    for gather in found:
        sent = graph.skip_reshapes(gather.shard)
        if gather.node in backward or sent.target in AMAX_OPERATORS:
            continue  # saving the scale of these amaxes is cheaper: four bytes for a tensor
        if gather.shard in origins.computed:
            _recompute_copies(gather.node, backward)
        elif sent.target is fp8.as_bytes.default:
            _save_sent(sent.args[0])  # type: ignore[arg-type]
            _recompute_copies(gather.node, backward)


def _recompute_copies(gather: fx.Node, backward: set[fx.Node]) -> None:
    pending = [gather]
    while pending:
        node = pending.pop()
        compat.recompute_always(node)
        pending += [n for n in node.users if n.target in CARRIERS and n not in backward]
        pending += [n for n in node.users if graph.is_getitem(n)]


def _save_sent(data: fx.Node) -> None:
    """Save FP8 data, except in a checkpointed region, which recomputes it."""
    if not compat.must_recompute(graph.skip_views_and_casts(data.args[0])):  # type: ignore[arg-type]
        compat.save_always(data)
