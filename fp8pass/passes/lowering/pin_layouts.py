"""Have operands of grouped GEMMs stored in the strides that they were traced with.

    before   h = mul(gate, up);  w = grouped_mm(permute(h, [1, 0]), dy, offsets)
    after    h = buffer(mul(gate, up));  w = grouped_mm(permute(h, [1, 0]), dy, offsets)

These kernels stop where groups follow one another in a dimension whose elements lie side by side,
unless each has a multiple of 16 bytes. Inductor copies the view of what is not in memory, and gives
the copy rows: here each would be an operand's feature, in which the experts' tokens follow one
another. What the backward computes again, or decodes, is not in memory.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer, store_in_buffer
from fp8pass.graph.classify import GROUPED_GEMMS, Kind, kind
from fp8pass.passes.context import Context


def pin_layouts(gm: fx.GraphModule, ctx: Context) -> None:
    """Give what grouped GEMMs read a buffer, unless it has one."""
    grouped = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in GROUPED_GEMMS]
    bases = dict.fromkeys(_base(operand) for n in grouped for operand in n.args[:2])
    computed = [n for n in bases if n is not None and _is_fused(n)]
    for node in computed:
        store_in_buffer(node)


def _base(operand: object) -> fx.Node | None:
    """The value that an operand is a view of."""
    while isinstance(operand, fx.Node) and kind(operand) is Kind.VIEW:
        operand = operand.args[0]
    return operand if isinstance(operand, fx.Node) else None


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor may compute a value where it is read."""
    if node.op != "call_function" or graph.is_getitem(node) or node.target is buffer:
        return False
    return kind(node) not in (Kind.GEMM, Kind.ATTENTION)
