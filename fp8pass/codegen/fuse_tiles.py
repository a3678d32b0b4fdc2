"""Quantize and transpose in tile kernels: `transpose(quantize(x))` and the operators before it.

    before   h  = mul(silu(dequantize_groups(g)), dequantize_groups(u))
             a  = transpose(quantize(h, s))
             d  = mul(dy, silu(dequantize_groups(g)))
             b  = quantize(d, t);  c = transpose(b)
    after    a, b, c = tiles([s, t, dy, g, u], program)

Every quantized matrix that is needed transposed becomes a store of a program, with the pointwise
operators that lead to it, down to what has to be in memory anyway. Matrices that read the same
tensors share a kernel, so that each is read once. Operators that others use, too, stay where they
are: computing them again costs less than writing and reading them.

What a kernel does not take stays as it is, for `lowering.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fp8pass import graph, hardware
from fp8pass.codegen.program import Store
from fp8pass.codegen.reader import NotAMatrix, Reader, depends, emit_kernel, sort_topologically
from fp8pass.codegen.tile_kernel import tiles
from fp8pass.codegen.triton_ops import CODE_TYPES
from fp8pass.graph import tensor

fp8 = torch.ops.fp8pass

# A matrix may be computed from this many times its own bytes; beyond, it is read from memory.
LARGEST_INPUTS = 2.0


def fuse_tiles(gm: fx.GraphModule) -> None:
    """Replace quantized and transposed matrices of a graph by tile kernels."""
    matrices = [m for n in gm.graph.nodes if (m := read_matrix(n)) is not None]
    for group in grouped(matrices):
        fuse(group)
    measured = [m for n in list(gm.graph.nodes) if (m := read_measured(n)) is not None]
    for group in grouped(measured):
        measure(group)
    if matrices or measured:
        sort_topologically(gm.graph)
        gm.graph.eliminate_dead_code()
        gm.recompile()


def read_matrix(codes: fx.Node) -> Reader | None:
    """The operators behind `codes`, None if no kernel here stores them."""
    if not graph.is_call(codes, fp8.quantize.default) or why_no_tiles(codes):
        return None
    x, scale, _ = codes.args
    assert isinstance(x, fx.Node)
    assert isinstance(scale, fx.Node)
    try:
        reader = Reader(codes)
        reader.read(x)
        if reader.bytes_read > LARGEST_INPUTS * graph.nbytes(x):
            reader = Reader(codes)
            reader.load(x)
        reader.load(scale)
    except NotAMatrix:
        return None
    return reader if reader.large else None


def why_no_tiles(codes: fx.Node) -> str | None:
    """Why no tile kernel quantizes a matrix, if that can be told from the matrix alone."""
    if tensor(codes.args[1]).ndim:  # type: ignore[arg-type]
        return "scales by row"
    return why_no_kernel(codes) or (None if transposes(codes) else "not needed transposed")


def why_no_kernel(codes: fx.Node) -> str | None:
    """Why the kernels do not work on a matrix of this size and format, on its device."""
    format = str(codes.args[2])
    return why_not_a_matrix(codes) if format in CODE_TYPES else f"no kernel for {format}"


def why_not_a_matrix(x: fx.Node) -> str | None:
    """Why kernels do not work on a value of this size, on its device."""
    val = tensor(x)
    if val.ndim < 2 or not isinstance(val.shape[-1], int) or val.shape[-1] == 1:
        return "not a matrix of fixed width"
    return hardware.why_no_triton_kernels(val.device)


def transposes(codes: fx.Node) -> list[fx.Node]:
    """The transposes of a quantized matrix."""
    return [u for u in codes.users if u.target is fp8.transpose.default]


def read_measured(amax: fx.Node) -> Reader | None:
    """The operators behind a matrix of which `amax` is taken, if it is computed from groups.

    What is computed otherwise has its amax taken by the kernel that computes it.
    """
    if not graph.is_call(amax, fp8.amax.default):
        return None
    x = amax.args[0]
    assert isinstance(x, fx.Node)
    val = tensor(x)
    if (
        val.ndim != 2
        or not isinstance(val.shape[1], int)
        or hardware.why_no_triton_kernels(val.device)
    ):
        return None
    reader = Reader(x)
    try:
        reader.read(x)
    except NotAMatrix:
        return None
    return reader if any(load.operand == "groups" for load in reader.loads.values()) else None


def measure(group: list[Reader]) -> None:
    """Have one kernel take the first stage of the amax of every matrix of a group."""
    stores = [Store(m.names[m.matrix], ("amax",)) for m in group]
    amaxes = [u for m in group for u in m.matrix.users if u.target is fp8.amax.default]
    first = min(amaxes)
    results = list(emit_kernel(tiles, group, stores, like=first))
    for matrix, result in zip(group, results, strict=True):
        for user in [u for u in matrix.matrix.users if u.target is fp8.amax.default]:
            user.replace_input_with(matrix.matrix, result)


def grouped(matrices: Iterable[Reader]) -> list[list[Reader]]:
    """Matrices that one kernel computes: their inputs are among those of the first, which has most.

    None of them may be needed to compute what another one reads.
    """
    groups: list[list[Reader]] = []
    for matrix in sorted(matrices, key=lambda m: -len(m.large)):
        for group in groups:
            together = [*group, matrix]
            reads = {n for m in together for n in m.loads}
            shared = matrix.large <= group[0].large
            if shared and not depends(reads, [m.matrix for m in together]):
                group.append(matrix)
                break
        else:
            groups.append([matrix])
    return groups


def fuse(group: list[Reader]) -> None:
    """Put one kernel in place of the codes of a group, and of their transposes."""
    stores: list[Store] = []
    replaced: list[list[fx.Node]] = []
    for matrix in group:
        x, scale, format = matrix.matrix.args
        layouts = {"rows": [matrix.matrix], "columns": transposes(matrix.matrix)}
        if len(matrix.matrix.users) == len(layouts["columns"]):
            del layouts["rows"]
        names = matrix.names[x], matrix.names[scale]  # type: ignore[index]
        stores.append(Store(names[0], tuple(layouts), scale=names[1], format=str(format)))
        replaced += layouts.values()
    results = emit_kernel(tiles, group, stores, like=group[0].matrix)
    for nodes, result in zip(replaced, list(results), strict=True):
        for node in nodes:
            node.replace_all_uses_with(result)
