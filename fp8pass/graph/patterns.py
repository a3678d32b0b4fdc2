"""Skip views, casts and transposes; match column slices, fills and residual additions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.dialect.quantization import Quantization, parse
from fp8pass.graph.nodes import aten, is_call, operator_of, prims, shape_text, tensor, value

fp8 = torch.ops.fp8pass

# Views that keep the order of the elements. Two such views of a tensor are equal if their shapes
# are equal.
RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.detach.default,
}  # fmt: skip

CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}


def quantization_of(node: fx.Node) -> Quantization:
    return parse(str(node.args[2]))


def is_quantized_operand(node: fx.Node) -> bool:
    """Whether a node quantizes an operand of a GEMM, rather than a saved value."""
    return is_call(node, fp8.quantize.default) and quantization_of(node).is_for_operands


def is_quantized_saved_value(node: fx.Node) -> bool:
    """Whether a node quantizes a saved value, or a plane (some of the bits) of a saved value."""
    return is_call(node, fp8.quantize.default) and not quantization_of(node).is_for_operands


def is_dequantized_saved_value(node: fx.Node) -> bool:
    return is_call(node, fp8.dequantize.default) and not quantization_of(node).is_for_operands


def skip_reshapes(node: fx.Node) -> fx.Node:
    return _skip(node, _is_reshape)[0]


def skip_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """Skip transposes. Return the matrix, and whether `node` is the transpose of this matrix."""
    return _skip(node, _is_transpose)


def skip_batched_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    return _skip(node, is_batched_transpose)


def skip_views_and_casts(node: fx.Node) -> fx.Node:
    """Skip reshapes, transposes, casts and plain copies. Return the node before them."""
    kinds = (_is_reshape, _is_transpose, is_batched_transpose, _is_cast_or_copy)
    return _skip(node, lambda n: any(is_kind(n) for is_kind in kinds))[0]


def _skip(node: fx.Node, skips: Callable[[fx.Node], bool]) -> tuple[fx.Node, bool]:
    """Starting at `node`, follow first operands while `skips` is true.

    Return the last node, and whether the number of steps is odd.
    """
    odd = False
    while skips(node):
        node, odd = node.args[0], not odd  # type: ignore[assignment]
    return node, odd


def _is_cast_or_copy(node: fx.Node) -> bool:
    return node.target in CASTS or node.target is aten.clone.default


def _is_reshape(node: fx.Node) -> bool:
    """Whether `node` is in `RESHAPES`, or is an expand to its operand's shape, as in `matmul`."""
    if is_call(node, aten.expand.default):
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        return shape_text(tensor(node)) == shape_text(tensor(x))
    return node.target in RESHAPES


def _is_transpose(node: fx.Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    if is_call(node, aten.permute.default):
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return is_call(node, aten.transpose.int) and len(tensor(node).shape) == 2


def is_batched_transpose(node: fx.Node) -> bool:
    """Whether `node` transposes each matrix of a batch [E, M, N]."""
    if node.target not in (aten.permute.default, aten.transpose.int) or tensor(node).ndim != 3:
        return False
    if node.target is aten.permute.default:
        return [dim % 3 for dim in node.args[1]] == [0, 2, 1]  # type: ignore[union-attr, operator]
    return {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]


@dataclass(frozen=True)
class ColumnSlice:
    """`whole[..., offset : offset + columns]` of a contiguous tensor with `width` columns."""

    whole: fx.Node
    width: int
    offset: int
    columns: int


def match_column_slice(node: fx.Node) -> ColumnSlice | None:
    """Return the columns that `node` selects by a slice or split of the last dimension, or None."""
    view: Any = operator_of(node)
    if value(node) is None or view.target not in _FIRST_COLUMNS or view.kwargs:
        return None
    whole = view.args[0]
    val, columns = tensor(whole), tensor(node).shape[-1]
    if not val.is_contiguous() or not isinstance(columns, int):
        return None
    width, first_column = val.shape[-1], _FIRST_COLUMNS[view.target]
    offset = first_column(node, val.ndim - 1, *view.args[1:])
    if not isinstance(offset, int) or not isinstance(width, int) or not columns:
        return None
    return ColumnSlice(whole, width, max(offset + width, 0) if offset < 0 else offset, columns)


def _first_column_of_slice(
    node: fx.Node, last: int, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    return (start or 0) if dim in (-1, last) and step == 1 else None


def _first_column_of_split(node: fx.Node, last: int, sizes: Any, dim: Any = 0) -> Any:
    part: Any = node.args[1]
    before = [sizes] * part if isinstance(sizes, int) else sizes[:part]
    known = dim in (-1, last) and all(isinstance(size, int) for size in before)
    return sum(before) if known else None


# For each operator, a function that returns the column of the whole tensor at which a view starts.
# It returns None if the view does not cut the last dimension, or if a size is symbolic.
_FIRST_COLUMNS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _first_column_of_slice,
    aten.split.Tensor: _first_column_of_split,
    aten.split_with_sizes.default: _first_column_of_split,
}

FILLS = (aten.full.default, aten.full_like.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default)
ONES = (aten.ones.default, aten.ones_like.default)


def filled_with(node: fx.Node) -> float | None:
    """Return the value of all elements of a tensor if the graph fills it with a constant."""
    while node.target in RESHAPES or node.target in CASTS:
        node = node.all_input_nodes[0]
    if node.target in FILLS and isinstance(node.args[1], (bool, int, float)):
        return float(node.args[1])
    if node.target is aten.scalar_tensor.default and isinstance(node.args[0], (int, float)):
        return float(node.args[0])
    if node.target in ZEROS:
        return 0.0
    return 1.0 if node.target in ONES else None


def counts_columns(node: Any, columns: int) -> bool:
    """Whether a value has `columns` columns, and the elements of column i are i."""
    if not isinstance(node, fx.Node) or tensor(node).shape[-1] != columns:
        return False
    while node.target in RESHAPES:
        node = node.all_input_nodes[0]
    if not is_call(node, prims.iota.default):
        return False
    return (node.args[0], node.kwargs["start"], node.kwargs["step"]) == (columns, 0, 1)


SUM_OPERATORS = {aten.add.Tensor, aten.sub.Tensor}


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a node, or a view of the node."""
    return any(
        user.op == "output" or (user.target in RESHAPES and is_returned(user))
        for user in node.users
    )


def is_residual_sum(node: fx.Node) -> bool:
    """Whether `node` is a sum on the residual stream: the next sum and other nodes read it.

    Both operands must have the shape of the sum. This excludes a softmax, which subtracts a
    maximum of a smaller shape.
    """
    return is_same_shape_addition(node) and len(node.users) > 1 and _is_term(node)


def _is_term(node: fx.Node) -> bool:
    through = RESHAPES | CASTS
    return any(
        is_same_shape_addition(u) or (u.target in through and _is_term(u)) for u in node.users
    )


def is_same_shape_addition(node: fx.Node) -> bool:
    if node.target not in SUM_OPERATORS or len(node.all_input_nodes) != 2:
        return False
    values = [value(n) for n in (node, *node.all_input_nodes)]
    shapes = [shape_text(x) for x in values if x is not None]  # a symbolic scalar has no shape
    return len(shapes) == 3 and len(set(shapes)) == 1


def sums_columns(node: fx.Node) -> bool:
    """Whether `node` sums over all dimensions except the last, such as the gradient of a bias."""
    if node.target is not aten.sum.dim_IntList:
        return False
    x, dims = tensor(node.args[0]), node.args[1]  # type: ignore[arg-type]
    if node.kwargs.get("dtype") not in (None, x.dtype, torch.float32):
        return False
    leading = x.ndim - 1
    return leading > 0 and sorted(dims or ()) == list(range(leading))  # type: ignore[arg-type]


def transposes(data: fx.Node) -> list[fx.Node]:
    return [u for u in data.users if u.target is fp8.transpose.default]
