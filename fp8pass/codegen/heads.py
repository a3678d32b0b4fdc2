"""Reads what lies in the heads of attention, as rotary embeddings do, into a program.

    before   p = mul(x, cos);  m = mul(x, sin)             x [B, H, S, D], cos and sin [S, D]
             r = cat([slice(m, D / 2, D), neg(slice(m, 0, D / 2))])
             y = view(permute(add(p, r), [0, 2, 1, 3]), [B, S, H * D])
    after    y = x * cos + where(in_head(0, D / 2), m', -m')
             m' = rolled(x, D / 2) * rolled(sin, D / 2)    x a matrix of H * D columns, cos a table

The gradients of queries and keys come so from attention to the linear layers that made them. What
moves columns within a head becomes operands with rolled columns, and conditions that say where each
holds; a kernel then rotates while it quantizes, and the rotated gradient is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.program import Load, NotAMatrix, Step, pieces_of_heads
from fp8pass.codegen.triton_ops import is_pointwise
from fp8pass.graph import CASTS, RESHAPES, aten, tensor
from fp8pass.passes.classify import Kind, kind

# Operators that change how a value lies in memory, but neither shape nor value.
_COPIES = CASTS | {aten.clone.default, aten.alias.default, aten.detach.default}
# Operators that take columns, or put them together.
_MOVES = {aten.slice.Tensor, aten.cat.default, aten.slice_scatter.default}
# What generated code computes where it is used, and does not store.
_INLINED = {Kind.POINTWISE, Kind.MOVEMENT, Kind.CREATION, Kind.QUANTIZE, Kind.RANDOM}
# Into how many pieces kernels cut heads: each is computed by code of its own.
PIECES = 1, 2, 4
_true = compat.statically_known_true


class Place(NamedTuple):
    """Where the elements of a node lie in the matrix.

    Attributes:
        axes: the node's dimensions in the order of the matrix: rows, heads, columns of a head. They
            are counted from the last, so that a table of fewer dimensions has the same.
        shift: column c of a head has the node's element (c + shift) mod D, if it has so many.
    """

    axes: tuple[int, ...]
    shift: int

    def moved(self, columns: int, head: int) -> Place:
        """The place whose columns lie further to the right in the node."""
        return self._replace(shift=(self.shift + columns) % head)


@dataclass
class HeadReader:
    """The operators behind one matrix of heads.

    Steps are named by node and shift. That is enough, although a node may lie in the matrix in two
    orders: what it is computed from would be read in two, and that is refused.

    Attributes:
        matrix: what is read, [..., H, D] with as many elements and as many columns as the matrix
            that a kernel works on.
        orders: the dimensions of what is read from memory, from the outermost to the innermost as
            the matrix has them.
    """

    matrix: fx.Node
    loads: dict[fx.Node, Load] = field(default_factory=dict)
    steps: dict[fx.Node, list[Step]] = field(default_factory=dict)
    orders: dict[fx.Node, list[int]] = field(default_factory=dict)
    _names: dict[tuple[fx.Node, Place], str] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Sizes in the order of the matrix."""
        return tuple(tensor(self.matrix).shape)

    @property
    def head(self) -> int:
        """Columns of a head."""
        return int(self.sizes[-1])

    def read(self) -> str:
        """The name of the matrix's value; raises NotAMatrix."""
        name = self._read(self.matrix, Place(tuple(range(-len(self.sizes), 0)), 0))
        steps = (step for steps in self.steps.values() for step in steps)
        if pieces_of_heads(self.loads.values(), steps)[1] not in PIECES:
            raise NotAMatrix
        return name

    def _read(self, node: fx.Node, place: Place) -> str:
        key = node, place
        if key not in self._names:
            computed = self._compute(node, place) if self._is_full(node, place) else None
            self._names[key] = computed or self._loaded(node, place)
        return self._names[key]

    def _compute(self, node: fx.Node, place: Place) -> str | None:
        """The value of an operator that moves columns, or is pointwise; None if it is neither."""
        args: Any = node.args
        if node.target in _COPIES and _is_float(node) and _is_float(args[0]):
            return self._read(args[0], place)
        if node.target is aten.expand.default and self._width(args[0], place) != 1:
            return self._read(args[0], place)
        if node.target is aten.permute.default:
            ndim = len(place.axes)
            moved = [dim % ndim - ndim for dim in args[1]]
            return self._read(args[0], place._replace(axes=tuple(moved[a] for a in place.axes)))
        if node.target in _MOVES:
            return self._compute_move(node, place)
        if is_pointwise(node):
            values = [self._operand(x, node, place) for x in args]
            return self._step(node, place, str(node.target), *values)
        return None

    def _operand(self, x: Any, node: fx.Node, place: Place) -> str | float:
        """An operand of a pointwise operator; raises NotAMatrix if it has one column for all."""
        if not isinstance(x, fx.Node):
            return float(x)
        if not _is_scalar(x) and self._width(x, place) != self._width(node, place):
            raise NotAMatrix
        return self._read(x, place)

    def _compute_move(self, node: fx.Node, place: Place) -> str:
        args: Any = node.args
        if node.kwargs:
            raise NotAMatrix
        if node.target is aten.slice.Tensor:
            return self._slice(place, *args)
        if node.target is aten.cat.default:
            return self._cat(node, place, *args)
        return self._slice_scatter(node, place, *args)

    def _slice(self, place: Place, x: fx.Node, dim: int = 0, *bounds: Any) -> str:
        _check_columns(dim, place)
        start, _ = _bounds(bounds, self._width(x, place))
        return self._read(x, place.moved(start, self.head))

    def _cat(self, node: fx.Node, place: Place, pieces: list[fx.Node], dim: int = 0) -> str:
        _check_columns(dim, place)
        found, start = [], 0
        for piece in pieces:
            end = start + self._width(piece, place)
            found.append((self._read(piece, place.moved(-start, self.head)), start, end))
            start = end
        result = found.pop()[0]
        for number, inside in enumerate(found):
            result = self._where(node, place, inside, result, number)
        return result

    def _slice_scatter(
        self, node: fx.Node, place: Place, base: fx.Node, x: fx.Node, dim: int = 0, *bounds: Any
    ) -> str:
        _check_columns(dim, place)
        start, end = _bounds(bounds, self._width(node, place))
        inside = self._read(x, place.moved(-start, self.head))
        return self._where(node, place, (inside, start, end), self._fill(base, place))

    def _fill(self, base: fx.Node, place: Place) -> str | float:
        """What `slice_scatter` leaves as it was: a constant or a value; raises NotAMatrix."""
        if not graph.is_call(base, aten.full.default):
            return self._read(base, place)
        number = base.args[1]
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise NotAMatrix
        return float(number)

    def _where(
        self,
        node: fx.Node,
        place: Place,
        inside: tuple[str, int, int],
        outside: str | float,
        number: int = 0,
    ) -> str:
        """The value that is `inside` in some columns of the node, and `outside` in the others."""
        value, start, end = inside
        holds = f"{node.name}@{place.shift}?{number}"
        condition = Step(holds, "in_head", (value, self.head, place.shift, start, end))
        self.steps[node] = [*self.steps.get(node, []), condition]
        return self._step(node, place, "aten.where.self", holds, value, outside, number=number)

    def _step(self, node: fx.Node, place: Place, target: str, *args: Any, number: int = 0) -> str:
        name = f"{node.name}@{place.shift}.{number}"
        self.steps[node] = [*self.steps.get(node, []), Step(name, target, args)]
        return name

    def _loaded(self, node: fx.Node, place: Place) -> str:
        """The value of `node`, read from memory; raises NotAMatrix."""
        if not _is_float(node) or tensor(node).device != tensor(self.matrix).device:
            raise NotAMatrix
        load = self._load(node, place)
        self.loads[node] = load
        if load.operand == "scalar" or not place.shift:
            return load.name
        rolled = Step(f"{node.name}@{place.shift}", "rolled", (load.name, self.head, place.shift))
        self.steps[node] = [*self.steps.get(node, []), rolled]
        return rolled.name

    def _load(self, node: fx.Node, place: Place) -> Load:
        """How `node` lies in the matrix; raises NotAMatrix if it does not."""
        if _is_scalar(node):
            return Load(node.name, "scalar")
        ndim = tensor(node).ndim
        order = [axis + ndim for axis in place.axes if axis >= -ndim]
        if self.orders.setdefault(node, order) != order:
            raise NotAMatrix  # it is read in two orders
        *rows, heads, columns = self._sizes_of(node, place)
        if not _true(columns == self.head):
            raise NotAMatrix
        if self._is_full(node, place):
            if not _is_in_memory(node, order):
                raise NotAMatrix
            return Load(node.name, "full")
        if not _true(heads == 1):
            raise NotAMatrix
        return Load(node.name, "table", head=self.head, period=self._period(rows))

    def _period(self, rows: list[Any]) -> int:
        """After how many rows a table of such rows repeats, 0 if after all; raises NotAMatrix."""
        while rows and _true(rows[0] == 1):
            rows = rows[1:]
        matrix = self.sizes[:-2]
        if not all(_true(a == b) for a, b in zip(rows[::-1], matrix[::-1], strict=False)):
            raise NotAMatrix
        if _true(math.prod(rows) == math.prod(matrix)):
            return 0
        if not all(isinstance(size, int) for size in rows):
            raise NotAMatrix
        return math.prod(rows)

    def _is_full(self, node: fx.Node, place: Place) -> bool:
        """Whether `node` has all rows and heads, of which it may have fewer columns."""
        if graph.value(node) is None or tensor(node).ndim != len(place.axes):
            return False
        sizes = zip(self._sizes_of(node, place)[:-1], self.sizes[:-1], strict=True)
        return all(_true(a == b) for a, b in sizes)

    def _width(self, node: fx.Node, place: Place) -> int:
        """Columns of a head that a node has; raises NotAMatrix if they vary, or are too many."""
        width = self._sizes_of(node, place)[-1]
        if not isinstance(width, int) or width > self.head:
            raise NotAMatrix
        return width

    def _sizes_of(self, node: fx.Node, place: Place) -> list[Any]:
        """A node's sizes in the order of the matrix, 1 where it has no such dimension."""
        shape = tensor(node).shape
        if len(shape) > len(place.axes):
            raise NotAMatrix
        return [shape[axis] if axis >= -len(shape) else 1 for axis in place.axes]


def heads_behind(view: fx.Node) -> fx.Node | None:
    """The matrix of heads of which `view` is a matrix of all their columns."""
    if view.target not in RESHAPES:
        return None
    source: Any = view.args[0]
    shape, columns = tensor(source).shape, tensor(view).shape[-1]
    if len(shape) < 3 or not all(isinstance(size, int) for size in (columns, *shape[-2:])):
        return None
    heads, width = shape[-2:]
    return source if heads > 1 and width > 1 and heads * width == columns else None


def _is_in_memory(node: fx.Node, order: list[int]) -> bool:
    """Whether a kernel can read `node` as a matrix without having it stored, or copied, before."""
    base: Any = node
    while kind(base) is Kind.VIEW and not graph.is_getitem(base):
        base = base.args[0]
    if kind(base) is Kind.REDUCTION:  # stored in any order that is asked for
        return True
    return kind(base) not in _INLINED and tensor(node).permute(order).is_contiguous()


def _check_columns(dim: int, place: Place) -> None:
    """Raise NotAMatrix unless `dim` is that of the columns of a head."""
    if dim not in (place.axes[-1], place.axes[-1] + len(place.axes)):
        raise NotAMatrix


def _bounds(args: Sequence[Any], size: int) -> tuple[int, int]:
    """Where a slice of columns begins and ends; raises NotAMatrix if it skips some, or varies."""
    start, end, step = (*args, None, None, None)[:3]
    if step not in (None, 1) or not all(isinstance(x, int | None) for x in (start, end)):
        raise NotAMatrix
    first, last, _ = slice(start, end).indices(size)
    return first, last


def _is_scalar(node: fx.Node) -> bool:
    return graph.value(node) is not None and _true(tensor(node).numel() == 1)


def _is_float(node: Any) -> bool:
    val = graph.value(node) if isinstance(node, fx.Node) else None
    return val is not None and val.dtype in (torch.float32, torch.bfloat16, torch.float16)
