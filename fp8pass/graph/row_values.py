"""Values that have rows, and a graph of their own for some of these: `by_rows.py` writes it.

A value has rows if its leading dimensions multiply to as many as there are, or to as many as a
shift leaves of them. In the graph it has one dimension for them, which comes first. What is read
from outside is an input: of all rows, flattened, or shared by them all.
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

# On a node outside of a part: that it is what a gradient from outside would be, were that one.
UNIT_TANGENT = "fp8pass_from_tangents"


class NotRowwise(Exception):
    """Part of a graph cannot be computed row by row; the message says why, after "because"."""


def named(node: fx.Node) -> str:
    """A node in a message, by what its user wrote: names of nodes are ours."""
    is_operator = node.op == "call_function"
    return f"the operator {graph.operator_name(node)}" if is_operator else "an input"


@dataclass(frozen=True)
class Shift:
    """The rows that a slice of leading dimension `dim` leaves: not those `before` and `after`."""

    lead: tuple[Any, ...]
    dim: int
    before: int
    after: int

    @property
    def left(self) -> tuple[Any, ...]:
        """The leading dimensions of what is left."""
        size = self.lead[self.dim] - self.before - self.after
        return (*self.lead[: self.dim], size, *self.lead[self.dim + 1 :])

    @property
    def end(self) -> int:
        """Where the slice ends, counted from the end of the dimension."""
        return -self.after if self.after else torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Form:
    """How a value has rows: its first `dims` dimensions are; `shifted`, of those that are left."""

    dims: int
    shifted: bool


class RowGraph:
    """A graph of its own, `body`, for any number of rows of a part of a graph, and its inputs.

    Args:
        rows: how many rows all of them are.
        example: how many the fake values in the body have.
        outside: what stands for a value that the part reads from outside.
        emit_outside: adds a node outside, which prepares such a value.
        sizes: a shape as arguments of a node outside.

    Attributes:
        body: the graph so far.
        row_inputs, shared_inputs: the nodes outside whose values are the body's inputs: those that
            have rows, flattened, and those that all rows share; each with the input.
        sums: the nodes of the part whose result is a sum over rows.
    """

    def __init__(
        self,
        rows: Any,
        example: Any,
        outside: Callable[[fx.Node], fx.Node],
        emit_outside: Callable[..., fx.Node],
        sizes: Callable[[Sequence[Any]], list[Any]],
    ) -> None:
        self.rows, self.example = rows, example
        self.outside, self.emit_outside, self.sizes = outside, emit_outside, sizes
        self.body = fx.Graph()
        self.row_inputs: dict[fx.Node, fx.Node] = {}
        self.shared_inputs: dict[fx.Node, fx.Node] = {}
        self.sums: set[fx.Node] = set()
        self.shift: Shift | None = None
        self._part: set[fx.Node] = set()
        self._written: dict[fx.Node, fx.Node] = {}
        self._sums: dict[fx.Node, fx.Node] = {}  # which no other node of the part may read
        self._shared: set[fx.Node] = set()  # nodes of the body without a dimension for rows
        self._prepared: dict[tuple[Any, ...], fx.Node] = {}

    def __getitem__(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the part in the body; for a sum, that over the body's rows."""
        return self._sums.get(node) or self._written[node]

    def finish(self, results: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """End the body with what stands for `results`; the values that are its inputs, in order:
        those that have rows, then those that all rows share."""
        rows, shared = self.row_inputs, self.shared_inputs
        for placed in reversed([*rows.values(), *shared.values()]):
            next(iter(self.body.nodes)).prepend(placed)
        self.body.output(tuple(self[n] for n in results))
        return list(rows), list(shared)

    def restored(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """A result of all rows, [T, ...], as the node that it stands for was: in its shape."""
        val = tensor(node)
        form = self.form(node)
        if form.shifted:
            assert self.shift is not None
            *_, rest = self._split(node)
            shift = self.shift
            result = self._reshaped(result, (*shift.lead, *rest))
            result = self.emit_outside(
                aten.slice.Tensor, result, shift.dim, shift.before, shift.end
            )
        return self._reshaped(result, tuple(val.shape))

    # Forms.

    def form(self, node: fx.Node) -> Form:
        """How a value has rows."""
        found = self._form_of(tuple(tensor(node).shape))
        if found is None:
            raise NotRowwise(f"{named(node)} needs all tokens")
        return found

    def _form_of(self, shape: tuple[Any, ...]) -> Form | None:
        counts = [(self.rows, False)]
        if self.shift is not None:
            counts.append((math.prod(self.shift.left), True))
        for count, shifted in counts:
            for dims in range(1, len(shape) + 1):
                if compat.statically_known_true(math.prod(shape[:dims]) == count):
                    return Form(dims, shifted)
        return None

    def _split(self, node: fx.Node) -> tuple[Form, tuple[Any, ...], tuple[int, ...]]:
        """A value's form, its leading dimensions and the others, which do not vary."""
        form, shape = self.form(node), tuple(tensor(node).shape)
        rest = shape[form.dims :]
        if not all(isinstance(size, int) for size in rest):
            raise NotRowwise(f"{named(node)} has sizes that vary besides the number of tokens")
        return form, shape[: form.dims], rest

    # Operands.

    def _rows(self, operand: Any) -> fx.Node:
        """An operand of its own rows."""
        if operand in self._written:
            written = self._written[operand]
            if written in self._shared:
                raise NotRowwise(f"{named(operand)} has one result for all tokens")
            return written
        self._require_outside(operand)
        form, lead, rest = self._split(operand)
        return self._input(operand, form, lead, rest)

    def _aligned(self, operand: Any, node: fx.Node) -> Any:
        """An operand that is broadcast to the shape of a node."""
        if not isinstance(operand, fx.Node):
            return operand
        if graph.value(operand) is None:
            raise NotRowwise(f"{named(node)} computes with what is no tensor")
        form, lead, rest = self._split(node)
        if operand in self._written:
            written = self._written[operand]
            if written not in self._shared:
                same = self.form(operand).shifted == form.shifted
                if not same or tensor(written).ndim != 1 + len(rest):
                    raise NotRowwise(f"{named(node)} moves tokens to other places")
            return written
        self._require_outside(operand)
        shape = tuple(tensor(operand).shape)
        start = max(0, len(shape) - len(rest))
        if all(compat.statically_known_true(size == 1) for size in shape[:start]):
            return self._shared_input(operand, shape[start:])
        return self._input(operand, form, lead, shape[start:])

    def _require_outside(self, operand: fx.Node) -> None:
        if operand in self._part:
            raise NotRowwise(f"{named(operand)} needs all tokens")

    def _shared_input(self, operand: fx.Node, shape: tuple[Any, ...]) -> fx.Node:
        base, flipped = graph.skip_transposes(operand)
        if base is not operand:  # one input for a weight and its transpose
            x = self._shared_input(base, tuple(tensor(base).shape))
            return self._emit(aten.permute.default, x, [1, 0], like=operand) if flipped else x
        source = self._reshaped(self.outside(operand), shape)
        if source not in self.shared_inputs:
            placed = self._placeholder(source, tensor(source))
            self.shared_inputs[source] = placed
            self._shared.add(placed)
        return self.shared_inputs[source]

    def _input(
        self, operand: fx.Node, form: Form, lead: Sequence[Any], rest: Sequence[Any]
    ) -> fx.Node:
        """The input for a value that has rows, expanded to `lead` and filled up for a shift."""
        key = operand, form.shifted, *map(str, (*lead, *rest))
        if key not in self._prepared:
            x = self.outside(operand)
            shape = (*lead, *rest)
            if not _same_shape(tensor(x).shape, shape):
                x = self.emit_outside(aten.expand.default, x, self.sizes(shape))
            if form.shifted:
                x = self._filled_up(x, rest)
            self._prepared[key] = self._reshaped(x, (self.rows, *rest))
        source = self._prepared[key]
        if source not in self.row_inputs:
            fake = tensor(source).new_empty((self.example, *rest))
            self.row_inputs[source] = self._placeholder(source, fake)
        return self.row_inputs[source]

    def _filled_up(self, x: fx.Node, rest: Sequence[Any]) -> fx.Node:
        """A value of the rows that a shift leaves, with zeros for the others."""
        shift = self.shift
        assert shift is not None
        x = self._reshaped(x, (*shift.left, *rest))
        after = [0, 0] * (len(shift.lead) + len(rest) - shift.dim - 1)
        pad = [*after, shift.before, shift.after]
        return self.emit_outside(aten.constant_pad_nd.default, x, pad)

    def _reshaped(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        if _same_shape(tensor(x).shape, shape):
            return x
        return self.emit_outside(aten.reshape.default, x, self.sizes(shape))

    def _placeholder(self, source: fx.Node, fake: torch.Tensor) -> fx.Node:
        # A gradient from outside is what a joint graph calls one: passes on bodies look for it.
        prefix = "tangents" if source.meta.get(UNIT_TANGENT) else "primals"
        number = len(self.row_inputs) + len(self.shared_inputs) + 1
        with self.body.inserting_before(_first_computation(self.body)):
            node = self.body.placeholder(f"{prefix}_{number}")
        node.meta = {"val": fake}
        return node

    def _emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        if any(n.graph is not self.body for n in _nodes((args, kwargs))):
            raise NotRowwise(f"{named(like)} depends on sizes that vary")
        node = emit(self.body, target, *args, like=like, **kwargs)
        operands = node.all_input_nodes
        if operands and all(operand in self._shared for operand in operands):
            self._shared.add(node)
        return node

    # Shifts, and questions about rows.

    def _set_shift(
        self, lead: tuple[Any, ...], dim: int, start: Any = None, end: Any = None
    ) -> None:
        shift = Shift(lead, dim, *_left_out(start, end, lead[dim]))
        if self.shift is not None and str(self.shift) != str(shift):
            raise NotRowwise("the loss shifts tokens in two ways")
        self.shift = shift

    def _left_rows(self, node: fx.Node, ndim: int) -> fx.Node:
        """Which rows a shift leaves, [c, 1, ...]."""
        assert self.shift is not None
        left = self.shift.left
        key = ("left", ndim)
        if key not in self._prepared:
            with compat.fake_mode_of(tensor(node)):
                device = tensor(node).device
                made = self.emit_outside(
                    aten.full.default, self.sizes(left), True, dtype=torch.bool, device=device
                )
            x = self._filled_up(made, ())
            self._prepared[key] = self._reshaped(x, (self.rows, *[1] * (ndim - 1)))
        source = self._prepared[key]
        if source not in self.row_inputs:
            fake = tensor(source).new_empty((self.example, *[1] * (ndim - 1)))
            self.row_inputs[source] = self._placeholder(source, fake)
        return self.row_inputs[source]

    def _in_shape(self, x: fx.Node, rest: tuple[int, ...], node: fx.Node) -> fx.Node:
        """Rows in another shape."""
        if tuple(tensor(x).shape[1:]) == rest:
            return x
        return self._emit(aten.view.default, x, [-1, *rest], like=node)

    def _is_shared(self, operand: Any) -> bool:
        return operand in self._written and self._written[operand] in self._shared

    def _require_same_rows(self, x: Any, other: Any) -> None:
        """Check that two values have the same leading dimensions."""
        dims = self.form(x).dims
        shapes = (tensor(n).shape[:dims] for n in (x, other))
        if not _same_shape(*shapes):
            raise NotRowwise(f"{named(other)} has tokens in other places than {named(x)}")

    def _dim_of_row(self, x: Any, dim: Any) -> int:
        form = self.form(x)
        dim = dim % tensor(x).ndim
        if dim < form.dims:
            raise NotRowwise(f"the result of {named(x)} is read across tokens")
        return int(dim - form.dims + 1)


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    known = compat.statically_known_true
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b, strict=True))


def _left_out(start: Any, end: Any, size: Any) -> tuple[int, int]:
    """How many elements a slice leaves out before and behind what it takes."""
    if isinstance(size, int):
        first, last, _ = slice(start, end).indices(size)
        return first, size - last
    first = 0 if start is None else start
    last = 0 if end is None or end == torch.iinfo(torch.int64).max else end
    if not (isinstance(first, int) and isinstance(last, int) and first >= 0 >= last):
        raise NotRowwise("the loss shifts tokens by a number that varies")
    return first, -last


def _first_computation(g: fx.Graph) -> fx.Node:
    """Where inputs end."""
    return next((n for n in g.nodes if n.op != "placeholder"), g._root)
