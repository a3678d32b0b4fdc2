"""Quantize and transpose in tile kernels: `transpose(quantize(x))` and the operators before it.

    before   h  = mul(silu(dequantize(g)), dequantize(u))
             a  = transpose(quantize(h, s))
             d  = mul(dy, silu(dequantize(g)))
             b  = quantize(d, t);  c = transpose(b)
    after    a, b, c = tiles([s, t, dy, g, u], program)

Every quantized matrix that is needed transposed becomes a store of a program, together with the
pointwise operators that compute it from tensors that are in memory anyway. Matrices computed from
the same tensors share a kernel, so that each tensor is read once. Operators with other users stay
in the graph as well: computing them twice costs less than writing and reading them.

Codes that other ranks made are transposed by the same kernel:

    before   c = transpose(as_codes(all_gather(b)))
    after    c = tiles([as_codes(all_gather(b))], program)

Codes that `joined` concatenates are stored side by side, each by its own kernel:

    before   a = quantize(x, s);  b = quantize(y, t);  c = joined([a, b])
    after    c = tiles([s, x, t, y], [program, program])

Other operators stay as they are, for `lower_dialect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.supported import LARGEST_INPUTS, why_no_tiles, why_not_a_matrix
from fp8pass.codegen.kernels.tile_kernel import FORMATS_BY_LAYOUT, tiles
from fp8pass.codegen.program.emit import emit_kernel
from fp8pass.codegen.program.ir import NotAMatrix, Store
from fp8pass.codegen.program.reader import Reader, is_in_memory
from fp8pass.graph.nodes import tensor
from fp8pass.graph.order import depends_on, sort_around
from fp8pass.graph.patterns import is_quantized_operand, quantization_of, transposes
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


@dataclass(eq=False)
class TiledMatrix:
    """A matrix that a kernel may store.

    Attributes:
        reader: the operators behind it.
        store: its store, without layouts.
        replaced: by layout, the nodes that the stored result replaces.
        amaxes: the `amax` operators that take the amaxes of tiles in place of the matrix.
    """

    reader: Reader
    store: Store
    replaced: dict[str, list[fx.Node]] = field(default_factory=dict)
    amaxes: list[fx.Node] = field(default_factory=list)

    @property
    def large_loads(self) -> set[fx.Node]:
        """The loaded nodes that are as large as the matrix."""
        return self.reader.large_loads

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that the kernel computes."""
        return [*(n for nodes in self.replaced.values() for n in nodes), *self.amaxes]

    def agrees(self, other: TiledMatrix) -> bool:
        """Whether nodes that both load are broadcast to both matrices in the same way."""
        return self.reader.agrees(other.reader)

    def stores(self, whole: Concatenation | None) -> Iterator[Store]:
        """The stores of the matrix; that of a part of a concatenation is one of its own."""
        parts = {x for x, nodes in self.replaced.items() if whole and whole.has(nodes)}
        alone = tuple(x for x in self.replaced if x not in parts)
        if alone or self.amaxes:
            yield replace(self.store, layouts=alone or ("amax",))
        for layout in self.replaced:
            if whole and layout in parts:
                (offset,) = (whole.offsets[n] for n in self.replaced[layout] if n in whole.offsets)
                yield replace(self.store, layouts=(layout,), width=whole.width, offset=offset)


@dataclass(eq=False)
class Concatenation:
    """Codes side by side in one matrix.

    Attributes:
        node: the `joined` that concatenates them.
        offsets: the first column of each part.
    """

    node: fx.Node
    offsets: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        widths = [tensor(part).shape[1] for part in self.parts]
        self.offsets = dict(zip(self.parts, accumulate(widths, initial=0), strict=False))

    @property
    def parts(self) -> list[fx.Node]:
        """The codes, from left to right."""
        return list(self.node.args[0])  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """The columns of all parts."""
        return int(tensor(self.node).shape[1])

    def has(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether one of `nodes` is a part."""
        return any(node in self.offsets for node in nodes)


def fuse_tiles(gm: fx.GraphModule, ctx: Context) -> None:
    """Replace quantized and transposed matrices by tile kernels."""
    if not ctx.config.quantizes_linears:  # recipe exact has amaxes, too, and stays as it is
        return
    changed = False
    for find_matrix in (matrix_behind_codes, matrix_of_codes, matrix_behind_amax):
        matrices = [m for n in gm.graph.nodes if (m := find_matrix(n)) is not None]
        groups = dict(enumerate(matrices_by_kernel(matrices)))
        stored_by = {n: i for i, group in groups.items() for m in group for n in m.results}
        for node in gm.graph.find_nodes(op="call_function", target=fp8.joined.default):
            whole = Concatenation(node)
            numbers = sorted({stored_by[part] for part in whole.parts if part in stored_by})
            storing = [groups[i] for i in numbers if i in groups]
            if can_store(whole, storing):
                fuse(storing, whole)
                for i in numbers:
                    del groups[i]
        for group in groups.values():
            fuse([group])
        changed |= bool(matrices)
    if changed:
        graph.sort_and_prune(gm.graph)


def matrix_behind_codes(codes: fx.Node) -> TiledMatrix | None:
    """The matrix of which a node is the codes, None if the tile kernel does not store them."""
    if not is_quantized_operand(codes) or why_no_tiles(codes):
        return None
    x, scale = codes.args[:2]
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
    if not reader.large_loads:
        return None
    by_layout = {"rows": [codes], "columns": transposes(codes)}
    if len(codes.users) == len(by_layout["columns"]):
        del by_layout["rows"]
    names = reader.names
    store = Store(names[x], (), scale=names[scale], format=quantization_of(codes).format.name)
    return TiledMatrix(reader, store, by_layout)


def matrix_of_codes(codes: fx.Node) -> TiledMatrix | None:
    """The matrix of codes that a node is, if they are in memory and needed transposed."""
    if not graph.is_call(codes, fp8.as_codes.default) or not transposes(codes):
        return None
    format = str(codes.args[1])
    if format not in FORMATS_BY_LAYOUT["columns"] or why_not_a_matrix(codes):
        return None
    reader = Reader(codes)
    try:
        reader.load(codes)
    except NotAMatrix:
        return None
    store = Store(reader.names[codes], (), format=format)
    return TiledMatrix(reader, store, {"columns": transposes(codes)})


def matrix_behind_amax(x: fx.Node) -> TiledMatrix | None:
    """The matrix that a node is, if its `amax` is taken and no generated kernel computes it.

    It is computed from groups, or in memory already. In other cases the generated kernel that
    computes the matrix can take its amax as well. None for other nodes.
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
    if not reader.large_loads or ("groups" not in operands and not is_in_memory(x)):
        return None
    return TiledMatrix(reader, Store(reader.names[x], ()), amaxes=amaxes)


def matrices_by_kernel(matrices: Iterable[TiledMatrix]) -> list[list[TiledMatrix]]:
    """The matrices that each kernel stores, first the one with all loads of the others."""
    groups: list[list[TiledMatrix]] = []
    that_load: dict[fx.Node, list[list[TiledMatrix]]] = {}
    for matrix in sorted(matrices, key=lambda m: -len(m.large_loads)):
        for group in that_load.get(min(matrix.large_loads), ()):
            fits = matrix.large_loads <= group[0].large_loads
            fits = fits and all(m.agrees(matrix) for m in group)
            if fits and not depends_on_itself([*group, matrix]):
                group.append(matrix)
                break
        else:
            groups.append([matrix])
            for load in matrix.large_loads:
                that_load.setdefault(load, []).append(groups[-1])
    return groups


def can_store(whole: Concatenation, groups: list[list[TiledMatrix]]) -> bool:
    """Whether the kernels of some groups can store all parts of a concatenation in place.

    Each part must occur once, and have no users but the concatenation and transposes.
    """
    if len(whole.offsets) < len(whole.parts):
        return False
    if any(set(part.users) - {whole.node, *transposes(part)} for part in whole.parts):
        return False
    matrices = [m for group in groups for m in group]
    stored = {n for m in matrices for n in m.results}
    return stored.issuperset(whole.parts) and not depends_on_itself(matrices)


def depends_on_itself(matrices: list[TiledMatrix]) -> bool:
    """Whether a tensor that one of the matrices is computed from depends on another one of them."""
    reads = {n for m in matrices for n in m.reader.loads}
    return len(matrices) > 1 and depends_on(reads, [n for m in matrices for n in m.results])


def fuse(groups: list[list[TiledMatrix]], whole: Concatenation | None = None) -> None:
    """Put one operator in place of groups of matrices, with a program for each group."""
    matrices = [matrix for group in groups for matrix in group]
    if depends_on_itself(matrices):  # through a kernel that was put in place meanwhile
        for matrix in matrices:
            fuse([[matrix]])
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
            else:
                for node in matrix.replaced[layout]:
                    node.replace_all_uses_with(result)
    sort_around(graph.operator_of(results[0]))
