"""Have each part of a concatenation computed for itself.

    before   d = cat([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])
    after    d = side_by_side([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])

Inductor computes a concatenation element by element, and for each of them all parts, of which it
takes one. The gradient of a SwiGLU whose gate and up are one GEMM so took 2.6 times the time of its
bytes on an H100. Parts that are stored for themselves, and read the same, are one kernel.

Where all that reads it is generated code, through views or not, it stays: Inductor computes the
parts there, and nothing is stored. So it does where parts are of one value, as in a shift.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import side_by_side
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, tensor
from fp8pass.passes.context import Context


def split_cats(gm: fx.GraphModule, ctx: Context) -> None:
    """Put `side_by_side` in place of concatenations of computed parts."""
    if not ctx.config.quantizes_linears:  # recipe exact rounds where stock code does
        return
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: list[fx.Node] = list(cat.args[0])
        computed = {made for part in parts if (made := _computed(part)) is not None}
        if len(computed) < 2 or len({tensor(x).dtype for x in parts}) > 1:
            continue
        if all(map(_is_fused_into, cat.users)):
            continue
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        with gm.graph.inserting_before(cat):
            stored = graph.emit(gm.graph, side_by_side, parts, dim, like=cat)
        cat.replace_all_uses_with(stored)
        gm.graph.erase_node(cat)


def _computed(part: fx.Node) -> fx.Node | None:
    """What Inductor would compute where a part is read; None for what is in memory."""
    while kind(part) is Kind.VIEW:
        part = part.args[0]  # type: ignore[assignment]
    return part if kind(part) is Kind.POINTWISE else None


def _is_fused_into(user: fx.Node) -> bool:
    """Whether generated code takes a value as it computes it."""
    if kind(user) is Kind.VIEW:
        return all(map(_is_fused_into, user.users))
    return kind(user) in (Kind.POINTWISE, Kind.REDUCTION)
