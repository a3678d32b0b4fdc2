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

Codes that `joined` puts side by side are stored there, each by its own kernel:

    before   a = quantize(x, s);  b = quantize(y, t);  c = joined([a, b])
    after    c = tiles([s, x, t, y], [program, program])

What a kernel does not take stays as it is, for `lowering.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer
from fp8pass.codegen.kernels.limits import LARGEST_INPUTS, why_no_tiles, why_not_a_matrix
from fp8pass.codegen.kernels.tiles import tiles
from fp8pass.codegen.program.emit import emit_kernel
from fp8pass.codegen.program.ir import NotAMatrix, Store
from fp8pass.codegen.program.reader import Reader
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import tensor
from fp8pass.graph.order import depends
from fp8pass.graph.patterns import transposes
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass


@dataclass(eq=False)
class Matrix:
    """What one kernel may store of a matrix.

    Attributes:
        reader: the operators behind it.
        store: what is stored, but for the layouts.
        replaced: by layout, the nodes that a result stands for.
        measured: `amax` operators that take the result in place of the matrix.
    """

    reader: Reader
    store: Store
    replaced: dict[str, list[fx.Node]] = field(default_factory=dict)
    measured: list[fx.Node] = field(default_factory=list)

    @property
    def large(self) -> set[fx.Node]:
        """What is read that is as large as the matrix."""
        return self.reader.large

    @property
    def results(self) -> list[fx.Node]:
        """The nodes that come from the kernel."""
        return [*(n for nodes in self.replaced.values() for n in nodes), *self.measured]

    def agrees(self, other: Matrix) -> bool:
        """Whether what both read lies in both alike."""
        return self.reader.agrees(other.reader)

    def stores(self, joint: Joint | None) -> Iterator[Store]:
        """What is stored, with what lies in a joint result apart."""
        apart = {x for x, nodes in self.replaced.items() if joint and joint.has(nodes)}
        alone = tuple(x for x in self.replaced if x not in apart)
        if alone or self.measured:
            yield replace(self.store, layouts=alone or ("amax",))
        for layout in self.replaced:
            if joint and layout in apart:
                (offset,) = (joint.offsets[n] for n in self.replaced[layout] if n in joint.offsets)
                yield replace(self.store, layouts=(layout,), width=joint.width, offset=offset)


@dataclass(eq=False)
class Joint:
    """What `joined` puts side by side.

    Attributes:
        node: the `joined`.
        offsets: in which of its columns each part begins.
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
        """Columns of all."""
        return int(tensor(self.node).shape[1])

    def has(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether one of `nodes` is a part."""
        return any(node in self.offsets for node in nodes)


def fuse_tiles(gm: fx.GraphModule, ctx: Context) -> None:
    """Replace quantized and transposed matrices by tile kernels."""
    changed = False
    for read in (read_codes, read_measured):
        matrices = [m for n in gm.graph.nodes if (m := read(n)) is not None]
        groups = grouped(matrices)
        for node in gm.graph.find_nodes(op="call_function", target=fp8.joined.default):
            joint = Joint(node)
            if parts := groups_behind(joint, groups):
                groups = [group for group in groups if group not in parts]
                fuse(parts, joint)
        for group in groups:
            fuse([group])
        changed |= bool(matrices)
    if changed:
        graph.settle(gm)


def read_codes(codes: fx.Node) -> Matrix | None:
    """The matrix behind `codes`, None if no kernel here stores them."""
    if not graph.is_call(codes, fp8.quantize.default) or why_no_tiles(codes):
        return None
    x, scale, format = codes.args
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
    if not reader.large:
        return None
    by_layout = {"rows": [codes], "columns": transposes(codes)}
    if len(codes.users) == len(by_layout["columns"]):
        del by_layout["rows"]
    names = reader.names
    store = Store(names[x], (), scale=names[scale], format=str(format))
    return Matrix(reader, store, by_layout)


def read_measured(x: fx.Node) -> Matrix | None:
    """A matrix of which `amax` is taken: computed from groups, or at hand.

    What is computed otherwise has its amax taken by the generated kernel that computes it.
    """
    amaxes = [u for u in x.users if u.target is fp8.amax.default]
    if not amaxes or tensor(x).ndim != 2 or why_not_a_matrix(x):
        return None
    reader = Reader(x)
    try:
        reader.read(x)
    except NotAMatrix:
        return None
    operands = {load.operand for load in reader.loads.values()}
    if not reader.large or ("groups" not in operands and not is_at_hand(x)):
        return None
    return Matrix(reader, Store(reader.names[x], ()), measured=amaxes)


def is_at_hand(x: fx.Node) -> bool:
    """Whether a matrix is in memory without a generated kernel that could take its amax."""
    while kind(x) is Kind.VIEW or graph.is_call(x, buffer):
        x = x.args[0]  # type: ignore[assignment]
    return kind(graph.operator_of(x)) in (Kind.INPUT, Kind.GEMM, Kind.ATTENTION)


def grouped(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Matrices that one kernel stores: none reads more than the first, which reads most."""
    groups: list[list[Matrix]] = []
    for matrix in sorted(matrices, key=lambda m: -len(m.large)):
        for group in groups:
            fits = matrix.large <= group[0].large and all(m.agrees(matrix) for m in group)
            if fits and not needs_itself([*group, matrix]):
                group.append(matrix)
                break
        else:
            groups.append([matrix])
    return groups


def groups_behind(joint: Joint, groups: list[list[Matrix]]) -> list[list[Matrix]]:
    """The groups whose kernels store all of a joint result, none if there are no such.

    Each part is stored once, and for nothing else.
    """
    if len(joint.offsets) < len(joint.parts):
        return []
    if any(set(part.users) - {joint.node, *transposes(part)} for part in joint.parts):
        return []
    found = [group for group in groups if any(joint.has(m.results) for m in group)]
    matrices = [m for group in found for m in group]
    stored = {n for m in matrices for n in m.results}
    return [] if set(joint.parts) - stored or needs_itself(matrices) else found


def needs_itself(matrices: list[Matrix]) -> bool:
    """Whether what kernels read depends on what they store.

    A single matrix is computed from what is read for it, so only several can.
    """
    reads = {n for m in matrices for n in m.reader.loads}
    return len(matrices) > 1 and depends(reads, [n for m in matrices for n in m.results])


def fuse(groups: list[list[Matrix]], joint: Joint | None = None) -> None:
    """Put one operator in place of groups, with a kernel for each."""
    matrices = [matrix for group in groups for matrix in group]
    if needs_itself(matrices):  # by way of a kernel that was put in place meanwhile
        for matrix in matrices:
            fuse([[matrix]])
        return
    stores = [(matrix, store) for matrix in matrices for store in matrix.stores(joint)]
    parts = [
        ([m.reader for m in group], [store for m, store in stores if m in group])
        for group in groups
    ]
    results = iter(emit_kernel(tiles, parts, like=matrices[0].reader.matrix))
    for matrix, store in stores:
        for layout in store.layouts:
            result = next(results)
            if store.width and joint:
                joint.node.replace_all_uses_with(result)
            elif layout == "amax":
                for amax in matrix.measured:
                    amax.update_arg(0, result)
            else:
                for node in matrix.replaced[layout]:
                    node.replace_all_uses_with(result)
