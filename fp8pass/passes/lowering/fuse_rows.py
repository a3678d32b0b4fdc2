"""Quantize by row in row kernels: `quantize(x, scale(amax(x)))` and the operators before it.

    before   s  = add(x, mm)
             n  = mul(mul(s, rsqrt(mean(s * s))), w)
             a  = scale(amax(n));  b = quantize(n, a)
             c  = scale(amax(s));  d = quantize(s, c)
    after    s, d, c, a, b = rows([w, x, mm], program)

The kernel also stores computed values that have other users, and the codes of groups in which
values are saved for the backward.

Other operators stay as they are, for `lower_dialect`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.row_kernel import CHUNK, rows
from fp8pass.codegen.kernels.supported import LARGEST_INPUTS, why_no_rows
from fp8pass.codegen.kernels.triton_ops import GROUP_FORMATS
from fp8pass.codegen.program.emit import emit_kernel, has_shape, replace
from fp8pass.codegen.program.ir import NotAMatrix, Store
from fp8pass.codegen.program.reader import TRANSPARENT, Reader
from fp8pass.dialect.quantization import parse
from fp8pass.graph.nodes import tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import is_quantized_operand, quantization_of
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def fuse_rows(gm: fx.GraphModule, ctx: Context) -> None:
    """Replace matrices that are quantized by row by row kernels."""
    changed = False
    for node in list(gm.graph.nodes):
        if is_quantized_operand(node) and node.users:
            changed |= fuse(node)
    if changed:
        graph.sort_and_prune(gm.graph)


def fuse(codes: fx.Node) -> bool:
    """Put a kernel in place of `codes` and the operators behind them; False if it takes none."""
    if why_no_rows(codes):
        return False
    plan = _plan(codes, compute=True) or _plan(codes, compute=False)
    if plan is None:
        return False
    results = emit_kernel(rows, [([plan.reader], plan.stores)], like=codes)
    for node, result in zip(plan.replaced, results, strict=True):
        replace(node, result)
    sort_around(graph.operator_of(results[0]))
    return True


@dataclass
class RowKernel:
    """One kernel: its loads and steps, its stores, and the node that each result replaces."""

    reader: Reader
    stores: list[Store]
    replaced: list[fx.Node]


def _plan(codes: fx.Node, *, compute: bool) -> RowKernel | None:
    """The kernel for `codes`, which computes the quantized value or loads it; None if none can."""
    x, scale = codes.args[:2]
    assert isinstance(x, fx.Node)
    reader = Reader(codes, by_row=True)
    try:
        if not compute:
            reader.load(x)
        reader.read(x)
        reader.read(scale)  # type: ignore[arg-type]
    except NotAMatrix:
        return None
    if not reader.large_loads or scale not in reader.steps:
        return None
    if reader.bytes_read > LARGEST_INPUTS * graph.nbytes(x):
        return None
    names = reader.names
    kernel = RowKernel(reader, [], [])
    groups = kept_groups(reader)
    amaxes = {scales.all_input_nodes[0] for scales, _ in groups}
    for node in used_elsewhere(reader, {codes}.union(amaxes, *groups)):
        layout = {"full": "full", "row": "row"}.get(reader.operand(node))
        if layout is None or not has_shape(node):
            return None
        dtype = graph.dtype_text(tensor(node).dtype)
        kernel.stores.append(Store(names[node], (layout,), dtype=dtype))
        kernel.replaced.append(node)
    for scales, coded in groups:
        how = quantization_of(coded)
        name = names[coded.args[0]]  # type: ignore[index]
        store = Store(name, ("groups",), format=how.format.name, group_size=how.block[1])
        kernel.stores.append(store)
        kernel.replaced += [coded, scales]
    format = quantization_of(codes).format.name
    store = Store(names[x], ("rows",), scale=names[scale], format=format)  # type: ignore[index]
    kernel.stores.append(store)
    kernel.replaced.append(codes)
    return None if depends_on(reader.loads, kernel.replaced) else kernel


def used_elsewhere(reader: Reader, absorbed: Iterable[fx.Node]) -> list[fx.Node]:
    """Computed nodes that have users outside the kernel, directly or through views and casts.

    `absorbed` are other nodes that the kernel replaces. Conditions, which are no floating point
    numbers, are computed again by their users.
    """
    inside = set(reader.names) | set(absorbed)

    def is_used(node: fx.Node) -> bool:
        return any(
            user not in inside or (user.target in TRANSPARENT and is_used(user))
            for user in node.users
        )

    values = [n for n in sorted(reader.steps) if tensor(n).is_floating_point()]
    return [n for n in values if is_used(n)]


def kept_groups(reader: Reader) -> list[tuple[fx.Node, fx.Node]]:
    """Scales and codes of the groups that values of the kernel are saved in."""
    found = []
    for value in reader.names:
        for amax in (user for user in value.users if user.target is fp8.amax.default):
            for scales in (user for user in amax.users if user.target is fp8.scale.default):
                coded = [u for u in scales.users if u.target is fp8.quantize.default]
                if _can_store_groups(scales) and len(coded) == 1 and has_shape(coded[0]):
                    found.append((scales, coded[0]))
    return found


def _can_store_groups(scales: fx.Node) -> bool:
    """Whether the kernel stores groups of a quantization: of a size that is a power of two."""
    how = parse(str(scales.args[1]))
    rows, size = how.block
    fits = rows == 1 and 0 < size <= CHUNK and size & (size - 1) == 0
    return fits and not how.is_for_operands and how.format.name in GROUP_FORMATS
