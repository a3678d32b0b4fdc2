"""Convert FX nodes to the loads and steps of a program.

A reader starts at a node, and follows operands until it reaches tensors in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.buffers import buffer
from fp8pass.codegen.program.ir import IS_COLUMN, Load, NotAMatrix, Step
from fp8pass.dialect.encoding import is_fp8
from fp8pass.dialect.quantization import parse
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.patterns import (
    CASTS,
    RESHAPES,
    ColumnSlice,
    counts_columns,
    filled_with,
    is_dequantized_saved_value,
    is_residual_sum,
    quantization_of,
)
from fp8pass.graph.pointwise import triton_template
from fp8pass.graph.traffic import is_computed

fp8 = torch.ops.fp8pass

# Kernels load a slice of columns if its offset and the width of the whole matrix are multiples of
# this number. Threads can then load 16 bytes at once in any dtype.
ALIGNED = 16

# Kernels hold column numbers in FP32, which represents integers exactly up to this number.
MOST_COLUMNS = 1 << 24

# Operators that do not change values, except that casts round.
TRANSPARENT = RESHAPES | CASTS | {aten.expand.default, aten.clone.default}

Snapshot = tuple[dict[fx.Node, Load], dict[fx.Node, list[Step]], dict[fx.Node, str], fx.Node | None]


@dataclass
class Reader:
    """Collects the operators that compute one matrix, and the tensors that they read.

    `read` loads nodes that no kernel can compute, and raises NotAMatrix for a node that cannot be
    broadcast to the matrix.
    """

    matrix: fx.Node  # [M, N]
    # Whether the kernel processes whole rows, so that it can reduce along rows and compute one
    # residual sum.
    by_row: bool = False
    loads: dict[fx.Node, Load] = field(default_factory=dict)
    steps: dict[fx.Node, list[Step]] = field(default_factory=dict)
    # A cast or view has the name of its operand.
    names: dict[fx.Node, str] = field(default_factory=dict)
    # The residual sum that the kernel computes, if any. Other residual sums are loaded, so that
    # kernels do not recompute the whole residual stream.
    sum: fx.Node | None = None

    @property
    def large_loads(self) -> set[fx.Node]:
        """The loads that have as many elements as the matrix."""
        return {n for n, load in self.loads.items() if load.operand in ("full", "groups")}

    @property
    def bytes_read(self) -> int:
        """Bytes of the large loads, without the scales of groups."""
        return sum(_bytes_of(n, self.loads[n]) for n in self.large_loads)

    def read(self, node: fx.Node) -> None:
        """Add `node`: compute it if kernels can, else load it. May raise NotAMatrix, as `load`."""
        if not self.compute(node):
            self.load(node)

    def load(self, node: fx.Node) -> None:
        """Add a load of `node` from memory. Raises NotAMatrix if a kernel cannot load `node`."""
        val = graph.value(node)
        if val is None or not val.is_floating_point():
            raise NotAMatrix
        if val.device != tensor(self.matrix).device:  # such as a number in a CPU tensor
            raise NotAMatrix
        load, part = Load(node.name, self.operand(node)), graph.match_column_slice(node)
        if load.operand == "full" and part is not None and _is_readable(part):
            load = _select_columns(load, part)
        elif not val.is_contiguous():
            raise NotAMatrix
        self.loads[node] = load
        self.names[node] = node.name

    def operand(self, node: fx.Node) -> str:
        """Return how `node` is broadcast to the matrix: one of `OPERAND_KINDS`.

        Raises NotAMatrix if `node` cannot be broadcast to the matrix.
        """
        val, matrix = graph.value(node), tensor(self.matrix)
        if val is None:
            raise NotAMatrix
        true = compat.statically_known_true
        if true(val.numel() == 1):
            return "scalar"
        last, columns = val.shape[-1], matrix.shape[-1]
        is_wide = isinstance(last, int) and last == columns
        if is_wide and true(val.numel() == matrix.numel()):
            return "full"
        if last == 1 and true(val.numel() * columns == matrix.numel()):
            return "row"
        if is_wide and true(val.numel() == columns):
            return "column"
        raise NotAMatrix

    def compute(self, node: fx.Node) -> bool:
        """Add the steps that compute `node`. Return False, without a change, if kernels cannot."""
        if node in self.names:
            return True
        if node.op != "call_function":
            return False
        if is_residual_sum(node) and not (self.by_row and self.sum in (None, node)):
            return False
        if is_dequantized_saved_value(node):
            return self._load_groups(node, node)
        part = graph.match_column_slice(node)
        if part is not None:
            groups = _find_groups(part.whole)
            return groups is not None and self._load_groups(node, groups, part)
        return self._try(node)

    def _try(self, node: fx.Node) -> bool:
        """Add a node and its operands. Return False, without a change, if this fails."""
        before = self.snapshot()
        if is_residual_sum(node):
            self.sum = node
        try:
            self.operand(node)
            if self._add(node):
                return True
        except NotAMatrix:
            pass
        self.restore(before)
        return False

    def snapshot(self) -> Snapshot:
        return dict(self.loads), dict(self.steps), dict(self.names), self.sum

    def restore(self, before: Snapshot) -> None:
        self.loads, self.steps, self.names, self.sum = before

    def agrees(self, other: Reader) -> bool:
        return all(self.loads.get(n, load) == load for n, load in other.loads.items())

    def _load_groups(self, node: fx.Node, groups: fx.Node, part: ColumnSlice | None = None) -> bool:
        how = quantization_of(groups)
        format, (rows, size) = how.format, how.block
        if rows > 1 or not size:
            return False
        if format.lossless or (format.emulated and not format.packed):
            return False
        if self.operand(node) != "full":
            return False
        load = Load(node.name, "groups", size, format.name)
        if part is not None:
            if format.packed or part.offset % size or part.columns % size:
                return False
            load = _select_columns(load, part)
        self.loads[node] = load
        self.names[node] = node.name
        return True

    def _add(self, node: fx.Node) -> bool:
        if node.target in TRANSPARENT:
            source = node.args[0]
            if not isinstance(source, fx.Node) or not all(map(_is_float, (node, source))):
                return False
            # If M equals N, a view from [N] to [N, 1] turns a `column` into a `row`. Kernels cannot
            # compute such views, because they broadcast each value in only one way.
            if not _preserves_operand(node, self.operand(source), self.operand(node)):
                return False
            self.read(source)
            if self._is_stored_narrow(node, source):
                del self.loads[source], self.names[source]
                self.load(node)
                return True
            self.names[node] = self.names[source]
            return True
        steps = self._row_steps(node) if self.by_row else None
        if steps is None:
            steps = self._pointwise_step(node)
        if not steps:
            return False
        self.steps[node] = steps
        self.names[node] = steps[-1].name
        return True

    def _is_stored_narrow(self, cast: fx.Node, source: fx.Node) -> bool:
        """Whether `source` is loaded only to be narrowed, which generated code could do instead."""
        if cast.target not in CASTS or source not in self.loads or list(source.users) != [cast]:
            return False
        narrows = tensor(cast).element_size() < tensor(source).element_size()
        return narrows and is_computed(source)

    def _pointwise_step(self, node: fx.Node) -> list[Step]:
        """Return the step of a pointwise operator, or [] if kernels do not support the operator."""
        if node.target is fp8.dequantize.default:
            planes, scale_node = node.args[:2]
            data, scale = self._name(planes[0]), self._name(scale_node)  # type: ignore[index]
            return [Step(node.name, str(aten.mul.Tensor), (data, scale))]
        if not _is_pointwise(node):
            return []
        choices = node.args[1:] if node.target is aten.where.self else ()
        numbers = {x: _small_number(x) for x in choices if isinstance(x, fx.Node)}
        constants = {x: number for x, number in numbers.items() if number is not None}
        operands = [x for x in node.args if isinstance(x, fx.Node) and x not in constants]
        for x in operands:
            self.read(x)
        known = constants | {x: self.names[x] for x in operands}
        args = tuple(known[x] if isinstance(x, fx.Node) else x for x in node.args)
        return [Step(node.name, str(node.target), args)]

    def _row_steps(self, node: fx.Node) -> list[Step] | None:
        """Return the steps of a scale or a reduction along rows, or None for other operators."""
        columns, name, args = tensor(self.matrix).shape[-1], node.name, node.args
        if node.target is fp8.amax.default and args[1] == "row":
            return [Step(name, "row_amax", (self._name(args[0]),))]
        if node.target is fp8.scale.default and self.operand(node) == "row":
            how = parse(str(args[1]))
            return [Step(name, "scale", (self._name(args[0]), how.format.name))]
        if node.target is aten.sum.dim_IntList and _over_rows(node, columns):
            return [Step(name, "row_sum", (self._name(args[0]),))]
        if node.target is aten.amax.default and _over_rows(node, columns):
            return [Step(name, "row_max", (self._name(args[0]),))]
        if node.target is aten.mean.dim and _over_rows(node, columns):
            return self._mean(name, self._name(args[0]), columns)
        if node.target is aten.eq.Tensor and counts_columns(args[1], columns):
            return [Step(name, IS_COLUMN, (self._column_numbers(args[0]),))]
        if node.target is aten.gather.default and args[1] in (-1, tensor(node).ndim - 1):
            return self._pick(name, self._name(args[0]), self._column_numbers(args[2]))
        source = args[0] if graph.is_getitem(node) else None
        if isinstance(source, fx.Node) and source.target is aten.var_mean.correction:
            return self._var_mean(node, source)
        return None

    def _mean(self, name: str, x: str, count: float) -> list[Step]:
        total = f"{name}_sum"
        return [Step(total, "row_sum", (x,)), Step(name, "aten.mul.Scalar", (total, 1 / count))]

    def _var_mean(self, node: fx.Node, source: fx.Node) -> list[Step]:
        columns, name = tensor(self.matrix).shape[-1], node.name
        if not _over_rows(source, columns):
            raise NotAMatrix
        x = self._name(source.args[0])
        if node.args[1] == 1:
            return self._mean(name, x, columns)
        correction = source.kwargs.get("correction")
        count = columns - (1 if correction is None else float(correction))  # type: ignore[arg-type]
        if count <= 0:
            raise NotAMatrix
        return [
            *self._mean(f"{name}_mean", x, columns),
            Step(f"{name}_off", "aten.sub.Tensor", (x, f"{name}_mean")),
            Step(f"{name}_square", "aten.square.default", (f"{name}_off",)),
            *self._mean(name, f"{name}_square", count),
        ]

    def _column_numbers(self, node: Any) -> str:
        """Load a column number for each row, such as a label. Return the name of the load."""
        while node.target is aten.expand.default:
            node = node.args[0]
        val, columns = tensor(node), tensor(self.matrix).shape[-1]
        if val.dtype is not torch.int64 or self.operand(node) != "row" or columns > MOST_COLUMNS:
            raise NotAMatrix
        # Not in `names`: other operators of integers cannot be computed in FP32.
        self.loads[node] = Load(node.name, "row")
        return node.name

    def _pick(self, name: str, x: str, number: str) -> list[Step]:
        """Return the steps that compute the element of each row in column `number`."""
        found, picked = f"{name}_found", f"{name}_picked"
        return [
            Step(found, IS_COLUMN, (number,)),
            Step(picked, str(aten.where.self), (found, x, 0.0)),
            Step(name, "row_sum", (picked,)),
        ]

    def used_outside(self, absorbed: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes of `steps` that nodes outside of the kernel use.

        Users of a view or cast count as users of its operand. Conditions (booleans) are left out,
        because their users compute them again.
        """
        inside = set(self.names) | set(absorbed)

        def is_used(node: fx.Node) -> bool:
            return any(
                user not in inside or (user.target in TRANSPARENT and is_used(user))
                for user in node.users
            )

        values = [n for n in sorted(self.steps) if tensor(n).is_floating_point()]
        return [n for n in values if is_used(n)]

    def _name(self, node: Any) -> str:
        self.read(node)
        return self.names[node]


def _small_number(x: fx.Node) -> float | None:
    """Return the value of a one-element tensor if it is an integer that all dtypes represent."""
    val = graph.value(x)
    if val is None or not val.is_floating_point() or val.numel() != 1 or x.target in CASTS:
        return None
    number = filled_with(x)
    return number if number is not None and number.is_integer() and abs(number) <= 256 else None


def _is_pointwise(node: fx.Node) -> bool:
    if node.kwargs or not all(isinstance(x, (fx.Node, int, float)) for x in node.args):
        return False
    arguments = tuple(x.name if isinstance(x, fx.Node) else x for x in node.args)
    return triton_template(str(node.target), arguments) is not None


def _is_float(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and val.is_floating_point() and not is_fp8(val.dtype)


def _preserves_operand(node: fx.Node, source: str, result: str) -> bool:
    if node.target is aten.expand.default:
        return source == result or source == "scalar" or result == "full"
    return source == result


def _over_rows(node: fx.Node, columns: int) -> bool:
    """Whether a reduction is over the last dimension, with `keepdim`."""
    if len(node.args) < 2 or tensor(node.args[0]).shape[-1] != columns:  # type: ignore[arg-type]
        return False
    x, dims = node.args[:2]
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim")
    last = tensor(x).ndim - 1  # type: ignore[arg-type]
    return dims in ([-1], [last]) and keeps is True


def is_in_memory(x: fx.Node) -> bool:
    """Whether `x` is in memory: a graph input, or a result of a library kernel."""
    while kind(x) is Kind.VIEW or graph.is_call(x, buffer):
        x = x.args[0]  # type: ignore[assignment]
    return kind(graph.operator_of(x)) in (Kind.INPUT, Kind.GEMM, Kind.ATTENTION)


def _is_readable(part: ColumnSlice) -> bool:
    return part.offset % ALIGNED == part.width % ALIGNED == 0 and is_in_memory(part.whole)


def _select_columns(load: Load, part: ColumnSlice) -> Load:
    return replace(load, columns=part.columns, width=part.width, offset=part.offset)


def _find_groups(x: fx.Node) -> fx.Node | None:
    """Return the `dequantize` node that `x` reshapes, or None if the rows change."""
    source = graph.skip_reshapes(x)
    if not is_dequantized_saved_value(source):
        return None
    return source if tensor(source).shape[-1] == tensor(x).shape[-1] else None


def _bytes_of(node: fx.Node, load: Load) -> Any:
    """Return the bytes of a load, without the scales of groups."""
    *data, last = tensors_of(node, load)
    whole = sum(map(graph.nbytes, data or [last]))
    return whole * load.columns // load.width if load.width else whole


def tensors_of(node: fx.Node, load: Load) -> Iterator[fx.Node]:
    whole = node
    if load.width:
        whole = graph.match_column_slice(node).whole  # type: ignore[union-attr]
    if load.operand == "groups":
        planes, scales = graph.skip_reshapes(whole).args[:2]
        yield from planes  # type: ignore[misc]
        yield scales  # type: ignore[misc]
    else:
        yield whole
