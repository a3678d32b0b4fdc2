"""Merge kernels that can run together into one operator with one launch.

    before   a = rows([x], program);  b = scaled_mm(a, ...);  c = rows([w], program)
    after    a, c = rows([x, w], [program, program]);  b = scaled_mm(a, ...)

Only small kernels join an earlier launch, because results that are computed early take memory for
longer.
"""

from __future__ import annotations

from torch import fx

from fp8pass import graph
from fp8pass.codegen.kernels.launch import MOST_PARTS
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.kernels.tile_kernel import tiles
from fp8pass.codegen.program.emit import emit_batch
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.passes.context import Context

# Kernels that move more bytes do not join an earlier launch. Moving this many bytes takes as long
# as a launch.
MOST_MOVED = 64 * 2**20
# The most bytes of results that one launch computes early.
MOST_EARLY = 32 * 2**20


def fuse_launches(gm: fx.GraphModule, ctx: Context) -> None:
    groups = [group for op in (rows, tiles) for group in _groups(gm.graph, op) if len(group) > 1]
    for group in groups:
        _fuse(group)
    if groups:
        graph.sort_and_prune(gm.graph)


def _groups(g: fx.Graph, op: object) -> list[list[fx.Node]]:
    """Split the kernels `op` into groups that can run where their first kernel runs."""
    position = {node: i for i, node in enumerate(g.nodes)}
    groups: list[list[fx.Node]] = []
    for node in g.nodes:
        if node.target is not op:
            continue
        if groups and _joins(node, groups[-1], position):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _joins(node: fx.Node, group: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    first, *early = *group, node
    results = [x for member in early for x in member.meta["val"]]
    return (
        all(position[x] < position[first] for x in node.all_input_nodes)
        and {x.device for x in results} == {first.meta["val"][0].device}
        and not any(_batch(member).joins for member in (first, node))
        and sum(len(_batch(member).programs) for member in (first, *early)) <= MOST_PARTS
        and sum(map(graph.bytes_of, results)) <= MOST_EARLY
        and _bytes_moved(node) <= MOST_MOVED
    )


def _bytes_moved(node: fx.Node) -> int:
    results = sum(map(graph.bytes_of, node.meta["val"]))
    return results + sum(map(graph.nbytes, node.all_input_nodes))


def _batch(node: fx.Node) -> Batch:
    return Batch.parse(str(node.args[1]))


def _fuse(group: list[fx.Node]) -> None:
    batch = Batch(tuple(program for node in group for program in _batch(node).programs))
    inputs = [x for node in group for x in node.args[0]]  # type: ignore[union-attr]
    results = iter(emit_batch(group[0].target, batch, inputs, like=group[0]))  # type: ignore[arg-type]
    for node in group:
        found = [next(results) for _ in node.meta["val"]]
        for item in list(node.users):
            assert graph.is_getitem(item), item
            item.replace_all_uses_with(found[item.args[1]])  # type: ignore[index]
