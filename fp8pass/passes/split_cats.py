"""Have each part of a concatenation computed for itself.

    before   d = cat([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])
    after    d = side_by_side([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])

Inductor computes a concatenation element by element, and for each of them all parts, of which it
takes one. The gradient of a SwiGLU whose gate and up are one GEMM so took 2.6 times the time of its
bytes on an H100. Parts that are stored for themselves, and read the same, are one kernel.

Where all users are pointwise it stays: they compute the parts, and nothing is stored.
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
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: list[fx.Node] = list(cat.args[0])
        if sum(map(_is_computed, parts)) < 2 or len({tensor(x).dtype for x in parts}) > 1:
            continue
        if all(kind(user) is Kind.POINTWISE for user in cat.users):
            continue
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        with gm.graph.inserting_before(cat):
            stored = graph.emit(gm.graph, side_by_side, parts, dim, like=cat)
        cat.replace_all_uses_with(stored)
        gm.graph.erase_node(cat)


def _is_computed(part: fx.Node) -> bool:
    """Whether Inductor would compute a part where it is read."""
    while kind(part) is Kind.VIEW:
        part = part.args[0]  # type: ignore[assignment]
    return kind(part) is Kind.POINTWISE
