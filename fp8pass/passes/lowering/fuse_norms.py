"""Compute the backward of norms in row kernels: gradients of the residual stream and of weights.

    before   n = mul(dy, w)
             d = sub(mul(n, rstd), mul(x, mul(sum(mul(n, x), -1), rstd3)))
             g = add(residual, d);  a = amax(g)
             v = sum(mul(dy, mul(x, rstd)), [0, 1])
    after    g, p, r = rows([w, rstd, dy, x, residual], program)
             a = amax(r);  v = sum(p, 0)

The kernel stores the residual's gradient `g`, the amax `r` of each row of `g`, and partial sums `p`
of the weight's gradient, unless the weight is frozen. It also sums `dy` and `g`, for the gradients
of biases. The order of summation is fixed, so results are deterministic.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.row_kernel import LONGEST_SUMMED, rows
from fp8pass.codegen.kernels.supported import why_not_a_matrix
from fp8pass.codegen.program.emit import emit_kernel, has_shape, replace, replace_column_sum
from fp8pass.codegen.program.ir import NotAMatrix, Step, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.graph.nodes import tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import (
    CASTS,
    RESHAPES,
    is_residual_sum,
    is_returned,
    is_same_shape_addition,
    sums_columns,
)
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def fuse_norms(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # kernels round less often than recipe `exact` must
        return
    sums = [n for n in gm.graph.nodes if is_same_shape_addition(n)]
    fused = [_fuse(node) for node in sums if is_residual_sum(node) or is_returned(node)]
    if any(fused):
        graph.sort_and_prune(gm.graph)


def _fuse(total: fx.Node) -> bool:
    """Replace a sum that contains the backward of a norm by a kernel, if possible."""
    if why_not_a_matrix(total) or tensor(total).shape[-1] > LONGEST_SUMMED:
        return False
    reader = Reader(total, by_row=True)
    try:
        reader.read(total)
    except NotAMatrix:
        return False
    steps = [step for steps in reader.steps.values() for step in steps]
    if not reader.large_loads or not any(step.target == "row_sum" for step in steps):
        return False
    sums = _find_column_sums(reader)
    if not has_shape(total) or depends_on(reader.loads, [total, *sums]):
        return False
    stores = [Store(reader.names[total], ("full",), dtype=graph.dtype_text(tensor(total).dtype))]
    stores += [Store(reader.names[s.args[0]], ("sums",)) for s in sums]  # type: ignore[index]
    amaxes = _find_amaxes(total)
    if amaxes:
        row_amax = f"{total.name}_row_amax"
        reader.steps[total] = [*reader.steps[total], Step(row_amax, "row_amax", (total.name,))]
        stores.append(Store(row_amax, ("row",), dtype="float32"))
    results = emit_kernel(rows, [([reader], stores)], like=total)
    for amax in amaxes:
        amax.update_arg(0, results[-1])
    replace(total, results[0])
    for column_sum, partial_sums in zip(sums, results[1:], strict=False):
        replace_column_sum(column_sum, partial_sums)
    sort_around(graph.operator_of(results[0]))
    return True


def _find_column_sums(reader: Reader) -> list[fx.Node]:
    """Return the sums over all rows of values that the kernel loads or computes anyway.

    Gradients of weights and biases are such sums.
    """
    found: list[fx.Node] = []
    loads = set(reader.loads)
    for load in sorted(loads):
        for node in sorted(_users_within(load)):
            if not sums_columns(node) or node in found:
                continue
            before = reader.snapshot()
            try:
                if reader.operand(node.args[0]) == "full":  # type: ignore[arg-type]
                    reader.read(node.args[0])  # type: ignore[arg-type]
            except NotAMatrix:
                pass
            if set(reader.loads) == loads and node.args[0] in reader.names:
                found.append(node)
            else:
                reader.restore(before)
    return found


def _users_within(load: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    layer = {load}
    for _ in range(8):
        layer = {user for node in layer for user in node.users} - found
        found |= layer
    return found


def _find_amaxes(node: fx.Node) -> list[fx.Node]:
    found = []
    for user in node.users:
        if user.target is fp8.amax.default and user.args[1] == "tensor":
            found.append(user)
        elif user.target in RESHAPES or _is_cast_to_bf16(user):
            found += _find_amaxes(user)
    return found


def _is_cast_to_bf16(node: fx.Node) -> bool:
    """Whether a node is a cast to BF16, such as the cast of an FP32 stream under autocast.

    Kernels skip such a cast. They do not skip a cast to FP16, which may overflow.
    """
    return node.target in CASTS and tensor(node).dtype is torch.bfloat16
