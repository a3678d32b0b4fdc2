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
on how much memory is left.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.classify import STATISTICS
from fp8pass.graph.collectives import gathers
from fp8pass.graph.origins import Origins
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def gather_again(gm: fx.GraphModule, ctx: Context) -> None:
    """Mark the gathers that the backward repeats."""
    backward, origins = graph.tangent_dependent(gm.graph), Origins.of(gm.graph, ctx.facts)
    for gather in gathers(gm.graph):
        sent = graph.root(gather.shard)
        if gather.node in backward or sent.target in STATISTICS:
            continue  # a tensor's scale is kept, in four bytes
        of_parameters = gather.shard in origins.computed
        if sent.target is fp8.as_bytes.default and not of_parameters:
            compat.save_always(sent.args[0])  # type: ignore[arg-type]
        elif not of_parameters:
            continue
        compat.recompute_always(gather.node)
        compat.recompute_always(gather.wait)
