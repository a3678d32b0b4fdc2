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
from fp8pass.passes.context import Context


def pin_layouts(gm: fx.GraphModule, ctx: Context) -> None:
    grouped = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in GROUPED_GEMMS]
    bases = dict.fromkeys(_base(operand) for n in grouped for operand in n.args[:2])
    for node in [n for n in bases if n is not None and _is_fused(n)]:
        store_in_buffer(node)


def _base(operand: object) -> fx.Node | None:
    while isinstance(operand, fx.Node) and kind(operand) is Kind.VIEW:
        operand = operand.args[0]
    return operand if isinstance(operand, fx.Node) else None


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor may inline a value into the kernels that read it."""
    if node.op != "call_function" or graph.is_getitem(node) or node.target is buffer:
        return False
    return kind(node) not in (Kind.GEMM, Kind.ATTENTION)
