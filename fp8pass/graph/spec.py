"""What a well-formed graph is, checked between passes (`FP8PASS_CHECK=1`, and in the tests)."""

from __future__ import annotations

import torch
from torch import fx

from fp8pass import graph
from fp8pass.dialect.coding import is_fp8
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.classify import VIEWS

fp8 = torch.ops.fp8pass

# Besides the dialect, what may touch an FP8 tensor: nothing that computes.
_CARRIERS = VIEWS


class MalformedGraph(AssertionError):
    """A pass produced a graph that breaks an invariant; the message names the node."""


def verify(g: fx.Graph) -> None:
    """Raise MalformedGraph unless `g` is well formed.

    - Nodes come after what they use, and every one that is used has a fake value.
    - No FP8 tensor reaches an operator outside the dialect.
    - Every `scaled_mm` scales an operand by the scale it was quantized with, both by row or
      neither, and contracts lengths that agree. Operands are joined both, part by part.
    - Every `dequantize_groups` gets all planes of one tensor and the scales they were made with.
    """
    g.lint()
    for node in g.nodes:
        if node.op != "call_function":
            continue
        _require("val" in node.meta or not node.users, node, "has no fake value")
        if getattr(node.target, "namespace", None) != "fp8pass" and node.target not in _CARRIERS:
            for operand in node.all_input_nodes:
                val = graph.value(operand)
                _require(
                    val is None or not is_fp8(val.dtype), node, f"computes on FP8 tensor {operand}"
                )
        if node.target is fp8.scaled_mm.default:
            _verify_scaled_mm(node)
        if node.target is fp8.dequantize_groups.default:
            _verify_dequantize(node)


def _verify_scaled_mm(node: fx.Node) -> None:
    a, a_scale, b, b_scale = node.args[:4]
    joined = [x for x in (a, b) if isinstance(x, fx.Node) and x.target is fp8.joined.default]
    if joined:
        _verify_joined(node, joined)
        return
    for data, scale in ((a, a_scale), (b, b_scale)):
        assert isinstance(data, fx.Node)
        quantized = data.args[0] if data.target is fp8.transpose.default else data
        if isinstance(quantized, fx.Node) and quantized.op == "call_function":
            _require(
                quantized.target is fp8.quantize.default, node, f"operand {data} is not quantized"
            )
            same = _is_same_scale(quantized.args[1], scale)
            _require(same, node, f"{data} was quantized with another scale")
            by_row = graph.tensor(scale).ndim > 0  # type: ignore[arg-type]
            _require(
                not (by_row and data is not quantized), node, f"{data} has no scale for each row"
            )
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    ranks = {graph.tensor(scale).ndim for scale in (a_scale, b_scale)}  # type: ignore[arg-type]
    _require(len(ranks) == 1, node, "one operand has a scale, the other one for each row")
    lengths = graph.tensor(a).shape[-1], graph.tensor(b).shape[-1]
    _require(lengths[0] == lengths[1], node, f"contracts {lengths[0]} with {lengths[1]}")


def _is_same_scale(x: object, y: object) -> bool:
    """Whether two scales are one node, or copies that a recomputation made."""
    if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
        return False
    return x is y or (x.target is fp8.scale.default is y.target and x.args == y.args)


def _verify_joined(node: fx.Node, operands: list[fx.Node]) -> None:
    _require(len(operands) == 2, node, "one operand is joined, the other one is not")
    parts = [list(x.args[0]) for x in operands]  # type: ignore[arg-type]
    for part in (*parts[0], *parts[1]):
        quantized = part.args[0] if part.target is fp8.transpose.default else part
        _require(quantized.target is fp8.quantize.default, node, f"{part} is not quantized")
        one = graph.tensor(quantized.args[1]).ndim == 0
        _require(one, node, f"{part} has a scale for each row")
    widths = [[graph.tensor(part).shape[1] for part in side] for side in parts]
    _require(widths[0] == widths[1], node, f"contracts {widths[0]} with {widths[1]}")


def _verify_dequantize(node: fx.Node) -> None:
    planes, scales, format, group = node.args[:4]
    assert isinstance(planes, (list, tuple))
    assert isinstance(scales, fx.Node)
    _require(format in FORMATS, node, f"unknown format {format}")
    widths = FORMATS[str(format)].planes
    _require(len(planes) == len(widths), node, f"{format} has {len(widths)} planes")
    covered = graph.tensor(scales).shape[-1] * int(group)  # type: ignore[arg-type]
    for i, (data, width) in enumerate(zip(planes, widths, strict=True)):
        assert isinstance(data, fx.Node)
        length = graph.tensor(data).shape[-1] * 8 // width
        _require(length == covered, node, "scales do not cover the groups")
        if data.op == "call_function":
            _require(data.args[1] is scales, node, f"{data} was quantized with other scales")
            _require(data.args[2:] == (format, group, i), node, f"{data} is not its plane {i}")


def _require(condition: bool, node: fx.Node, problem: str) -> None:
    if not condition:
        where = graph.module_path(node) or "top level"
        raise MalformedGraph(f"{node.format_node()} in {where}: {problem}")
