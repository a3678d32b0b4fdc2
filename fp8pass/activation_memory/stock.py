"""The bytes that PyTorch's own partitioner would keep, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.joint import JointFacts


def stock_saved_bytes(gm: fx.GraphModule, joint_inputs: Sequence[object], facts: JointFacts) -> int:
    """Bytes that PyTorch's partitioner keeps of this graph, counted like `Plan.saved_bytes`."""
    primals = [n for n in gm.graph.nodes if compat.is_primal(n)]
    forward, _ = compat.stock_partition(
        graph.copy_module(gm),
        joint_inputs,
        num_fwd_outputs=facts.num_fwd_outputs,
        static_lifetime_input_indices=[i for i, n in enumerate(primals) if n in facts.parameters],
    )
    free = {n.name for n in facts.parameters | facts.leaves}
    saved = graph.outputs(forward.graph)[facts.num_fwd_outputs :]
    return sum(graph.nbytes(n) for n in saved if isinstance(n, fx.Node) and n.name not in free)
