"""Fuse `quantize(x, scale(amax(x)))` by row, and the operators that compute `x`, in row kernels.

    before   s  = add(x, mm)
             n  = mul(mul(s, rsqrt(mean(s * s))), w)
             a  = scale(amax(n));  b = quantize(n, a)
             c  = scale(amax(s));  d = quantize(s, c)
    after    s, d, c, a, b = rows([w, x, mm], program)

The kernel also stores intermediate values that other nodes use. It quantizes saved values, and the
operands of recipe `block`, in groups. `lower_dialect` lowers the dialect operators that do not fit
in a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.row_kernel import ROW_CHUNK, rows
from fp8pass.codegen.kernels.supported import (
    GROUP_SCALES,
    LARGEST_INPUTS,
    why_no_blocks,
    why_no_rows,
)
from fp8pass.codegen.kernels.triton_ops import GROUP_FORMATS
from fp8pass.codegen.program.emit import emit_kernel, has_shape, replace
from fp8pass.codegen.program.ir import NotAMatrix, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.graph.nodes import tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import is_quantized_operand, quantization_of, transposes
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


def fuse_rows(gm: fx.GraphModule, ctx: Context) -> None:
    candidates = [n for n in gm.graph.nodes if is_quantized_operand(n)]
    fused = [_fuse(node) for node in candidates if node.users]
    if any(fused):
        graph.sort_and_prune(gm.graph)


def _fuse(quantize: fx.Node) -> bool:
    if why_no_rows(quantize) or _suits_tiles(quantize):
        return False
    kernel = _plan_kernel(quantize, compute=True) or _plan_kernel(quantize, compute=False)
    if kernel is None:
        return False
    results = emit_kernel(rows, [([kernel.reader], kernel.stores)], like=quantize)
    for node, result in zip(kernel.replaced, results, strict=True):
        replace(node, result)
    sort_around(graph.operator_of(results[0]))
    return True


def _suits_tiles(quantize: fx.Node) -> bool:
    """Whether the tile kernel can store the data and its transpose while it reads `x` once."""
    x: Any = quantize.args[0]
    is_turned = any(is_quantized_operand(user) and transposes(user) for user in x.users)
    return is_turned and not why_no_blocks(quantize)


@dataclass
class RowKernel:
    """A row kernel. `replaced` has the node that each result replaces."""

    reader: Reader
    stores: list[Store]
    replaced: list[fx.Node]

    def add_store(self, store: Store, *replaced: fx.Node) -> None:
        self.stores.append(store)
        self.replaced += replaced


def _plan_kernel(quantize: fx.Node, *, compute: bool) -> RowKernel | None:
    """Return a kernel that computes the value to quantize, or loads it if `compute` is false.

    Return None if the row kernel cannot do this.
    """
    x, scale = quantize.all_input_nodes
    reader = Reader(quantize, by_row=True)
    is_grouped = quantization_of(quantize).is_in_groups
    try:
        if not compute:
            reader.load(x)
        reader.read(x)
        if not is_grouped:
            reader.read(scale)
    except NotAMatrix:
        return None
    if not reader.large_loads or not (is_grouped or scale in reader.steps):
        return None
    if reader.bytes_read > LARGEST_INPUTS * graph.nbytes(x):
        return None
    names, kernel, groups = reader.names, RowKernel(reader, [], []), _find_groups(reader)
    if is_grouped and [quantize] not in (planes for _, planes in groups):
        return None
    amaxes = {scales.all_input_nodes[0] for scales, _ in groups}
    absorbed = {n for scales, planes in groups for n in (scales, *planes)}
    for node in reader.used_outside({quantize} | amaxes | absorbed):
        layout = reader.operand(node)
        if layout not in ("full", "row") or not has_shape(node):
            return None
        dtype = graph.dtype_text(tensor(node).dtype)
        kernel.add_store(Store(names[node], (layout,), dtype=dtype), node)
    for scales, planes in groups:
        how = quantization_of(planes[0])
        name = names[planes[0].args[0]]  # type: ignore[index]
        store = Store(
            name,
            ("groups",),
            format=how.format.name,
            group_size=how.block[1],
            scale_form="" if how.scales == "bf16" else how.scales,
        )
        kernel.add_store(store, *planes, scales)
    if not is_grouped:
        format = quantization_of(quantize).format.name
        kernel.add_store(Store(names[x], ("rows",), scale=names[scale], format=format), quantize)
    return None if depends_on(reader.loads, kernel.replaced) else kernel


def _find_groups(reader: Reader) -> list[tuple[fx.Node, list[fx.Node]]]:
    found = []
    for value in reader.names:
        for amax in (user for user in value.users if user.target is fp8.amax.default):
            for scales in (user for user in amax.users if user.target is fp8.scale.default):
                data = [u for u in scales.users if u.target is fp8.quantize.default]
                planes = sorted(data, key=lambda u: u.args[3:])
                if planes and _can_store_groups(planes) and all(map(has_shape, planes)):
                    found.append((scales, planes))
    return found


def _can_store_groups(planes: list[fx.Node]) -> bool:
    """Whether the kernel supports the groups of `planes`."""
    how = quantization_of(planes[0])
    rows, size = how.block
    fits = rows == 1 and 0 < size <= ROW_CHUNK and size & (size - 1) == 0
    expected = [(*planes[0].args[:3], number) for number in range(len(how.format.planes))]
    if [(*plane.args, 0)[:4] for plane in planes] != expected:
        return False
    return fits and how.scales in GROUP_SCALES and how.format.name in GROUP_FORMATS
