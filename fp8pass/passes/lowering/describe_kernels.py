"""Add to the plan which kernels quantize matrices, and why generated code quantizes some."""

from __future__ import annotations

from collections import Counter

from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.kernel_operator import KERNELS, prepare_batch
from fp8pass.codegen.kernels.launch import group_into_launches
from fp8pass.codegen.kernels.supported import why_no_rows, why_no_tiles
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.dialect.quantization import TENSOR
from fp8pass.graph import tensor
from fp8pass.graph.patterns import is_quantized_operand, quantization_of
from fp8pass.passes.context import Context
from fp8pass.plan import KernelUse


def describe_kernels(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:
        return
    programs: Counter[str] = Counter()
    launches = 0
    for node in gm.graph.nodes:
        if node.target in KERNELS:
            batch, sizes = Batch.parse(str(node.args[1])), [tensor(x).shape for x in node.args[0]]
            kernel = graph.operator_name(node).rpartition(".")[2]
            programs.update("scales" if p.finishes_amax else kernel for p in batch.programs)
            launches += len(group_into_launches(prepare_batch(KERNELS[node.target], batch, sizes)))
    rest = [n for n in gm.graph.nodes if is_quantized_operand(n)]
    generated = dict(Counter(map(_why_generated, rest)))
    ctx.plan.kernels.append(KernelUse(dict(programs), launches, generated))


def _why_generated(quantize: fx.Node) -> str:
    is_tensor = quantization_of(quantize).block == TENSOR
    why_not = why_no_tiles if is_tensor else why_no_rows
    return why_not(quantize) or "its inputs are parts of several matrices in memory"
