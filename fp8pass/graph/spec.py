"""The spec of a well-formed graph, checked between passes (`FP8PASS_CHECK=1`, and in the tests)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.config import BUG
from fp8pass.dialect import masking
from fp8pass.dialect.encoding import is_fp8
from fp8pass.dialect.formats import FORMATS, simulated_format
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dialect.quantization import ROW, TENSOR, Quantization, parse, parse_block
from fp8pass.graph.classify import VIEWS
from fp8pass.graph.collectives import GATHER, WAIT
from fp8pass.graph.linear_layers import is_multiple_of_16
from fp8pass.graph.nodes import aten
from fp8pass.graph.tags import CARRIES
from fp8pass.runtime.copies import from_host, settled, to_host

fp8 = torch.ops.fp8pass

# Operators that may touch an FP8 tensor: the dialect, and the kernels that take its place.
_NAMESPACES = ("fp8pass", "fp8pass_codegen", "fp8pass_host")


# What is between a matrix and the part of it that a rank sends, or tokens that are permuted.
_ON_THE_WIRE = {
    *(fp8.as_codes.default, fp8.as_bytes.default, WAIT, GATHER, aten.index.Tensor),
    *(VIEWS | {aten.cat.default, aten.clone.default}),
}


class MalformedGraph(AssertionError):
    """A pass produced a graph that breaks an invariant; the message names the node."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def verify(g: fx.Graph) -> None:
    """Raise MalformedGraph unless `g` is well formed.

    - Nodes come after their operands, and every one that is used has a fake value.
    - No FP8 tensor reaches an operator outside the dialect, as long as the graph speaks it.
    - Every operator of the dialect has operands that it takes (`VERIFIERS`).
    """
    g.lint()
    speaks_dialect = any(n.target in OPERATORS for n in g.nodes)
    for node in g.nodes:
        if node.op != "call_function":
            continue
        _require("val" in node.meta or not node.users, node, "has no fake value")
        if speaks_dialect and not _may_touch_fp8(node):
            for operand in node.all_input_nodes:
                touches = _is_codes(operand)
                _require(not touches, node, f"computes on FP8 tensor {operand}")
        if node.target in VERIFIERS:
            VERIFIERS[node.target](node)


def verify_no_kernels(g: fx.Graph) -> None:
    """Raise MalformedGraph if a joint or inference graph calls a kernel.

    Kernels replace the dialect only in the graphs that Inductor compiles.
    """
    for node in g.nodes:
        kernel = getattr(node.target, "namespace", None) == "fp8pass_codegen"
        _require(not kernel, node, "is a kernel in a graph that is not lowered yet")


def verify_lowered(g: fx.Graph) -> None:
    """Raise MalformedGraph if an operator of the dialect is left in a lowered graph."""
    for node in g.nodes:
        _require(node.target not in OPERATORS, node, "was not lowered")


def verify_guards(g: fx.Graph, before: int) -> None:
    """Raise MalformedGraph if more is asked of the sizes that vary than `before` a pass.

    Such a guard, which to compare two sizes puts there, has PyTorch compile once more for sizes of
    which it is not true.
    """
    if added := compat.restrictions(g, before):
        raise MalformedGraph(f"a pass fixed sizes that vary: {', '.join(added)}")


def _may_touch_fp8(node: fx.Node) -> bool:
    in_dialect = getattr(node.target, "namespace", None) in _NAMESPACES
    return in_dialect or node.target in VIEWS or graph.is_getitem(node)


def _verify_amax(node: fx.Node) -> None:
    x, block = node.args
    _require(_is_float(x), node, "measures a tensor that holds no numbers")
    rows, columns = parse_block(str(block))
    is_of_rows = (rows, columns) == ROW
    fits = not is_of_rows or _rank(x) == 2
    _require(fits, node, "measures rows of a tensor that is no matrix")
    length = _shape(x)[-1] if columns else 0
    divides = not isinstance(length, int) or not columns or length % columns == 0
    _require(divides, node, f"cuts {length} elements into groups of {columns}")


def _verify_scale(node: fx.Node) -> None:
    _quantization(node, node.args[1])


def _verify_quantize(node: fx.Node) -> None:
    x, scale, text, *plane = node.args
    how = _quantization(node, text)
    _require(_is_float(x), node, "quantizes a tensor that holds no numbers")
    wanted = how.scale_shape(_shape(x))
    _require(_agree(_shape(scale), wanted), node, f"has scales {_shape(scale)}, {how}: {wanted}")
    planes, number = len(how.format.planes), int(plane[0]) if plane else 0  # type: ignore[arg-type]
    _require(number < planes, node, f"asks for plane {number} of {planes}")


def _verify_dequantize(node: fx.Node) -> None:
    """It gets all planes of one tensor, and the scales that they were quantized with."""
    planes, scales, text = node.args[:3]
    assert isinstance(planes, (list, tuple))
    assert isinstance(scales, fx.Node)
    how = _quantization(node, text)
    widths = how.format.planes
    _require(len(planes) == len(widths), node, f"{how.format.name} has {len(widths)} planes")
    for i, (data, width) in enumerate(zip(planes, widths, strict=True)):
        assert isinstance(data, fx.Node)
        fp8_data = how.is_in_groups or _is_codes(data)
        _require(fp8_data, node, "dequantizes a tensor that is not quantized")
        *leading, length = _shape(data)
        wanted = how.scale_shape((*leading, length * 8 // width))
        agree = _agree(_shape(scales), wanted)
        _require(agree, node, f"has scales {_shape(scales)}, {how}: {wanted}")
        data = _before_copies(data)
        if how.is_in_groups and _is_visible(data):
            _require(data.args[1] is scales, node, f"{data} was quantized with other scales")
            own = (*data.args[2:], 0)[:2]
            _require(own == (text, i), node, f"{data} is not its plane {i}")


def _verify_transpose(node: fx.Node) -> None:
    _require(_rank(node.args[0]) == 2, node, "transposes a tensor that is no matrix")


def _verify_joined(node: fx.Node) -> None:
    parts: Any = node.args[0]
    first, *rest = (_shape(part)[:1] for part in parts)
    agree = all(_agree(first, rows) for rows in rest)
    _require(agree, node, "puts parts of several numbers of rows side by side")
    dtypes = {graph.tensor(part).dtype for part in parts}
    _require(len(dtypes) == 1, node, "puts codes of several formats side by side")


def _verify_as_bytes(node: fx.Node) -> None:
    _require(_is_codes(node.args[0]), node, "takes what are no codes for bytes")  # type: ignore[arg-type]


def _verify_as_codes(node: fx.Node) -> None:
    data, format = node.args
    _require_format(node, format)
    _require(graph.tensor(data).dtype is torch.uint8, node, "takes what are no bytes for codes")  # type: ignore[arg-type]


def _verify_scaled_mm(node: fx.Node) -> None:
    """Operands have the scales and the quantization that they were quantized with.

    Tensor cores take columns of the result in multiples of 16.
    """
    a, a_scale, b, b_scale = node.args[:4]
    how = [_quantization(node, text) for text in node.args[7:]]
    columns = graph.tensor(node).shape[1]
    assert isinstance(a, fx.Node)
    fits = is_multiple_of_16(columns) or not _is_codes(a)
    _require(fits, node, f"its result has {columns} columns")
    if any(isinstance(x, fx.Node) and graph.is_call(x, fp8.joined.default) for x in (a, b)):
        _verify_joined_operands(node, a, b)
        return
    for data, scale, own in zip((a, b), (a_scale, b_scale), how, strict=True):
        assert isinstance(data, fx.Node)
        _verify_operand(node, data, scale, own)
    by_row = [q.block == ROW for q in how]
    same = by_row[0] == by_row[1]
    _require(same, node, "one operand has a scale, the other one for each row")
    lengths = _shape(a)[-1:], _shape(b)[-1:]
    _require(_agree(*lengths), node, f"contracts {lengths[0][0]} with {lengths[1][0]}")


def _verify_operand(node: fx.Node, data: fx.Node, scale: Any, how: Quantization) -> None:
    codes = _untransposed(data)
    quantized = _behind_gather(codes)
    if not _is_visible(quantized):
        return
    _require(quantized.target is fp8.quantize.default, node, f"operand {data} is not quantized")
    own_scale = quantized.args[1]
    if how.is_in_groups and data is not codes:
        scale = graph.untransposed(scale)[0]
    same = _is_same(own_scale, scale)
    same = same or (quantized is not codes and _is_gathered(own_scale, scale))
    _require(same, node, f"{data} was quantized with another scale")
    own = parse(str(quantized.args[2]))
    _require(own == how, node, f"{data} is quantized as {own}, not {how}")
    fits = how.survives_transpose or data is codes
    _require(fits, node, f"{data} is transposed, which {how} does not survive")


def _verify_joined_operands(node: fx.Node, *operands: Any) -> None:
    """Both are joined, unless a kernel stores the parts of one side by side already."""
    parts = [list(x.args[0]) for x in operands if graph.is_call(x, fp8.joined.default)]
    others = [x for x in operands if not graph.is_call(x, fp8.joined.default)]
    for other in others:
        stored = not _is_visible(_untransposed(other))
        _require(stored, node, "one operand is joined, the other one is not")
    for part in (part for side in parts for part in side):
        quantized = _untransposed(part)
        if not _is_visible(quantized):
            continue
        _require(quantized.target is fp8.quantize.default, node, f"{part} is not quantized")
        one = parse(str(quantized.args[2])).block == TENSOR
        _require(one, node, f"{part} has a scale for each row")
    if not others:
        widths = [tuple(_shape(part)[1] for part in side) for side in parts]
        _require(_agree(*widths), node, f"contracts {list(widths[0])} with {list(widths[1])}")


def _verify_offsets(node: fx.Node, offsets: Any) -> None:
    val = graph.tensor(offsets)
    fits = val.ndim == 1 and val.dtype is torch.int32
    _require(fits, node, f"{offsets} does not say where segments end")


def _verify_padded_ends(node: fx.Node) -> None:
    _verify_offsets(node, node.args[0])


def _verify_segment_amax(node: fx.Node) -> None:
    amaxes, offsets = node.args
    _verify_offsets(node, offsets)
    _require(_agree(_shape(amaxes)[1:], (1,)), node, f"{amaxes} has no amax for each row")


def _verify_transpose_segments(node: fx.Node) -> None:
    x, scales, offsets, format, *rows = node.args
    _require(not rows or _rank(rows[0]) == 1, node, "takes no list of rows")
    _require_format(node, format)
    _verify_offsets(node, offsets)
    _require(_is_float(x), node, "quantizes a tensor that holds no numbers")
    agree = _agree(_shape(scales), (*_shape(offsets), 1))
    _require(agree, node, f"has scales {_shape(scales)}, not one for each segment")


def _verify_scaled_grouped_mm(node: fx.Node) -> None:
    """Operands have scales by row, equal lengths, and as many matrices as there are segments."""
    a, a_scale, b, b_scale, offsets = node.args[:5]
    _verify_offsets(node, offsets)
    for data, scale in ((a, a_scale), (b, b_scale)):
        assert isinstance(data, fx.Node)
        quantized = _behind_gather(_untransposed(data))
        if _is_visible(quantized) and quantized.target is fp8.quantize.default:
            by_row = parse(str(quantized.args[2]))
            _require(by_row.block == ROW, node, f"{data} has no scale for each row")
            _verify_operand(node, data, scale, by_row)
        else:
            _require(_rank(scale) == 2, node, f"{data} has no scale for each row")
    lengths = _shape(a)[-1:], _shape(b)[-1:]
    _require(_agree(*lengths), node, f"contracts {lengths[0][0]} with {lengths[1][0]}")
    whole = _shape(b)[0] % _shape(offsets)[0] == 0
    _require(whole, node, f"{b} has no matrix for each segment")


def _verify_scaled_grouped_outer(node: fx.Node) -> None:
    """Operands are from `transpose_segments`, of the same segments, with the scales given."""
    a, a_scale, b, b_scale, ends = node.args[:5]
    _verify_offsets(node, ends)
    for data, scale in ((a, a_scale), (b, b_scale)):
        assert isinstance(data, fx.Node)
        codes = _before_copies(data)
        if not _is_visible(codes):
            continue
        segments = codes.target is fp8.transpose_segments.default
        _require(segments, node, f"operand {data} is not in padded segments")
        same = _is_same(codes.args[1], scale)
        _require(same, node, f"{data} was quantized with another scale")
    lengths = _shape(a)[-1:], _shape(b)[-1:]
    _require(_agree(*lengths), node, f"contracts {lengths[0][0]} with {lengths[1][0]}")


def _verify_mask_format(node: fx.Node) -> None:
    x, format, *_ = node.args
    known = graph.tensor(x).dtype in masking.MASKED_DTYPES  # type: ignore[arg-type]
    _require(known, node, "masks what is neither bfloat16, float16 nor float32")
    try:
        simulated_format(str(format))
    except ValueError as error:
        raise _malformed(node, f"{error}") from None


def _verify_settled(node: fx.Node) -> None:
    """It waits for a copy of the tensor that it is given."""
    copy, source = node.args
    assert isinstance(copy, fx.Node)
    _require(copy.target in (to_host, from_host), node, f"{copy} is no copy")
    _require(copy.args[0] is source, node, f"{copy} is no copy of {source}")


def _verify_from_host(node: fx.Node) -> None:
    copy = node.args[0]
    assert isinstance(copy, fx.Node)
    begun = copy.target in (to_host, from_host)
    _require(not begun, node, f"{copy} is not settled: it may not be all there")


# One for each operator of the dialect, and for copies of the host.
VERIFIERS: dict[Any, Callable[[fx.Node], None]] = {
    fp8.amax.default: _verify_amax,
    **dict.fromkeys((op for op, o in OPERATORS.items() if o.multiplies), _verify_scaled_mm),
    fp8.padded_ends.default: _verify_padded_ends,
    fp8.segment_amax.default: _verify_segment_amax,
    fp8.transpose_segments.default: _verify_transpose_segments,
    fp8.scaled_grouped_mm.default: _verify_scaled_grouped_mm,
    fp8.scaled_grouped_outer.default: _verify_scaled_grouped_outer,
    fp8.scale.default: _verify_scale,
    fp8.quantize.default: _verify_quantize,
    fp8.dequantize.default: _verify_dequantize,
    fp8.transpose.default: _verify_transpose,
    fp8.joined.default: _verify_joined,
    fp8.as_bytes.default: _verify_as_bytes,
    fp8.as_codes.default: _verify_as_codes,
    fp8.mask_format.default: _verify_mask_format,
    from_host: _verify_from_host,
    settled: _verify_settled,
}


def _before_copies(node: fx.Node) -> fx.Node:
    """The tensor that is on the host meanwhile, where a graph says which."""
    while node.target in (to_host, from_host, settled):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _untransposed(codes: fx.Node) -> fx.Node:
    codes = _before_copies(codes)
    if codes.target is not fp8.transpose.default:
        return codes
    return _before_copies(codes.args[0])  # type: ignore[arg-type]


def _is_visible(codes: fx.Node) -> bool:
    """Whether the graph says how codes were made: not those of another half, or of a kernel."""
    return codes.op == "call_function" and not graph.is_getitem(codes)


def _is_same(x: object, y: object) -> bool:
    """Whether two values are one node, or copies that a recomputation made."""
    if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
        return False
    return x.meta.get(CARRIES, x.name) == y.meta.get(CARRIES, y.name)


def _is_gathered(own: Any, scale: Any) -> bool:
    """Whether the scales of a part's rows are from the same amaxes as those of all rows."""
    scales = own.target is scale.target is fp8.scale.default
    return not scales or _is_same(_behind_gather(scale.args[0]), own.args[0])


def _behind_gather(node: fx.Node) -> fx.Node:
    """What a rank sent of a matrix that was gathered; the matrix itself if it was not."""
    part = node
    while graph.operator_of(part).target in _ON_THE_WIRE:
        part = part.args[0]  # type: ignore[assignment]
        part = part[0] if isinstance(part, (list, tuple)) else part
    return part


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(graph.tensor(node).shape)


def _agree(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether shapes are the same, as far as sizes that do not vary tell: no guard comes of it."""
    known = (pair for pair in zip(a, b, strict=False) if all(isinstance(x, int) for x in pair))
    return len(a) == len(b) and all(x == y for x, y in known)


def _rank(node: Any) -> int:
    return graph.tensor(node).ndim


def _is_codes(node: fx.Node) -> bool:
    val = graph.value(node)
    return val is not None and is_fp8(val.dtype)


def _is_float(node: Any) -> bool:
    return graph.tensor(node).is_floating_point() and not _is_codes(node)


def _quantization(node: fx.Node, text: object) -> Quantization:
    """The quantization that an operator names; raises MalformedGraph if there is none."""
    try:
        return parse(str(text))
    except ValueError as error:
        raise _malformed(node, f"{error}") from None


def _require_format(node: fx.Node, format: object) -> None:
    _require(format in FORMATS, node, f"unknown format {format}")


def _require(condition: bool, node: fx.Node, problem: str) -> None:
    if not condition:
        raise _malformed(node, problem)


def _malformed(node: fx.Node, problem: str) -> MalformedGraph:
    where = graph.module_path(node) or "top level"
    return MalformedGraph(f"{node.format_node()} in {where}: {problem}")
