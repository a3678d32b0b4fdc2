"""Count the kernels of a graph, and the matrices that generated code quantizes, with the reasons.

Changes nothing but `ctx.plan.kernels`, which `explain` shows.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.kernel_operator import KERNELS, prepare_batch
from fp8pass.codegen.kernels.launch import group_into_launches
from fp8pass.codegen.kernels.supported import why_no_rows, why_no_tiles
from fp8pass.codegen.program.ir import Program
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.dialect.quantization import TENSOR
from fp8pass.graph import tensor
from fp8pass.graph.patterns import is_quantized_operand, quantization_of
from fp8pass.passes.context import Context
from fp8pass.plan import KernelUse

fp8 = torch.ops.fp8pass


def count_kernels(gm: fx.GraphModule, ctx: Context) -> None:
    """Add to the plan which kernels quantize the matrices of one graph."""
    if not ctx.config.quantizes_linears:
        return
    programs: Counter[str] = Counter()
    launches = 0
    for node in gm.graph.nodes:
        if node.target in KERNELS:
            batch, sizes = Batch.parse(str(node.args[1])), [tensor(x).shape for x in node.args[0]]
            programs.update(_kernel_of(node, program) for program in batch.programs)
            launches += len(group_into_launches(prepare_batch(KERNELS[node.target], batch, sizes)))
    left = [n for n in gm.graph.nodes if is_quantized_operand(n)]
    generated = dict(Counter(map(_why_generated, left)))
    ctx.plan.kernels.append(KernelUse(dict(programs), launches, generated))


def _kernel_of(node: fx.Node, program: Program) -> str:
    """The name under which a program is counted."""
    return "scales" if program.finishes_amax else graph.operator_name(node).rpartition(".")[2]


def _why_generated(codes: fx.Node) -> str:
    is_tensor = quantization_of(codes).block == TENSOR
    why_not = why_no_tiles if is_tensor else why_no_rows
    return why_not(codes) or "what it is computed from lies in several matrices of memory"
