"""Build a graph that computes a chunk of rows. `row_writer.py` adds the operators.

A value of the original graph *has rows* if the product of its leading dimensions is the number of
rows, or the number of rows that remain after a shift (`Shift`). The chunk's graph flattens these
leading dimensions into one. A value from outside the subgraph becomes an input of the chunk's
graph. All chunks share the inputs that do not have rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.graph.nodes import aten, emit, tensor

# Metadata key. It marks a node outside the chunks as a gradient that is computed as if the incoming
# gradient were 1.
UNIT_TANGENT = "fp8pass_unit_tangent"


class NotRowwise(Exception):
    """A subgraph cannot run on chunks of rows. The message is the reason, without "because"."""


def describe(node: fx.Node) -> str:
    """Describe a node by its operator, because the user does not know the names of nodes."""
    is_operator = node.op == "call_function"
    return f"the operator {graph.operator_name(node)}" if is_operator else "an input"


@dataclass(frozen=True)
class Shift:
    """A slice along a leading dimension, such as `x[:, :-1]`, which drops rows at its ends."""

    lead: tuple[Any, ...]  # the sizes of the leading dimensions of the unsliced value
    dim: int  # the index of the sliced dimension
    # before and after: how many elements of `dim` the slice drops at the start and at the end.
    before: int
    after: int

    @property
    def remaining(self) -> tuple[Any, ...]:
        """The sizes of the leading dimensions of the sliced value."""
        size = self.lead[self.dim] - self.before - self.after
        return (*self.lead[: self.dim], size, *self.lead[self.dim + 1 :])

    @property
    def end(self) -> int:
        """The `end` argument of the slice: `-after`, or the largest integer if `after` is 0."""
        return -self.after if self.after else torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class RowLayout:
    """How the rows of a value are arranged."""

    dims: int  # the number of leading dimensions whose product is the number of rows
    shifted: bool  # whether the value has only the rows that remain after the shift


class RowGraph:
    """The graph `body`, which computes a subgraph for any number of rows, and the body's inputs.

    Args:
        rows: the total number of rows.
        example: the number of rows that fake values in the body have.
        outside: maps a value that the subgraph reads to the node that is passed to the body.
        emit_outside: adds a node outside the body, which prepares an input.
        as_arguments: converts a shape, which may be symbolic, to arguments of a node outside the
            body.

    Attributes:
        body: the graph.
        row_inputs: maps each outside value that has rows to its placeholder in the body.
        shared_inputs: maps each outside value that all rows share to its placeholder in the body.
        sums: the nodes of the subgraph that are sums over rows.
    """

    def __init__(
        self,
        rows: Any,
        example: Any,
        outside: Callable[[fx.Node], fx.Node],
        emit_outside: Callable[..., fx.Node],
        as_arguments: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        self.rows, self.example = rows, example
        self.outside, self.emit_outside, self.as_arguments = outside, emit_outside, as_arguments
        self.body = fx.Graph()
        self.row_inputs: dict[fx.Node, fx.Node] = {}
        self.shared_inputs: dict[fx.Node, fx.Node] = {}
        self.sums: set[fx.Node] = set()
        self.shift: Shift | None = None
        self._part: set[fx.Node] = set()
        self._written: dict[fx.Node, fx.Node] = {}
        self._sums: dict[fx.Node, fx.Node] = {}  # no other node of the body may read a sum
        self._shared: set[fx.Node] = set()  # nodes of the body without a dimension for rows
        self._prepared: dict[tuple[Any, ...], fx.Node] = {}

    def __getitem__(self, node: fx.Node) -> fx.Node:
        """Return the body's node for a node of the subgraph.

        For a sum over rows, the body's node is the sum over the rows of one chunk.
        """
        return self._sums.get(node) or self._written[node]

    def finish(self, results: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Add the output node. Return the body's arguments: values with rows, and shared values."""
        rows, shared = self.row_inputs, self.shared_inputs
        for placeholder in reversed([*rows.values(), *shared.values()]):
            next(iter(self.body.nodes)).prepend(placeholder)
        self.body.output(tuple(self[n] for n in results))
        return list(rows), list(shared)

    def restore(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Reshape `result`, [T, ...], to the shape of `node`. Drop the rows that `node` lacks."""
        if self.layout(node).shifted:
            assert self.shift is not None
            shift, (*_, rest) = self.shift, self._split(node)
            result = self._reshape_outside(result, (*shift.lead, *rest))
            result = self.emit_outside(
                aten.slice.Tensor, result, shift.dim, shift.before, shift.end
            )
        return self._reshape_outside(result, tuple(tensor(node).shape))

    def layout(self, node: fx.Node) -> RowLayout:
        """Return the layout of a value; raise NotRowwise if it does not have rows."""
        shape = tuple(tensor(node).shape)
        counts = [(self.rows, False)]
        if self.shift is not None:
            counts.append((math.prod(self.shift.remaining), True))
        for count, shifted in counts:
            for dims in range(1, len(shape) + 1):
                if compat.statically_known_true(math.prod(shape[:dims]) == count):
                    return RowLayout(dims, shifted)
        raise NotRowwise(f"{describe(node)} needs all tokens at once")

    def _split(self, node: fx.Node) -> tuple[RowLayout, tuple[Any, ...], tuple[int, ...]]:
        layout, shape = self.layout(node), tuple(tensor(node).shape)
        rest = shape[layout.dims :]
        if not all(isinstance(size, int) for size in rest):
            raise NotRowwise(f"{describe(node)} has dynamic sizes besides the number of tokens")
        return layout, shape[: layout.dims], rest

    def _require_same_rows(self, x: Any, other: Any) -> None:
        dims = self.layout(x).dims
        shapes = (tensor(n).shape[:dims] for n in (x, other))
        if not _same_shape(*shapes):
            raise NotRowwise(f"{describe(other)} and {describe(x)} order tokens differently")

    def _row_operand(self, operand: Any) -> fx.Node:
        if operand in self._written:
            written = self._written[operand]
            if written in self._shared:
                raise NotRowwise(f"{describe(operand)} has one result for all tokens")
            return written
        self._require_outside(operand)
        return self._row_input(operand, *self._split(operand))

    def _broadcast_operand(self, operand: Any, node: fx.Node) -> Any:
        if not isinstance(operand, fx.Node):
            return operand
        if graph.value(operand) is None:
            raise NotRowwise(f"{describe(node)} has an operand that is not a tensor")
        layout, lead, rest = self._split(node)
        if operand in self._written:
            written = self._written[operand]
            if written not in self._shared:
                same = self.layout(operand).shifted == layout.shifted
                if not same or tensor(written).ndim != 1 + len(rest):
                    raise NotRowwise(f"{describe(node)} moves tokens to other positions")
            return written
        self._require_outside(operand)
        shape = tuple(tensor(operand).shape)
        start = max(0, len(shape) - len(rest))
        if all(compat.statically_known_true(size == 1) for size in shape[:start]):
            return self._shared_input(operand, shape[start:])
        return self._row_input(operand, layout, lead, shape[start:])

    def _require_outside(self, operand: fx.Node) -> None:
        if operand in self._part:
            raise NotRowwise(f"{describe(operand)} needs all tokens at once")

    def _shared_input(self, operand: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
        base, flipped = graph.skip_transposes(operand)
        if base is not operand:  # a weight and its transpose share one input
            x = self._shared_input(base, tuple(tensor(base).shape))
            return self._emit(aten.permute.default, x, [1, 0], like=operand) if flipped else x
        source = self._reshape_outside(self.outside(operand), shape)
        if source not in self.shared_inputs:
            self.shared_inputs[source] = self._placeholder(source, tensor(source))
            self._shared.add(self.shared_inputs[source])
        return self.shared_inputs[source]

    def _row_input(
        self, operand: fx.Node, layout: RowLayout, lead: Sequence[Any], rest: Sequence[Any]
    ) -> fx.Node:
        """Expand an operand to the shape (*lead, *rest), and return the body's input for it.

        If a shift has dropped rows of the operand, zeros are inserted for these rows.
        """
        key = operand, layout.shifted, *map(str, (*lead, *rest))
        if key not in self._prepared:
            x, shape = self.outside(operand), (*lead, *rest)
            if not _same_shape(tensor(x).shape, shape):
                x = self.emit_outside(aten.expand.default, x, self.as_arguments(shape))
            x = self._pad_shifted(x, rest) if layout.shifted else x
            self._prepared[key] = self._reshape_outside(x, (self.rows, *rest))
        return self._placeholder_of_rows(self._prepared[key], rest)

    def _shift_mask(self, node: fx.Node, ndim: int) -> fx.Node:
        """Return a mask [c, 1, ...] that is True in the rows that remain after the shift."""
        assert self.shift is not None
        rest = [1] * (ndim - 1)
        key = ("shift", ndim)
        if key not in self._prepared:
            sizes, device = self.as_arguments(self.shift.remaining), tensor(node).device
            with compat.fake_mode_of(tensor(node)):
                mask = self.emit_outside(
                    aten.full.default, sizes, True, dtype=torch.bool, device=device
                )
            mask = self._pad_shifted(mask, ())
            self._prepared[key] = self._reshape_outside(mask, (self.rows, *rest))
        return self._placeholder_of_rows(self._prepared[key], rest)

    def _pad_shifted(self, x: fx.Node, rest: Sequence[Any]) -> fx.Node:
        shift = self.shift
        assert shift is not None
        x = self._reshape_outside(x, (*shift.remaining, *rest))
        inner = [0, 0] * (len(shift.lead) + len(rest) - shift.dim - 1)
        pad = [*inner, shift.before, shift.after]
        return self.emit_outside(aten.constant_pad_nd.default, x, pad)

    def _reshape_outside(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        if _same_shape(tensor(x).shape, shape):
            return x
        return self.emit_outside(aten.reshape.default, x, self.as_arguments(shape))

    def _placeholder_of_rows(self, source: fx.Node, rest: Sequence[Any]) -> fx.Node:
        if source not in self.row_inputs:
            fake = tensor(source).new_empty((self.example, *rest))
            self.row_inputs[source] = self._placeholder(source, fake)
        return self.row_inputs[source]

    def _placeholder(self, source: fx.Node, fake: torch.Tensor) -> fx.Node:
        # Passes recognize gradients by AOTAutograd's placeholder names, `tangents_1` etc.
        prefix = "tangents" if source.meta.get(UNIT_TANGENT) else "primals"
        number = len(self.row_inputs) + len(self.shared_inputs) + 1
        first = next((n for n in self.body.nodes if n.op != "placeholder"), self.body._root)
        with self.body.inserting_before(first):
            node = self.body.placeholder(f"{prefix}_{number}")
        node.meta = {"val": fake}
        return node

    def _emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        read: list[fx.Node] = []
        fx.map_arg((args, kwargs), read.append)
        if any(n.graph is not self.body for n in read):
            raise NotRowwise(f"{describe(like)} depends on dynamic sizes")
        node = emit(self.body, target, *args, like=like, **kwargs)
        if read and self._shared.issuperset(read):
            self._shared.add(node)
        return node

    def _view_rows(self, x: fx.Node, rest: tuple[int, ...], node: fx.Node) -> fx.Node:
        if tuple(tensor(x).shape[1:]) == rest:
            return x
        return self._emit(aten.view.default, x, [-1, *rest], like=node)

    def _set_shift(
        self, lead: tuple[Any, ...], dim: int, start: Any = None, end: Any = None
    ) -> None:
        shift = Shift(lead, dim, *_dropped(start, end, lead[dim]))
        if self.shift is not None and str(self.shift) != str(shift):
            raise NotRowwise("the loss shifts tokens in two ways")
        self.shift = shift


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    known = compat.statically_known_true
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def _dropped(start: Any, end: Any, size: Any) -> tuple[int, int]:
    """Return how many of `size` elements a slice drops at the start and at the end."""
    if isinstance(size, int):
        first, last, _ = slice(start, end).indices(size)
        return first, size - last
    first = 0 if start is None else start
    last = 0 if end is None or end == torch.iinfo(torch.int64).max else end
    if not (isinstance(first, int) and isinstance(last, int) and first >= 0 >= last):
        raise NotRowwise("the loss shifts tokens by a dynamic number")
    return first, -last
