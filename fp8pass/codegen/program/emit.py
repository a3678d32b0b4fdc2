"""Makes programs of loads, steps and stores, and adds the operator that runs them to the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import hold, is_buffer
from fp8pass.codegen.program.batch import Batch
from fp8pass.codegen.program.ir import OPERANDS, Program, Step, Store
from fp8pass.codegen.program.reader import Reader, tensors_of
from fp8pass.codegen.program.simplify import simplify
from fp8pass.codegen.program.verify import verify
from fp8pass.dialect.encoding import is_fp8
from fp8pass.graph.nodes import aten, tensor

# A program to be: the readers of its loads and steps, and its stores.
Draft = tuple[Iterable[Reader], Iterable[Store]]


def emit_kernel(target: Any, drafts: Iterable[Draft], *, like: fx.Node) -> list[fx.Node]:
    """Add an operator that runs a program for each draft, before `like`.

    Returns the results in the order of the stores. Codes that lie side by side are one result,
    which is returned for each of their stores.
    """
    programs, inputs = zip(*(_program(readers, stores) for readers, stores in drafts), strict=True)
    batch, operands = Batch(programs), [x for tensors in inputs for x in tensors]
    results = emit_batch(target, batch, operands, like=like)
    return [results[i] for _, _, numbers in batch.split(operands) for i in numbers]


def emit_batch(
    target: Any, batch: Batch, inputs: Sequence[fx.Node], *, like: fx.Node
) -> list[fx.Node]:
    """Add an operator that runs a batch, before `like`, and return its results.

    Raises MalformedProgram if a program is not well formed.
    """
    for program, operands, _ in batch.split(inputs):
        verify(program, [tensor(x) for x in operands])
    with like.graph.inserting_before(like):
        kernel = graph.emit(like.graph, target, list(inputs), batch.dumps(), like=like)
        return [
            graph.emit(like.graph, operator.getitem, kernel, i, like=like)
            for i in range(len(kernel.meta["val"]))
        ]


def _program(readers: Iterable[Reader], stores: Iterable[Store]) -> tuple[Program, list[fx.Node]]:
    """The program of a draft, and the nodes whose tensors it reads."""
    readers = list(readers)
    loads = {n: x for reader in readers for n, x in reader.loads.items()}
    steps: dict[fx.Node, list[Step]] = {}
    for reader in readers:
        steps |= _merged(steps, reader.steps)
    loaded = {load.name for load in loads.values()}
    read = sorted(loads, key=lambda n: (OPERANDS.index(loads[n].operand), n))
    program = Program(
        tuple(loads[n] for n in read),
        tuple(step for n in sorted(steps) for step in steps[n] if step.name not in loaded),
        tuple(stores),
    )
    inputs = [_in_memory(t) for n in read for t in tensors_of(n, loads[n])]
    return simplify(program).canonical(), inputs


def _merged(
    steps: dict[fx.Node, list[Step]], others: dict[fx.Node, list[Step]]
) -> dict[fx.Node, list[Step]]:
    """The steps of each node in `others`: those that `steps` has for it, then all that it lacks."""
    found = {}
    for node, more in others.items():
        known = steps.get(node, [])
        found[node] = [*known, *(step for step in more if step not in known)]
    return found


def _in_memory(node: fx.Node) -> fx.Node:
    """`node` as a contiguous tensor: itself, or its buffer if generated code computes it.

    All users of the node take the buffer, so that it is computed once.
    """
    val = tensor(node)
    if node.op != "call_function" or val.ndim == 0 or is_fp8(val.dtype):
        return node
    order = list(range(val.ndim))
    if is_buffer(node, order):
        return node
    if held := next((u for u in node.users if is_buffer(u, order)), None):
        return held
    return hold(node, order)


def has_shape(node: fx.Node) -> bool:
    """Whether a result can be viewed in the shape of `node`: at most one size varies."""
    return sum(not isinstance(size, int) for size in tensor(node).shape) <= 1


def replace(node: fx.Node, result: fx.Node) -> None:
    """Use `result`, a matrix, in place of `node`."""
    val = tensor(node)
    if val.ndim != tensor(result).ndim:
        shape = [size if isinstance(size, int) else -1 for size in val.shape]
        with result.graph.inserting_after(result):
            result = graph.emit(result.graph, aten.reshape.default, result, shape, like=node)
    node.replace_all_uses_with(result)
