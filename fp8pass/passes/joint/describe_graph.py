"""Add the collectives of a graph, and the work of its FP8 GEMMs and casts, to the plan."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import graph
from fp8pass.dialect.quantization import parse_block
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.collectives import ALL_GATHER, starts_communication
from fp8pass.graph.flops import flops, is_fp8_gemm
from fp8pass.graph.nodes import tensor
from fp8pass.graph.patterns import is_quantized_operand
from fp8pass.graph.tags import WHY_NOT_QUANTIZED
from fp8pass.hardware import Work
from fp8pass.passes.context import Context
from fp8pass.plan import Collective

fp8 = torch.ops.fp8pass

# `amax` and `quantize` also serve saved tensors, so `_is_cast` checks their arguments.
GEMM_CASTS = (
    fp8.segment_amax.default,
    fp8.transpose.default,
    fp8.transpose_segments.default,
    fp8.joined.default,
)


def describe_graph(gm: fx.GraphModule, ctx: Context) -> None:
    backward = graph.tangent_dependent(gm.graph)
    ctx.plan.collectives += [
        _describe(node, backward) for node in gm.graph.nodes if starts_communication(node)
    ]
    products = [n for n in gm.graph.nodes if is_fp8_gemm(n)]
    in_fp32 = any(tensor(n).dtype is torch.float32 for n in products)  # FP8 is always faster
    if backward and not in_fp32:
        ctx.plan.fp8_work = fp8_work(gm.graph)


def _describe(collective: fx.Node, backward: set[fx.Node]) -> Collective:
    sent = [n for n in collective.all_input_nodes if graph.value(n) is not None]
    is_backward = collective.meta.get("partitioner_tag") == "is_backward"
    is_gather = collective.target is ALL_GATHER
    return Collective(
        module=graph.module_path(collective),
        op=graph.operator_name(collective).removeprefix("_c10d_functional."),
        half="backward" if is_backward or collective in backward else "forward",
        shape=" ".join(graph.shape_text(tensor(n)) for n in sent),
        dtype=" ".join(graph.dtype_text(tensor(n).dtype) for n in sent),
        bytes=sum(map(graph.nbytes, sent)),
        reason=collective.meta.get(WHY_NOT_QUANTIZED, "") if is_gather else "sums are not rounded",
    )


def fp8_work(g: fx.Graph) -> Work:
    """Return the FLOPs of FP8 GEMMs, and the bytes of casts.

    Each cast counts as a separate kernel.
    """
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
    if graph.is_call(node, fp8.amax.default):
        return not parse_block(str(node.args[1]))[1]
    return node.target in GEMM_CASTS or is_quantized_operand(node)
