"""Gather parameters and codes again in the backward, so that nothing gathered is kept.

    before   w = wait_tensor(all_gather(W))        w is kept, or whatever follows from it
    after    w = wait_tensor(all_gather(W))        the shard W is there anyway
             w' = wait_tensor(all_gather(W))       in the backward

This pass only marks gathers; the plan follows. What is marked:

- Gathers of what is computed from parameters alone (SimpleFSDP), in any precision.
- Gathers of codes (`gather_codes`): of an activation (sequence parallel) this rank keeps the codes
  that it sends, and no more.

Other collectives run once, as in PyTorch's own partitioner. All ranks have the same graph, and
whether something is gathered again depends on nothing that varies between them: not on sizes, nor
on how much memory is left. So no copy of what was gathered may be kept either, in any layout.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.classify import AMAX_OPERATORS, VIEWS
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR, Gather, find_gathers
from fp8pass.graph.nodes import aten
from fp8pass.graph.origins import Origins
from fp8pass.graph.patterns import CASTS
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# What has the elements of a gathered tensor.
COPIES = {
    *(WAIT_TENSOR, ALL_GATHER, aten.cat.default, aten.clone.default, *VIEWS, *CASTS),
    *(fp8.quantize.default, fp8.as_codes.default, fp8.transpose.default),
}


def gather_again(gm: fx.GraphModule, ctx: Context) -> None:
    """Mark the gathers that the backward repeats."""
    found = list(find_gathers(gm.graph))
    if not found:
        return  # as on one rank, where nothing more has to be known of the graph
    backward, origins = graph.tangent_dependent(gm.graph), Origins.of(gm.graph, ctx.facts)
    for gather in found:
        sent = graph.skip_reshapes(gather.shard)
        if gather.node in backward or sent.target in AMAX_OPERATORS:
            continue  # what a scale follows from: the scale of a tensor is kept, in four bytes
        if gather.shard in origins.computed:
            _repeat(gather, backward)
        elif sent.target is fp8.as_bytes.default:
            _keep_sent(sent.args[0])  # type: ignore[arg-type]
            _repeat(gather, backward)


def _repeat(gather: Gather, backward: set[fx.Node]) -> None:
    """Have the backward gather again, and keep no copy."""
    pending = [gather.node]
    while pending:
        node = pending.pop()
        compat.recompute_always(node)
        pending += [n for n in node.users if n.target in COPIES and n not in backward]
        pending += [n for n in node.users if graph.is_getitem(n)]


def _keep_sent(codes: fx.Node) -> None:
    """Have the backward keep codes, unless a checkpointed region computes what they are of."""
    if not compat.must_recompute(graph.skip_views_and_casts(codes.args[0])):  # type: ignore[arg-type]
        compat.save_always(codes)
