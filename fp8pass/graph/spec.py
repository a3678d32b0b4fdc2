"""Check between passes that a graph is well formed (with `FP8PASS_CHECK=1`, and in the tests)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import BUG
from fp8pass.dialect.encoding import is_fp8
from fp8pass.dialect.formats import FORMATS, simulated_format
from fp8pass.dialect.masking import MASKED_DTYPES
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dialect.quantization import BY_ROW, ROW, Quantization, parse, parse_block
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.collectives import ALL_GATHER, WAIT_TENSOR
from fp8pass.graph.linear_layers import is_multiple_of_16
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.tags import COPIED_VALUE
from fp8pass.runtime.copies import from_host, settled, to_host

fp8 = torch.ops.fp8pass

# Operators of these namespaces may read FP8 tensors.
_FP8_NAMESPACES = ("fp8pass", "fp8pass_codegen", "fp8pass_host")
_HOST_COPIES = (to_host, from_host, settled)

# Operators that may lie between a quantized shard and the gathered matrix, or reorder quantized
# tokens.
_BETWEEN_SHARD_AND_MATRIX = {
    *(fp8.as_codes.default, fp8.as_bytes.default, WAIT_TENSOR, ALL_GATHER, aten.index.Tensor),
    *(VIEWS | {aten.cat.default, aten.clone.default, aten.squeeze_copy.dims}),
    *_HOST_COPIES,
}


class MalformedGraph(AssertionError):
    """A graph breaks an invariant. The message names the node, or the guards that a pass added."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def verify(g: fx.Graph) -> None:
    """Raise MalformedGraph unless `g` is well formed.

    - Nodes come after their operands, and every node with users has a fake value.
    - While the graph contains operators of the dialect, other operators do not read FP8 tensors,
      except views and the operators of `_FP8_NAMESPACES`.
    - The operands of each operator of the dialect are valid (`OPERANDS`) and consistent (`CHECKS`).
    """
    g.lint()
    has_dialect = any(n.target in OPERATORS for n in g.nodes)
    for node in g.nodes:
        if node.op == "call_function":
            for problem in _problems(node, has_dialect):
                raise _malformed(node, problem)


def verify_no_kernels(g: fx.Graph) -> None:
    """Raise MalformedGraph if `g`, a joint or inference graph, calls a generated kernel."""
    for node in g.nodes:
        if getattr(node.target, "namespace", None) == "fp8pass_codegen":
            raise _malformed(node, "is a kernel in a graph that is not lowered yet")


def verify_lowered(g: fx.Graph) -> None:
    for node in g.nodes:
        if node.target in OPERATORS:
            raise _malformed(node, "was not lowered")


def verify_guards(g: fx.Graph, before: int) -> None:
    """Raise MalformedGraph if a pass added guards on dynamic shapes.

    `before` is the number of guards before the pass.
    """
    if added := compat.restrictions(g, before):
        raise MalformedGraph(f"a pass added guards on dynamic shapes: {', '.join(added)}")


def _malformed(node: fx.Node, problem: str) -> MalformedGraph:
    where = graph.module_path(node) or "top level"
    return MalformedGraph(f"{node.format_node()} in {where}: {problem}")


def _problems(node: fx.Node, has_dialect: bool) -> Iterator[str]:
    if node.users and "val" not in node.meta:
        yield "has no fake value"
    constraints = OPERANDS.get(node.target, ())
    reads_fp8 = getattr(node.target, "namespace", None) in _FP8_NAMESPACES
    if has_dialect and not (reads_fp8 or node.target in VIEWS or graph.is_getitem(node)):
        yield from (f"computes on FP8 tensor {n}" for n in node.all_input_nodes if _is_fp8(n))
    try:
        for (is_valid, problem), operand in zip(constraints, node.args, strict=False):
            if not is_valid(operand):
                yield f"{operand!r} {problem}"
    except ValueError as error:
        yield str(error)
    if check := CHECKS.get(node.target):
        yield from check(*node.args)


# A predicate on one operand, and the error message, which follows the operand's name.
Constraint = tuple[Callable[[Any], bool], str]

ANY: Constraint = (lambda x: True, "")
FLOATS: Constraint = (lambda x: _is_float(tensor(x)), "must be floating point, and not FP8 data")
FP8_DATA: Constraint = (lambda x: _is_fp8(x), "must be FP8 data")
BYTES: Constraint = (lambda x: tensor(x).dtype is torch.uint8, "must be bytes, of dtype uint8")
MATRIX: Constraint = (lambda x: tensor(x).ndim == 2, "must be a matrix")
OFFSETS: Constraint = (
    lambda x: tensor(x).ndim == 1 and tensor(x).dtype is torch.int32,
    "must be the ends of expert groups, int32 [E]",
)
MASKABLE: Constraint = (
    lambda x: tensor(x).dtype in MASKED_DTYPES,
    "must be bfloat16, float16 or float32",
)
FORMAT: Constraint = (lambda name: name in FORMATS, "is an unknown format")
# These predicates raise a ValueError with the message.
QUANTIZATION: Constraint = (lambda text: bool(parse(str(text))), "")
SIMULATED_FORMAT: Constraint = (lambda text: bool(simulated_format(str(text))), "")

OPERANDS: dict[Any, tuple[Constraint, ...]] = {
    fp8.amax.default: (FLOATS,),
    fp8.scale.default: (ANY, QUANTIZATION),
    fp8.quantize.default: (FLOATS, ANY, QUANTIZATION),
    fp8.dequantize.default: (ANY, ANY, QUANTIZATION),
    fp8.transpose.default: (MATRIX,),
    fp8.joined.default: (),
    fp8.as_bytes.default: (FP8_DATA,),
    fp8.as_codes.default: (BYTES, FORMAT),
    fp8.scaled_mm.default: (*[ANY] * 7, QUANTIZATION, QUANTIZATION),
    fp8.padded_ends.default: (OFFSETS,),
    fp8.segment_amax.default: (ANY, OFFSETS),
    fp8.transpose_segments.default: (ANY, ANY, OFFSETS, FORMAT),
    fp8.scaled_grouped_mm.default: (*[ANY] * 4, OFFSETS),
    fp8.scaled_grouped_outer.default: (*[ANY] * 4, OFFSETS),
    fp8.mask_format.default: (MASKABLE, SIMULATED_FORMAT),
}


# Each function takes the arguments of an operator, and yields a message for each problem.


def _check_amax(x: fx.Node, block: Any) -> Iterator[str]:
    rows, columns = parse_block(str(block))
    if (rows, columns) == ROW and tensor(x).ndim != 2:
        yield "reduces rows of a tensor that is not a matrix"
    if columns:
        length = tensor(x).shape[-1]
        if isinstance(length, int) and length % columns:
            yield f"cannot split {length} elements into groups of {columns}"


def _check_quantize(x: fx.Node, scale: fx.Node, text: Any, plane: Any = 0) -> Iterator[str]:
    how = parse(str(text))
    yield from _check_scale_shape(scale, how, _shape(x))
    planes = len(how.format.planes)
    if plane >= planes:
        yield f"reads plane {plane}, but the number of planes is {planes}"


def _check_dequantize(planes: Any, scales: fx.Node, text: Any, dtype: Any) -> Iterator[str]:
    how = parse(str(text))
    widths = how.format.planes
    if len(planes) != len(widths):
        yield f"{how.format.name} has {len(widths)} planes"
    for i, (data, width) in enumerate(zip(planes, widths, strict=True)):
        if not (how.is_in_groups or _is_fp8(data)):
            yield "dequantizes a tensor that is not quantized"
        *leading, length = _shape(data)
        yield from _check_scale_shape(scales, how, (*leading, length * 8 // width))
        quantized = _skip_host_copies(data)
        is_received = quantized.target is fp8.as_codes.default
        if how.is_in_groups and _is_visible(quantized) and not is_received:
            if quantized.args[1] is not scales:
                yield f"{quantized} was quantized with other scales"
            if (*quantized.args[2:], 0)[:2] != (text, i):
                yield f"{quantized} is not plane {i} of the tensor"


def _check_joined(parts: Any) -> Iterator[str]:
    first, *rest = (_shape(part)[:1] for part in parts)
    if not all(_agree(first, rows) for rows in rest):
        yield "joins parts with different numbers of rows"
    if len({tensor(part).dtype for part in parts}) > 1:
        yield "joins parts of different formats"


def _check_scaled_mm(
    a: fx.Node, a_scale: Any, b: fx.Node, b_scale: Any, *rest: Any
) -> Iterator[str]:
    """Check that the call's scales and quantizations match how `a` and `b` were quantized."""
    columns = _shape(b)[0]
    if _is_fp8(a) and not is_multiple_of_16(columns):
        yield f"its result has {columns} columns, but tensor cores need a multiple of 16"
    a_how, b_how = (parse(str(text)) for text in rest[-2:])
    if any(graph.is_call(x, fp8.joined.default) for x in (a, b)):
        yield from _check_joined_parts((a, a_how), (b, b_how))
        return
    yield from _check_operand(a, a_scale, a_how)
    yield from _check_operand(b, b_scale, b_how)
    if (a_how.block == ROW) != (b_how.block == ROW):
        yield "one operand has a scale for each row, the other one does not"
    yield from _check_contraction(a, b)


def _check_joined_parts(*operands: tuple[fx.Node, Quantization]) -> Iterator[str]:
    """Check that both operands are results of `joined`, or of a kernel that stores joined parts."""
    joined = [(x, how) for x, how in operands if graph.is_call(x, fp8.joined.default)]
    others = [x for x, _ in operands if not graph.is_call(x, fp8.joined.default)]
    if any(_is_visible(_skip_transpose(x)) for x in others):
        yield "one operand is joined, the other one is not"
    sides: list[list[fx.Node]] = [list(x.args[0]) for x, _ in joined]  # type: ignore[arg-type]
    for (_, how), parts in zip(joined, sides, strict=True):
        for part in parts:
            quantized = _skip_transpose(part)
            if not _is_visible(quantized):
                continue
            if quantized.target is not fp8.quantize.default:
                yield f"{part} is not quantized"
            elif parse(str(quantized.args[2])) != how:
                yield f"{part} is quantized as {quantized.args[2]}, but the GEMM reads {how}"
    if not others:
        widths = [tuple(_shape(part)[1] for part in side) for side in sides]
        if not _agree(*widths):
            yield f"contracts parts of different widths, {list(widths[0])} and {list(widths[1])}"


def _check_segment_amax(amaxes: fx.Node, offsets: fx.Node) -> Iterator[str]:
    if not _agree(_shape(amaxes)[1:], (1,)):
        yield f"{amaxes} does not have one amax for each row"


def _check_transpose_segments(
    x: fx.Node,
    scales: fx.Node,
    offsets: fx.Node,
    format: Any,
    rows: fx.Node | None = None,
    row_scales: fx.Node | None = None,
) -> Iterator[str]:
    if not _agree(_shape(scales), (*_shape(offsets), 1)):
        yield f"has scales {_shape(scales)}, not one for each expert group"
    if rows is not None and tensor(rows).ndim != 1:
        yield f"{rows} must be a list of row numbers"
    if row_scales is None:
        if not _is_float(tensor(x)):
            yield f"operand 1 ({x}) must be floating point, or FP8 data with row scales"
        return
    if not (_is_fp8(x) and _is_float(tensor(row_scales))):
        yield f"has row scales, but operand 1 ({x}) is not FP8 data"
    if not _agree(_shape(row_scales), (_shape(x)[0], 1)):
        yield f"has row scales {_shape(row_scales)}, not one for each row"
    if _skip_gather(x).target is fp8.quantize.default:
        yield from _check_operand(x, row_scales, parse(BY_ROW))


def _check_scaled_grouped_mm(
    a: fx.Node, a_scale: Any, b: fx.Node, b_scale: Any, offsets: Any, *rest: Any
) -> Iterator[str]:
    """Check that `a` and `b` have row scales, and that `b` has a matrix for each expert group."""
    for data, scale in ((a, a_scale), (b, b_scale)):
        quantized = _skip_gather(_skip_transpose(data))
        has_row_scales = tensor(scale).ndim == 2
        if _is_visible(quantized) and quantized.target is fp8.quantize.default:
            how = parse(str(quantized.args[2]))
            has_row_scales = how.block == ROW
            yield from _check_operand(data, scale, how)
        if not has_row_scales:
            yield f"{data} does not have a scale for each row"
    yield from _check_contraction(a, b)
    if _shape(b)[0] % _shape(offsets)[0]:
        yield f"{b} does not have a matrix for each expert group"


def _check_scaled_grouped_outer(
    a: fx.Node, a_scale: Any, b: fx.Node, b_scale: Any, *rest: Any
) -> Iterator[str]:
    for data, scale in ((a, a_scale), (b, b_scale)):
        transposed = _skip_host_copies(data)
        if _is_visible(transposed):
            if transposed.target is not fp8.transpose_segments.default:
                yield f"operand {data} is not in padded expert groups"
            if not _is_same(transposed.args[1], scale):
                yield f"{data} was quantized with another scale"
    yield from _check_contraction(a, b)


def _check_settled(copy: fx.Node, source: fx.Node) -> Iterator[str]:
    if copy.target not in (to_host, from_host) or copy.args[0] is not source:
        yield f"{copy} is not a copy of {source}"


def _check_from_host(copy: fx.Node, *rest: Any) -> Iterator[str]:
    if copy.target in (to_host, from_host):
        yield f"{copy} is read before `settled` has waited for it"


def _check_operand(data: fx.Node, scale: Any, how: Quantization) -> Iterator[str]:
    matrix = _skip_transpose(data)
    quantized = _skip_gather(matrix)
    if not _is_visible(quantized):
        return
    if quantized.target is not fp8.quantize.default:
        yield f"operand {data} is not quantized"
    own_scale, scale = quantized.args[1], _skip_host_copies(scale)
    is_transposed = _skip_host_copies(data).target is fp8.transpose.default
    if how.is_in_groups and is_transposed:
        scale = _skip_transposed_copies(scale)
        if not _is_visible(scale):  # the forward saved the transposed scales
            scale = own_scale
    is_gathered = quantized is not matrix and _have_same_amax(own_scale, scale)
    if not (_is_same(own_scale, scale) or is_gathered):
        yield f"{data} was quantized with another scale"
    own = parse(str(quantized.args[2]))
    if own != how:
        yield f"{data} is quantized as {own}, not {how}"
    if is_transposed and not how.survives_transpose:
        yield f"{data} is transposed, but the scales of {how} do not fit the transpose"


def _check_contraction(a: fx.Node, b: fx.Node) -> Iterator[str]:
    lengths = _shape(a)[-1:], _shape(b)[-1:]
    if not _agree(*lengths):
        yield f"contracts dimensions of different sizes, {lengths[0][0]} and {lengths[1][0]}"


def _check_scale_shape(scale: Any, how: Quantization, shape: tuple[Any, ...]) -> Iterator[str]:
    expected = how.scale_shape(shape)
    if not _agree(_shape(scale), expected):
        yield f"has scales {_shape(scale)}, but {how} needs {expected}"


CHECKS: dict[Any, Callable[..., Iterator[str]]] = {
    fp8.amax.default: _check_amax,
    fp8.quantize.default: _check_quantize,
    fp8.dequantize.default: _check_dequantize,
    fp8.joined.default: _check_joined,
    fp8.scaled_mm.default: _check_scaled_mm,
    fp8.segment_amax.default: _check_segment_amax,
    fp8.transpose_segments.default: _check_transpose_segments,
    fp8.scaled_grouped_mm.default: _check_scaled_grouped_mm,
    fp8.scaled_grouped_outer.default: _check_scaled_grouped_outer,
    settled: _check_settled,
    from_host: _check_from_host,
}


def _skip_host_copies(node: fx.Node) -> fx.Node:
    while node.target in _HOST_COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _skip_transposed_copies(scale: fx.Node) -> fx.Node:
    """Skip transposes, and saved copies of transposes. Return the scales before them."""
    base = graph.skip_transposes(_skip_host_copies(scale))[0]
    while base.target is aten.squeeze_copy.dims:
        base = graph.skip_transposes(_skip_host_copies(base.args[0]))[0]  # type: ignore[arg-type]
    return _skip_host_copies(base)


def _skip_transpose(data: fx.Node) -> fx.Node:
    data = _skip_host_copies(data)
    if data.target is not fp8.transpose.default:
        return data
    return _skip_host_copies(data.args[0])  # type: ignore[arg-type]


def _skip_gather(node: fx.Node) -> fx.Node:
    """Skip `_BETWEEN_SHARD_AND_MATRIX`: return the shard from which a matrix was gathered."""
    while graph.operator_of(node).target in _BETWEEN_SHARD_AND_MATRIX:
        node = node.args[0]  # type: ignore[assignment]
        node = node[0] if isinstance(node, (list, tuple)) else node
    return node


def _is_visible(data: fx.Node) -> bool:
    """Whether an operator of this graph computes `data`, so that the operator can be checked."""
    return data.op == "call_function" and not graph.is_getitem(data)


def _is_same(x: object, y: object) -> bool:
    """Whether `x` and `y` are one node, or recomputed copies of one node."""
    if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
        return False
    return x.meta.get(COPIED_VALUE, x.name) == y.meta.get(COPIED_VALUE, y.name)


def _have_same_amax(shard_scale: Any, scale: Any) -> bool:
    """Whether the scales of a shard and of the gathered matrix come from the same amaxes.

    Return True if the graph does not show how the scales are computed.
    """
    if not (shard_scale.target is scale.target is fp8.scale.default):
        return True
    return _is_same(_skip_gather(scale.args[0]), shard_scale.args[0])


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(tensor(node).shape)


def _agree(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two shapes agree. Symbolic sizes are not compared, because that would add guards."""
    static = (pair for pair in zip(a, b, strict=False) if all(isinstance(x, int) for x in pair))
    return len(a) == len(b) and all(x == y for x, y in static)


def _is_fp8(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and is_fp8(val.dtype)


def _is_float(val: torch.Tensor) -> bool:
    return val.is_floating_point() and not is_fp8(val.dtype)
