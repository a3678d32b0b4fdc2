"""Patterns: the tensor behind views, casts and transposes; the sums of a residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass.dialect.quantization import Quantization, parse
from fp8pass.graph.nodes import aten, is_call, is_getitem, prims, shape_text, tensor, value

fp8 = torch.ops.fp8pass


# Views that keep the order of the elements, so that two of one tensor hold the same matrix.
RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}


CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}


def quantization_of(node: fx.Node) -> Quantization:
    """The quantization of a node that quantizes or dequantizes."""
    return parse(str(node.args[2]))


def is_quantized_operand(node: fx.Node) -> bool:
    """Whether a node quantizes an operand of a GEMM, rather than a value to save."""
    return is_call(node, fp8.quantize.default) and quantization_of(node).is_for_operands


def is_quantized_saved_value(node: fx.Node) -> bool:
    """Whether a node quantizes a value to save; one node for each plane."""
    return is_call(node, fp8.quantize.default) and not quantization_of(node).is_for_operands


def is_dequantized_saved_value(node: fx.Node) -> bool:
    """Whether a node dequantizes a saved value."""
    return is_call(node, fp8.dequantize.default) and not quantization_of(node).is_for_operands


def skip_reshapes(node: fx.Node) -> fx.Node:
    """The node whose elements `node` holds, in the same order."""
    while _is_reshape(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


@dataclass(frozen=True)
class ColumnSlice:
    """Some columns of each row of a matrix that is contiguous.

    Attributes:
        whole: the matrix, of `width` columns.
        offset: the first of the `columns`.
    """

    whole: fx.Node
    width: int
    offset: int
    columns: int


def match_column_slice(node: fx.Node) -> ColumnSlice | None:
    """Which columns of which matrix a slice of the last dimension is; None for other nodes."""
    made: Any = node.args[0] if is_getitem(node) else node
    if value(node) is None or made.target not in _FIRST_COLUMNS or made.kwargs:
        return None
    whole = made.args[0]
    val, columns = tensor(whole), tensor(node).shape[-1]
    if not val.is_contiguous() or not isinstance(columns, int):
        return None
    width, first = val.shape[-1], _FIRST_COLUMNS[made.target]
    offset = first(node, val.ndim - 1, *made.args[1:])
    if not isinstance(offset, int) or not isinstance(width, int) or not columns:
        return None
    return ColumnSlice(whole, width, max(offset + width, 0) if offset < 0 else offset, columns)


def _of_slice(
    node: fx.Node, last: int, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    return (start or 0) if dim in (-1, last) and step == 1 else None


def _of_split(node: fx.Node, last: int, sizes: Any, dim: Any = 0) -> Any:
    number: Any = node.args[1]
    before = [sizes] * number if isinstance(sizes, int) else sizes[:number]
    known = dim in (-1, last) and all(isinstance(size, int) for size in before)
    return sum(before) if known else None


# The first column of a part, None if it is one of other dimensions, or if that varies.
_FIRST_COLUMNS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _of_slice,
    aten.split.Tensor: _of_split,
    aten.split_with_sizes.default: _of_split,
}


FILLS = (aten.full.default, aten.full_like.default)
ZEROS = (aten.zeros.default, aten.zeros_like.default)
ONES = (aten.ones.default, aten.ones_like.default)


def filled_with(node: fx.Node) -> float | None:
    """The number that all elements of a node equal; None if the graph does not contain it."""
    while node.target in RESHAPES or node.target in CASTS:
        node = node.all_input_nodes[0]
    if node.target in FILLS and isinstance(node.args[1], (bool, int, float)):
        return float(node.args[1])
    if node.target is aten.scalar_tensor.default and isinstance(node.args[0], (int, float)):
        return float(node.args[0])
    if node.target in ZEROS:
        return 0.0
    return 1.0 if node.target in ONES else None


def skip_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """A matrix and whether `node` is its transpose, looking through swaps of two dimensions."""
    flipped = False
    while _is_swap(node):
        node, flipped = node.args[0], not flipped  # type: ignore[assignment]
    return node, flipped


def skip_views_and_casts(node: fx.Node) -> fx.Node:
    """The node that `node` is a view, transpose, cast or plain copy of."""
    through = CASTS | {aten.clone.default}
    while (
        _is_reshape(node) or node.target in through or _is_swap(node) or is_batched_transpose(node)
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def skip_batched_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """A batch of matrices and whether `node` has their transposes: `untransposed` of each."""
    flipped = False
    while is_batched_transpose(node):
        node, flipped = node.args[0], not flipped  # type: ignore[assignment]
    return node, flipped


def is_batched_transpose(node: fx.Node) -> bool:
    """Whether `node` transposes each matrix of a batch [E, M, N]."""
    if node.target not in (aten.permute.default, aten.transpose.int) or tensor(node).ndim != 3:
        return False
    if node.target is aten.permute.default:
        return [dim % 3 for dim in node.args[1]] == [0, 2, 1]  # type: ignore[union-attr, operator]
    return {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]


def _is_reshape(node: fx.Node) -> bool:
    """Whether `node` is a view in the same order; `matmul` expands operands to what they are."""
    if is_call(node, aten.expand.default):
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        return shape_text(tensor(node)) == shape_text(tensor(x))
    return node.target in RESHAPES


def _is_swap(node: fx.Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    if is_call(node, aten.permute.default):
        return list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return is_call(node, aten.transpose.int) and len(tensor(node).shape) == 2


ADDITIONS = {aten.add.Tensor, aten.sub.Tensor}


def is_residual_sum(node: fx.Node) -> bool:
    """Whether `node` is a sum that is a term of another sum and has other users besides.

    Terms have the shape of the sum: taking a maximum away, as softmax does, is something else.
    """
    return is_same_shape_addition(node) and len(node.users) > 1 and _is_term(node)


def _is_term(node: fx.Node) -> bool:
    through = RESHAPES | CASTS
    return any(
        is_same_shape_addition(u) or (u.target in through and _is_term(u)) for u in node.users
    )


def is_same_shape_addition(node: fx.Node) -> bool:
    """Whether `node` adds two values of its own shape, or takes one from the other."""
    if node.target not in ADDITIONS or len(node.all_input_nodes) != 2:
        return False
    values = [value(n) for n in (node, *node.all_input_nodes)]
    shapes = [shape_text(x) for x in values if x is not None]  # not of a size that varies
    return len(shapes) == 3 and len(set(shapes)) == 1


def transposes(codes: fx.Node) -> list[fx.Node]:
    """The transposes of a quantized matrix."""
    return [u for u in codes.users if u.target is fp8.transpose.default]
