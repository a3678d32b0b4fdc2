"""Compute cross entropies and their gradients in row kernels.

    before   m = amax(x, -1);  d = sub(x, m);  l = log(sum(exp(d), -1));  p = sub(d, l)
             loss = gather(p, y)
             h = where(eq(y, iota), -1, 0) * w;  g = h - exp(p) * sum(h, -1)
    after    m, l = rows([x], program)       in a forward
             g = rows([y, w, m, l, x])       in a backward
             g, loss = rows([y, w, x])       in a chunk of the tokens

`x` contains the logits, [tokens, classes], `y` the labels and `w` a weight of each token. One
kernel reads the logits for `m` and `l`. Another reads them for the gradient, and overwrites them.
Memory bandwidth limits both kernels. On an H200, they take 3.6 ms for 16,384 × 151,936 logits.

Inductor's kernels take 8.5 ms, because they execute many instructions for each logit: the forward
computes two exponentials, and the backward divides a 64-bit index if there are 2^31 logits or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer, store_in_buffer
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.kernels.supported import why_not_a_matrix
from fp8pass.codegen.program.emit import emit_kernel, has_shape, replace
from fp8pass.codegen.program.ir import IS_COLUMN, NotAMatrix, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import skip_reshapes, skip_transposes
from fp8pass.passes.context import Context

# Inductor reads shorter rows only once.
FEWEST_CLASSES = 2048


def fuse_losses(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # kernels round less often than recipe `exact` must
        return
    fused = [_fuse_gradient(node) for node in list(_computed_operands(gm.graph))]
    logs = gm.graph.find_nodes(op="call_function", target=aten.log.default)
    fused += [_fuse_statistics(node) for node in logs]
    if any(fused):
        graph.sort_and_prune(gm.graph)


def _computed_operands(g: fx.Graph) -> Iterator[fx.Node]:
    """Yield the operands of GEMMs that generated code would compute."""
    found = set()
    for gemm in (node for node in g.nodes if kind(node) is Kind.GEMM):
        for operand in gemm.all_input_nodes:
            matrix = skip_transposes(operand)[0]
            node = skip_reshapes(matrix)
            if kind(node) is Kind.POINTWISE and node not in found:
                found.add(node)
                yield node if has_shape(node) else matrix


def _fuse_gradient(gradient: fx.Node) -> bool:
    """Replace the gradient of logits, and losses that are computed with it, by a kernel."""
    reader = _read(gradient, gradient)
    if reader is None or not _computes(reader, IS_COLUMN):
        return False
    for node in list(reader.names):
        for loss in (user for user in node.users if user.target is aten.gather.default):
            before = reader.snapshot()
            if reader.compute(loss) and depends_on(reader.loads, [loss]):
                reader.restore(before)  # the weight of a token depends on its loss
    return _emit(reader, gradient, "full")


def _fuse_statistics(log: fx.Node) -> bool:
    """Replace the logarithm of a softmax's denominator, and the row maximum, by a kernel."""
    total: Any = log.args[0]
    if not graph.is_call(total, aten.sum.dim_IntList):
        return False
    reader = _read(log, total.args[0])
    if reader is None or not _computes(reader, "row_max"):
        return False
    return _emit(reader, log, "row")


def _read(node: fx.Node, matrix: fx.Node) -> Reader | None:
    """Return a reader that computes `node` from a matrix of logits in memory."""
    if why_not_a_matrix(matrix) or tensor(matrix).shape[-1] < FEWEST_CLASSES:
        return None
    reader = Reader(matrix, by_row=True)
    try:
        if not reader.compute(node) or not reader.large_loads:
            return None
    except NotAMatrix:
        return None
    values = (*reader.loads, *reader.names)
    return None if any(tensor(n).dtype is torch.float64 for n in values) else reader


def _compute_once(rows: fx.Node) -> None:
    """Store the tensor that `rows` is a view of, if generated code would compute the tensor."""
    source = rows
    while kind(source) is Kind.VIEW or graph.is_call(source, buffer):
        source = source.args[0]  # type: ignore[assignment]
    if kind(source) is Kind.POINTWISE and not any(graph.is_call(u, buffer) for u in source.users):
        store_in_buffer(source)


def _computes(reader: Reader, target: str) -> bool:
    return any(step.target == target for steps in reader.steps.values() for step in steps)


def _emit(reader: Reader, root: fx.Node, layout: str) -> bool:
    """Replace `root`, and values of rows that other nodes use, by a kernel.

    The kernel stores `root` in `layout`.
    """
    values = [n for n in reader.used_outside([root]) if n is not root]
    values = [n for n in values if reader.operand(n) == "row"]
    replaced = [root, *values]
    if not all(map(has_shape, replaced)) or depends_on(reader.loads, replaced):
        return False
    for node in (n for n, load in reader.loads.items() if load.operand == "row"):
        _compute_once(node)
    stores = [
        Store(
            reader.names[node],
            (layout if node is root else "row",),
            dtype=graph.dtype_text(tensor(node).dtype),
        )
        for node in replaced
    ]
    results = emit_kernel(rows, [([reader], stores)], like=root)
    for node, result in zip(replaced, results, strict=True):
        replace(node, result)
    sort_around(graph.operator_of(results[0]))
    return True
