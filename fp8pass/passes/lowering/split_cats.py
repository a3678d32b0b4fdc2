"""Compute and store each part of a concatenation separately.

    before   d = cat([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])
    after    d = side_by_side([mul(g, silu_backward), mul(g, silu)], 1);  q = rows([d])

Inductor's kernel for a concatenation computes the values of all parts for each element. On an H100,
the gradient of a SwiGLU took 2.6 times as long as reading and writing its bytes.

This also applies to the FP8 gradients that `merge_dgrads` concatenates.

A concatenation stays if only generated code reads it, because Inductor inlines it into that code.
It also stays if its parts are views of one value, as in a shift.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer, side_by_side
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.sums import only_user
from fp8pass.graph.traffic import base, count_bytes
from fp8pass.passes.context import Context

# A smaller concatenation stays, because launching a kernel for each part takes longer.
LEAST_BYTES = 1 << 20


def split_cats(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # recipe `exact` must round as PyTorch does
        return
    for cat in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts: list[fx.Node] = list(cat.args[0])
        if count_bytes(cat) < LEAST_BYTES or len({tensor(x).dtype for x in parts}) > 1:
            continue
        if all(map(_is_fused_into, cat.users)):
            continue
        computed = {value for part in parts if (value := _inlined_value(part)) is not None}
        if len(computed) < 2:
            continue
        for part in parts:
            _remove_buffer(part)
        parts = list(cat.args[0])
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        with gm.graph.inserting_before(cat):
            stored = graph.emit(gm.graph, side_by_side, parts, dim, like=cat)
        cat.replace_all_uses_with(stored)
        gm.graph.erase_node(cat)


def _inlined_value(part: fx.Node) -> fx.Node | None:
    """Return the value that Inductor would inline where a part is read, or None.

    A buffer counts as inlined if only the part reads it, because it can be stored there instead.
    """
    value = _owner(part)
    if graph.is_call(value, buffer) and _is_only_read_by(value, part):
        value = base(value.args[0])  # type: ignore[arg-type]
    return value if kind(value) is Kind.POINTWISE else None


def _remove_buffer(part: fx.Node) -> None:
    """Compute a part where it is concatenated, if only the concatenation reads its buffer."""
    owner = _owner(part)
    if graph.is_call(owner, buffer) and _is_only_read_by(owner, part):
        owner.replace_all_uses_with(owner.args[0])  # type: ignore[arg-type]
        owner.graph.erase_node(owner)


def _owner(part: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a part, which may be a view in another dtype."""
    while (node := base(part)).target is aten.view.dtype:
        part = node.args[0]  # type: ignore[assignment]
    return node


def _is_only_read_by(owner: fx.Node, part: fx.Node) -> bool:
    """Whether only a chain of views ending in `part` reads `owner`, and only one node `part`."""
    node: fx.Node | None = owner
    while node is not None and node is not part:
        node = only_user(node)
    return node is part and only_user(part) is not None


def _is_fused_into(user: fx.Node) -> bool:
    if kind(user) is Kind.VIEW:
        return all(map(_is_fused_into, user.users))
    return kind(user) in (Kind.POINTWISE, Kind.REDUCTION)
