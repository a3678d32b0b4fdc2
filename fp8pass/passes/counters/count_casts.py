"""Write into the plan what FP8 GEMMs compute, and what the casts that feed them move.

Both decide whether FP8 makes a graph faster (`progress/gain.py`). Runs when the graph is as it will
be cut, and changes nothing in it.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import graph
from fp8pass.dialect.quantization import parse_block
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.flops import flops, is_fp8_gemm
from fp8pass.graph.nodes import tensor
from fp8pass.graph.patterns import is_quantized_operand
from fp8pass.hardware import Work
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# What BF16 GEMMs do without: largest magnitudes, codes, and their transposes.
CASTS = (
    fp8.segment_amax.default,
    fp8.transpose.default,
    fp8.transpose_segments.default,
    fp8.joined.default,
)


def count_casts(gm: fx.GraphModule, ctx: Context) -> None:
    """Count operations and bytes of one run, unless GEMMs were in FP32, which is slower anyway."""
    products = [n for n in gm.graph.nodes if is_fp8_gemm(n)]
    if all(tensor(n).dtype is not torch.float32 for n in products):
        ctx.plan.fp8_work = fp8_work(gm.graph)


def fp8_work(g: fx.Graph) -> Work:
    """The FP8 GEMMs of a graph, and the casts of their operands, as if each were a kernel."""
    total = Work()
    for node in g.nodes:
        if is_fp8_gemm(node):
            total += Work(fp8_flops=flops(node))
        elif _is_cast(node):
            total += Work(bytes=graph.nbytes(node) + sum(map(graph.nbytes, node.all_input_nodes)))
    for chunks in chunks_of(g):
        total += fp8_work(chunks.body.graph).times(chunks.count)
    return total


def _is_cast(node: fx.Node) -> bool:
    """Whether an operator quantizes or lays out operands, which BF16 GEMMs take as they are."""
    if graph.is_call(node, fp8.amax.default):
        return not parse_block(str(node.args[1]))[1]
    return node.target in CASTS or is_quantized_operand(node)
