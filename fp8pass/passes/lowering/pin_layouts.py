"""Store operands of grouped GEMMs with the strides that the operands had in the trace.

    before   h = mul(gate, up);  w = grouped_mm(permute(h, [1, 0]), dy, offsets)
    after    h = buffer(mul(gate, up));  w = grouped_mm(permute(h, [1, 0]), dy, offsets)

Without the buffer, Inductor may store the transpose row-major. Grouped GEMMs then raise an error
unless each group has a multiple of 16 bytes.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer, store_in_buffer
from fp8pass.graph.classify import GROUPED_GEMMS, Kind, kind
from fp8pass.graph.traffic import base
from fp8pass.passes.context import Context


def pin_layouts(gm: fx.GraphModule, ctx: Context) -> None:
    grouped = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in GROUPED_GEMMS]
    bases = dict.fromkeys(base(operand) for n in grouped for operand in n.args[:2])
    for node in filter(_is_fused, bases):
        store_in_buffer(node)


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor may inline a value into the kernels that read it."""
    if node.op != "call_function" or graph.is_getitem(node) or node.target is buffer:
        return False
    return kind(node) not in (Kind.GEMM, Kind.ATTENTION)
