"""Fuse `transpose(quantize(x))`, and the operators that compute `x`, in tile kernels.

    before   h  = mul(silu(dequantize(g)), dequantize(u))
             a  = transpose(quantize(h, s))
             d  = mul(dy, silu(dequantize(g)))
             b  = quantize(d, t);  c = transpose(b)
    after    a, b, c = tiles([s, t, dy, g, u], program)

Matrices that are computed from the same tensors share a program, so that each tensor is read once.
An operator also stays in the graph if other nodes use its result, because computing it twice costs
less than writing and reading it.

The same kernel transposes FP8 data from other ranks:

    before   c = transpose(as_codes(all_gather(b)))
    after    c = tiles([as_codes(all_gather(b))], program)

A kernel that computes amaxes also stores partial sums of the columns, for gradients of biases:

    before   d = gelu_backward(dy, dequantize(x))
             a = amax(d);  b = quantize(d, scale(a));  c = transpose(b)
             v = sum(d, [0])
    after    r, p = tiles([dy, x], program)
             a = amax(r);  b, c = tiles([scale(a), dy, x], program)
             v = sum(p, [0])

Generated code would store `d` for the sum. The order of summation is fixed.

A kernel computes the scales of blocks, too, because its tiles are as wide as blocks:

    before   a = scale(amax(d, 1×128));     b = quantize(d, a)
             c = transpose(quantize(d, s))
    after    b, a, c = tiles([s, d], program)

If `s` is the largest of the scales `a`, one kernel computes `a` and `b`, and a second one reads `d`
again to compute `c`.

If `joined` concatenates FP8 data, each kernel stores its columns of the result:

    before   a = quantize(x, s);  b = quantize(y, t);  c = joined([a, b])
    after    c = tiles([s, x, t, y], [program, program])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.kernels.supported import (
    LARGEST_INPUTS,
    why_no_blocks,
    why_no_tiles,
    why_not_a_matrix,
)
from fp8pass.codegen.kernels.tile_kernel import FORMATS_BY_LAYOUT, tiles
from fp8pass.codegen.program.emit import emit_kernel, replace_column_sum
from fp8pass.codegen.program.ir import SQUARE_BLOCK, NotAMatrix, Store
from fp8pass.codegen.program.reader import TRANSPARENT, Reader, is_in_memory
from fp8pass.dialect.quantization import block_text
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import (
    is_quantized_operand,
    quantization_of,
    sums_columns,
    transposes,
)
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

MOVES = (fp8.transpose.default, fp8.joined.default, aten.cat.default)


@dataclass(eq=False)
class TiledMatrix:
    """A matrix that a kernel may store."""

    reader: Reader  # the loads and steps that compute the matrix
    store: Store  # the store of the matrix, with its layouts still empty
    # The nodes that the stored result replaces, by layout.
    replaced: dict[str, list[fx.Node]] = field(default_factory=dict)
    # The `scale` node that the kernel's block scales replace, if any.
    scale: fx.Node | None = None
    # The `amax` operators that will read the amaxes of tiles instead of the matrix.
    amaxes: list[fx.Node] = field(default_factory=list)
    # The sums over all rows that will read the sums of tiles, by the dtype of the summed values.
    sums: dict[str, list[fx.Node]] = field(default_factory=dict)

    @property
    def results(self) -> list[fx.Node]:
        scales = [self.scale] if self.scale else []
        groups = self.replaced.values(), [scales, self.amaxes], self.sums.values()
        return [node for nodes in chain(*groups) for node in nodes]

    def stores(self, whole: Concatenation | None) -> Iterator[Store]:
        parts = {x for x, nodes in self.replaced.items() if whole and whole.offset_of(nodes) >= 0}
        alone = tuple(x for x in self.replaced if x not in parts)
        if alone or self.amaxes:
            yield replace(self.store, layouts=alone or ("amax",))
        for dtype in self.sums:
            yield replace(self.store, layouts=("tile_sums",), dtype=dtype)
        for layout in self.replaced:
            if whole and layout in parts:
                offset = whole.offset_of(self.replaced[layout])
                yield replace(self.store, layouts=(layout,), width=whole.width, offset=offset)


@dataclass(frozen=True, eq=False)
class Concatenation:
    """A `joined` node, which concatenates the columns of quantized matrices."""

    node: fx.Node

    @property
    def parts(self) -> list[fx.Node]:
        return list(self.node.args[0])  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        return int(tensor(self.node).shape[1])

    def offset_of(self, nodes: Iterable[fx.Node]) -> int:
        """Return the first column of the part that is in `nodes`; -1 if no part is in `nodes`."""
        offsets = accumulate((tensor(part).shape[1] for part in self.parts), initial=0)
        found = dict(zip(self.parts, offsets, strict=False))
        return max((int(found[node]) for node in nodes if node in found), default=-1)


def fuse_tiles(gm: fx.GraphModule, ctx: Context) -> None:
    if not ctx.config.quantizes_linears:  # graphs of `exact` have amaxes, but must not change
        return
    for find_matrix in (_find_operand, _find_received, _find_measured):
        matrices = [m for n in gm.graph.nodes if (m := find_matrix(n)) is not None]
        groups = dict(enumerate(_group_by_kernel(matrices)))
        stored_by = {n: i for i, group in groups.items() for m in group for n in m.results}
        for node in gm.graph.find_nodes(op="call_function", target=fp8.joined.default):
            whole = Concatenation(node)
            numbers = sorted({stored_by[part] for part in whole.parts if part in stored_by})
            storing = [groups[i] for i in numbers if i in groups]
            if _can_store_parts(whole, storing):
                _fuse(storing, whole)
                for i in numbers:
                    del groups[i]
        for group in groups.values():
            _fuse([group])
        if matrices:
            graph.sort_and_prune(gm.graph)


def _find_operand(quantize: fx.Node) -> TiledMatrix | None:
    if not is_quantized_operand(quantize):
        return None
    try:
        return _find_blocks(quantize) or _find_quantized(quantize)
    except NotAMatrix:
        return None


def _find_blocks(quantize: fx.Node) -> TiledMatrix | None:
    """Return an operand with a scale for each block of 1×128 or 128×128 elements."""
    if why_no_blocks(quantize):
        return None
    x, scale = quantize.all_input_nodes
    reader, how, layouts = _read(x, quantize), quantization_of(quantize), _find_layouts(quantize)
    store = Store(reader.names[x], (), format=how.format.name, block=block_text(how.block))
    # The backward may quantize a recomputed matrix, with the scales of the forward. The kernel
    # computes the scales again.
    is_from_forward = not graph.is_call(scale, fp8.scale.default)
    if is_from_forward and depends_on(reader.loads, [scale]):
        return None
    if is_from_forward and not _is_only_reader(quantize, scale):
        return None
    return TiledMatrix(reader, store, layouts, scale)


def _is_only_reader(quantize: fx.Node, scale: fx.Node) -> bool:
    """Whether only GEMMs of the data of `quantize` read `scale`, so that it can be replaced."""
    readers = {reader for reader in _find_readers(scale) if reader is not quantize}
    is_gemm = all(reader.target is fp8.scaled_mm.default for reader in readers)
    return is_gemm and readers.issubset(_find_readers(quantize))


def _find_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read `node`, its transposes or its concatenations."""
    for user in node.users:
        moved = graph.skip_transposes(user)[0] is not user or user.target in MOVES
        yield from _find_readers(user) if moved else [user]


def _read(x: fx.Node, matrix: fx.Node) -> Reader:
    """Return a reader of `x`. It loads `x` if the tensors that `x` is computed from are too large.

    Raises NotAMatrix if no kernel can read `x`.
    """
    reader = Reader(matrix)
    reader.read(x)
    if reader.bytes_read > LARGEST_INPUTS * graph.nbytes(x):
        reader = Reader(matrix)
        reader.load(x)
    if not reader.large_loads:
        raise NotAMatrix
    return reader


def _find_layouts(quantize: fx.Node) -> dict[str, list[fx.Node]]:
    """Return the nodes that each layout of the quantized matrix replaces."""
    by_layout = {"rows": [quantize], "columns": transposes(quantize)}
    if len(quantize.users) == len(by_layout["columns"]):
        del by_layout["rows"]
    return {layout: nodes for layout, nodes in by_layout.items() if nodes}


def _find_quantized(quantize: fx.Node) -> TiledMatrix | None:
    if why_no_tiles(quantize):
        return None
    x, scale = quantize.all_input_nodes
    reader = _read(x, quantize)
    reader.load(scale)
    names, format = reader.names, quantization_of(quantize).format.name
    store = Store(names[x], (), scale=names[scale], format=format)
    return TiledMatrix(reader, store, _find_layouts(quantize))


def _find_received(data: fx.Node) -> TiledMatrix | None:
    """Return `data` if it comes from other ranks, is in memory, and must be transposed."""
    if not graph.is_call(data, fp8.as_codes.default) or not transposes(data):
        return None
    format = str(data.args[1])
    if format not in FORMATS_BY_LAYOUT["columns"] or why_not_a_matrix(data):
        return None
    reader = Reader(data)
    try:
        reader.load(data)
    except NotAMatrix:
        return None
    store = Store(reader.names[data], (), format=format)
    return TiledMatrix(reader, store, {"columns": transposes(data)})


def _find_measured(x: fx.Node) -> TiledMatrix | None:
    """Return `x` if a kernel should compute its amax, and its column sums, without storing `x`.

    Such an `x` is in memory or dequantized from groups, or generated code would store it only for
    its column sums. Generated code that computes any other matrix can also compute its amax.
    """
    amaxes = [u for u in x.users if u.target is fp8.amax.default and u.args[1] == "tensor"]
    if not amaxes or tensor(x).ndim != 2 or why_not_a_matrix(x):
        return None
    reader = Reader(x)
    try:
        reader.read(x)
    except NotAMatrix:
        return None
    operands = {load.operand for load in reader.loads.values()}
    values = _find_equal_values(reader, x)
    sums = _find_column_sums(reader, values)
    users = {user for value in values for user in value.users}
    is_only_summed = sums and users <= {*values, *amaxes, *chain(*sums.values())}
    is_needed = "groups" in operands or is_in_memory(x) or is_only_summed
    if not reader.large_loads or not is_needed:
        return None
    return TiledMatrix(reader, Store(reader.names[x], ()), amaxes=amaxes, sums=sums)


def _find_equal_values(reader: Reader, x: fx.Node) -> list[fx.Node]:
    """Return `x` and the casts and views that have the same elements before rounding."""
    equal = (node for node, name in reader.names.items() if name == reader.names[x])
    found = [node for node in equal if _has_elements_of(node, x)]
    for value in found:
        views = (u for u in value.users if u.target in TRANSPARENT and _has_elements_of(u, x))
        found += [view for view in views if view not in found]
    return found


def _has_elements_of(node: fx.Node, x: fx.Node) -> bool:
    val, matrix, true = tensor(node), tensor(x), compat.statically_known_true
    if val.ndim < 2 or val.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return true(val.shape[-1] == matrix.shape[-1]) and true(val.numel() == matrix.numel())


def _find_column_sums(reader: Reader, values: Iterable[fx.Node]) -> dict[str, list[fx.Node]]:
    """Return the column sums of `values`, by the dtype to which a kernel must round `values`."""
    found: dict[str, list[fx.Node]] = {}
    for value in values:
        if sums := [user for user in value.users if sums_columns(user)]:
            found.setdefault(_rounding_of(reader, value), []).extend(sums)
    return found


def _rounding_of(reader: Reader, value: fx.Node) -> str:
    """Return the narrowest dtype to which the kernel's FP32 value is rounded for `value`, or ''."""
    narrowest = tensor(value).dtype
    while value not in reader.loads and value.target in TRANSPARENT:
        value = value.args[0]  # type: ignore[assignment]
        narrowest = min(narrowest, tensor(value).dtype, key=lambda dtype: dtype.itemsize)
    load = reader.loads.get(value)
    is_exact = load is not None and load.operand == "full" and tensor(value).dtype is narrowest
    return "" if is_exact or narrowest is torch.float32 else graph.dtype_text(narrowest)


def _group_by_kernel(matrices: Iterable[TiledMatrix]) -> list[list[TiledMatrix]]:
    """Return the matrices of each kernel.

    The first matrix of a kernel reads all large tensors that the kernel reads.
    """
    groups: list[list[TiledMatrix]] = []
    groups_by_load: dict[fx.Node, list[list[TiledMatrix]]] = {}
    for matrix in sorted(matrices, key=lambda m: -len(m.reader.large_loads)):
        loads = matrix.reader.large_loads
        for group in groups_by_load.get(min(loads), ()):
            fits = loads <= group[0].reader.large_loads
            fits = fits and all(m.reader.agrees(matrix.reader) for m in group)
            if fits and not _depend_on_each_other([*group, matrix]):
                group.append(matrix)
                break
        else:
            groups.append([matrix])
            for load in loads:
                groups_by_load.setdefault(load, []).append(groups[-1])
    return groups


def _can_store_parts(whole: Concatenation, groups: list[list[TiledMatrix]]) -> bool:
    """Whether the kernels of `groups` can store all parts, each once, in place."""
    if len(set(whole.parts)) < len(whole.parts):
        return False
    if any(set(part.users) - {whole.node, *transposes(part)} for part in whole.parts):
        return False
    matrices = [m for group in groups for m in group]
    stored = {n for m in matrices for n in m.results}
    return stored.issuperset(whole.parts) and not _depend_on_each_other(matrices)


def _depend_on_each_other(matrices: list[TiledMatrix]) -> bool:
    reads = {n for m in matrices for n in m.reader.loads}
    return len(matrices) > 1 and depends_on(reads, [n for m in matrices for n in m.results])


def _fuse(groups: list[list[TiledMatrix]], whole: Concatenation | None = None) -> None:
    matrices = [matrix for group in groups for matrix in group]
    # A kernel of an earlier call may have made one of these matrices depend on a different one.
    if _depend_on_each_other(matrices):
        for matrix in matrices:
            _fuse([[matrix]])
        return
    stores = [(matrix, store) for matrix in matrices for store in matrix.stores(whole)]
    drafts = [
        ([m.reader for m in group], [store for m, store in stores if m in group])
        for group in groups
    ]
    results = emit_kernel(tiles, drafts, like=matrices[0].reader.matrix)
    following = iter(results)
    for matrix, store in stores:
        for layout in store.layouts:
            result = next(following)
            if store.width and whole:
                whole.node.replace_all_uses_with(result)
            elif layout == "amax":
                for amax in matrix.amaxes:
                    amax.update_arg(0, result)
            elif layout == "tile_sums":
                for column_sum in matrix.sums[store.dtype]:
                    replace_column_sum(column_sum, result)
            else:
                for node in matrix.replaced[layout]:
                    node.replace_all_uses_with(result)
        if store.block and matrix.scale:
            _replace_scale(matrix.scale, next(following), store)
    sort_around(graph.operator_of(results[0]))


def _replace_scale(scale: fx.Node, result: fx.Node, store: Store) -> None:
    """Replace the scales of blocks. The kernel stores the scales of 1×128 elements transposed."""
    with result.graph.inserting_after(result):
        if store.block != SQUARE_BLOCK:
            result = graph.emit(result.graph, aten.permute.default, result, [1, 0], like=scale)
    scale.replace_all_uses_with(result)
