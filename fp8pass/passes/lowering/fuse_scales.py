"""Compute the second stages of several amaxes, and their scales, in one launch of a row kernel.

    before   a = amax(p);  s = scale(a)
             b = amax(q);  t = scale(b)
    after    s, t = rows([p, q], [program, program])

`p` and `q` are amaxes of rows or tiles that a kernel has stored (first stages), or inputs of the
graph. A second stage reads a few kilobytes, which takes less time than a launch. A layer has a
dozen or more second stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.row_kernel import LONGEST_REDUCED, rows
from fp8pass.codegen.kernels.tile_kernel import holds_amaxes, tiles
from fp8pass.codegen.program.emit import emit_batch
from fp8pass.codegen.program.ir import Load, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.dialect.quantization import parse
from fp8pass.graph.nodes import aten, tensor
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

# Inductor splits a reduction of more elements into two kernels.
LONGEST_UNSPLIT = 8192


def fuse_scales(gm: fx.GraphModule, ctx: Context) -> None:
    _move_input_amaxes_up(gm.graph)
    groups = [group for group in _group_amaxes(gm.graph) if _saves_launches(group)]
    for group in groups:
        _fuse(group)
    if groups:
        graph.sort_and_prune(gm.graph)


def _saves_launches(amaxes: list[fx.Node]) -> bool:
    """Whether one kernel replaces several: Inductor splits reductions of many elements in two."""
    return len(amaxes) > 1 or tensor(amaxes[0].args[0]).numel() > LONGEST_UNSPLIT  # type: ignore[arg-type]


def _move_input_amaxes_up(g: fx.Graph) -> None:
    """Move the amaxes of a graph's inputs to its beginning, where they form one group."""
    first = next(node for node in g.nodes if node.op != "placeholder")
    for node in list(g.nodes):
        if node is not first and _finishes_amax(node) and node.args[0].op == "placeholder":
            first.prepend(node)


def _group_amaxes(g: fx.Graph) -> Iterator[list[fx.Node]]:
    """Group amaxes so that one kernel can compute the scales before other nodes read an amax."""
    group: list[fx.Node] = []
    results: set[fx.Node] = set()
    for node in g.nodes:
        if _finishes_amax(node):
            if group and tensor(group[0]).device != tensor(node).device:
                yield group
                group, results = [], set()
            group.append(node)
            results.add(node)
        elif not results.isdisjoint(node.all_input_nodes):
            if node.target is fp8.scale.default:
                results.add(node)
            else:
                yield group
                group, results = [], set()


def _finishes_amax(node: fx.Node) -> bool:
    if not graph.is_call(node, fp8.amax.default) or node.args[1] != "tensor":
        return False
    (source,) = node.all_input_nodes
    kernel = source.args[0] if graph.is_getitem(source) else None
    is_stored = isinstance(kernel, fx.Node) and kernel.target in (rows, tiles)
    if not is_stored and source.op != "placeholder":
        return False
    count = tensor(source).numel()  # large if the kernel stores a whole matrix
    return holds_amaxes(source) and isinstance(count, int) and count <= LONGEST_REDUCED


def _fuse(amaxes: list[fx.Node]) -> None:
    replaced, programs, inputs = [], [], []
    for amax in amaxes:
        scales = [user for user in amax.users if user.target is fp8.scale.default]
        stored = scales if len(scales) == len(amax.users) else [amax, *scales]
        replaced += stored
        programs.append(_make_program(amax, scales, stored))
        with amax.graph.inserting_before(amax):
            x = graph.emit(amax.graph, aten.reshape.default, amax.args[0], [1, -1], like=amax)
        inputs.append(x)
    results = emit_batch(rows, Batch(tuple(programs)), inputs, like=amaxes[-1])
    for node, result in zip(replaced, results, strict=True):
        with result.graph.inserting_after(result):
            number = graph.emit(result.graph, aten.reshape.default, result, [], like=node)
        node.replace_all_uses_with(number)


def _make_program(amax: fx.Node, scales: list[fx.Node], stored: list[fx.Node]) -> Program:
    steps = [Step(amax.name, "row_amax", ("partial",))]
    steps += [Step(s.name, "scale", (amax.name, parse(str(s.args[1])).format.name)) for s in scales]
    stores = (Store(node.name, ("row",), dtype="float32") for node in stored)
    return Program((Load("partial", "full"),), tuple(steps), tuple(stores)).canonical()
