"""The backward of norms in row kernels: the gradient of a residual stream, and of a norm's weight.

    before   n = mul(dy, w)
             d = sub(mul(n, rstd), mul(x, mul(sum(mul(n, x), -1), rstd3)))
             g = add(residual, d);  a = amax(g)
             v = sum(mul(dy, mul(x, rstd)), [0, 1])
    after    g, p, r = rows([w, rstd, dy, x, residual], program)
             a = amax(r);  v = sum(p, 0)

The kernel stores the sum, the largest magnitude of each row, and partial sums of the weight's
gradient, whose order of summation is fixed.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.row_kernel import LONGEST_SUMMED, rows
from fp8pass.codegen.kernels.supported import why_not_a_matrix
from fp8pass.codegen.program.emit import emit_kernel, has_shape, replace
from fp8pass.codegen.program.ir import NotAMatrix, Step, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import RESHAPES, is_residual_sum
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def fuse_norms(gm: fx.GraphModule, ctx: Context) -> None:
    """Replace sums of residual gradients and norms' gradients by row kernels."""
    if not ctx.config.quantizes_linears:  # results must be bit-equal; kernels round less often
        return
    changed = False
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.users and is_residual_sum(node):
            changed |= fuse(node)
    if changed:
        graph.sort_and_prune(gm.graph)


def fuse(node: fx.Node) -> bool:
    """Put a kernel in place of a sum; False if it has no row reduction that a kernel computes."""
    if why_not_a_matrix(node) or tensor(node).shape[-1] > LONGEST_SUMMED:
        return False
    reader = Reader(node, by_row=True)
    try:
        reader.read(node)
    except NotAMatrix:
        return False
    steps = [step for steps in reader.steps.values() for step in steps]
    if not reader.large_loads or not any(step.target == "row_sum" for step in steps):
        return False
    sums = column_sums(reader)
    if not sums:
        return False
    if not has_shape(node) or depends_on(reader.loads, [node, *sums]):
        return False
    # Other users of the values in between compute them again.
    dtype = graph.dtype_text(tensor(node).dtype)
    stores = [Store(reader.names[node], ("full",), dtype=dtype)]
    stores += [Store(reader.names[s.args[0]], ("sums",)) for s in sums]  # type: ignore[index]
    amaxes = _amaxes(node)
    if amaxes:
        largest = f"{node.name}_row_amax"
        reader.steps[node] = [*reader.steps[node], Step(largest, "row_amax", (node.name,))]
        stores.append(Store(largest, ("row",), dtype="float32"))
    results = emit_kernel(rows, [([reader], stores)], like=node)
    for amax in amaxes:
        amax.update_arg(0, results[-1])
    replace(node, results[0])
    for old, partial in zip(sums, results[1:], strict=False):
        _finish(old, partial)
    sort_around(graph.operator_of(results[0]))
    return True


def column_sums(reader: Reader) -> list[fx.Node]:
    """Sums over all rows of values that can be computed from the kernel's loads alone."""
    found: list[fx.Node] = []
    loads = set(reader.loads)
    for load in sorted(loads):
        for node in sorted(_behind(load)):
            if not _sums_columns(node) or node in found:
                continue
            before = reader.snapshot()
            try:
                if reader.operand(node.args[0]) == "full":  # type: ignore[arg-type]
                    reader.read(node.args[0])  # type: ignore[arg-type]
            except NotAMatrix:
                pass
            if set(reader.loads) == loads and node.args[0] in reader.steps:
                found.append(node)
            else:
                reader.restore(before)
    return found


def _behind(load: fx.Node, depth: int = 8) -> set[fx.Node]:
    """The nodes that depend on a value through at most `depth` operators."""
    found: set[fx.Node] = set()
    layer = {load}
    for _ in range(depth):
        layer = {user for node in layer for user in node.users} - found
        found |= layer
    return found


def _sums_columns(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    x = node.args[0]
    leading = tensor(x).ndim - 1  # type: ignore[arg-type]
    return sorted(node.args[1]) == list(range(leading))  # type: ignore[arg-type]


def _amaxes(node: fx.Node) -> list[fx.Node]:
    """The `amax` operators of a value or of views of it."""
    found = []
    for user in node.users:
        if user.target is fp8.amax.default and user.args[1] == "tensor":
            found.append(user)
        elif user.target in RESHAPES:
            found += _amaxes(user)
    return found


def _finish(old: fx.Node, partial: fx.Node) -> None:
    """Replace a sum by that of its partial sums, in the same shape and dtype."""
    val = tensor(old)
    with old.graph.inserting_before(old):
        total = graph.emit(old.graph, aten.sum.dim_IntList, partial, [0], like=old)
        shaped = graph.emit(old.graph, aten.reshape.default, total, list(val.shape), like=old)
        result = graph.emit(
            old.graph, torch.ops.prims.convert_element_type.default, shaped, val.dtype, like=old
        )
    old.replace_all_uses_with(result)
