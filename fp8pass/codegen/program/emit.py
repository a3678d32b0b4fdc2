"""Build programs from loads, steps and stores, and add the operator that runs them to a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import fx

from fp8pass import graph
from fp8pass.codegen.buffers import is_buffer, store_in_buffer
from fp8pass.codegen.program.ir import OPERAND_KINDS, Program, Step, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.codegen.program.reader import Reader, tensors_of
from fp8pass.codegen.program.simplify import simplify
from fp8pass.codegen.program.verify import verify
from fp8pass.dialect.encoding import is_fp8
from fp8pass.graph.nodes import aten, prims, tensor

Draft = tuple[Iterable[Reader], Iterable[Store]]


def emit_kernel(target: Any, drafts: Iterable[Draft], *, like: fx.Node) -> list[fx.Node]:
    """Insert an operator that runs a program for each draft. Return the results of the stores.

    Stores that write parts of one matrix return this matrix.
    """
    programs, inputs = zip(
        *(_build_program(readers, stores) for readers, stores in drafts), strict=True
    )
    batch, operands = Batch(programs), [x for tensors in inputs for x in tensors]
    results = emit_batch(target, batch, operands, like=like)
    return [results[i] for _, _, numbers in batch.split(operands) for i in numbers]


def emit_batch(
    target: Any, batch: Batch, inputs: Sequence[fx.Node], *, like: fx.Node
) -> list[fx.Node]:
    """Insert an operator that runs `batch` before `like`, and return its results.

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


def _build_program(
    readers: Iterable[Reader], stores: Iterable[Store]
) -> tuple[Program, list[fx.Node]]:
    readers = list(readers)
    loads = {n: x for reader in readers for n, x in reader.loads.items()}
    steps: dict[fx.Node, list[Step]] = {}
    for reader in readers:
        steps |= _merge_steps(steps, reader.steps)
    loaded = {load.name for load in loads.values()}
    read = sorted(loads, key=lambda n: (OPERAND_KINDS.index(loads[n].operand), n))
    program = Program(
        tuple(loads[n] for n in read),
        tuple(step for n in sorted(steps) for step in steps[n] if step.name not in loaded),
        tuple(stores),
    )
    inputs = [_store_contiguous(t) for n in read for t in tensors_of(n, loads[n])]
    columns = tensor(readers[0].matrix).shape[-1]
    return simplify(program, columns).canonical(), inputs


def _merge_steps(
    steps: dict[fx.Node, list[Step]], others: dict[fx.Node, list[Step]]
) -> dict[fx.Node, list[Step]]:
    """For each node of `others`, append the steps that `steps` lacks to the node's `steps`."""
    found = {}
    for node, more in others.items():
        known = steps.get(node, [])
        found[node] = [*known, *(step for step in more if step not in known)]
    return found


def _store_contiguous(node: fx.Node) -> fx.Node:
    """Return a node with the same value in contiguous memory, if necessary in a buffer.

    All users then read the buffer, so that the value is computed once.
    """
    val = tensor(node)
    if node.op != "call_function" or val.ndim == 0 or is_fp8(val.dtype):
        return node
    order = list(range(val.ndim))
    if is_buffer(node, order):
        return node
    if buffers := [u for u in node.users if is_buffer(u, order)]:
        return buffers[0]
    return store_in_buffer(node, order)


def has_shape(node: fx.Node) -> bool:
    """Whether `replace` can restore the shape of `node`: at most one size may be symbolic."""
    return sum(not isinstance(size, int) for size in tensor(node).shape) <= 1


def replace(node: fx.Node, result: fx.Node) -> None:
    val = tensor(node)
    if val.ndim != tensor(result).ndim:
        shape = [size if isinstance(size, int) else -1 for size in val.shape]
        with result.graph.inserting_after(result):
            result = graph.emit(result.graph, aten.reshape.default, result, shape, like=node)
    node.replace_all_uses_with(result)


def replace_column_sum(column_sum: fx.Node, partial_sums: fx.Node) -> None:
    """Replace a sum over all rows by the sum of the partial sums [P, N]."""
    val, add = tensor(column_sum), partial(graph.emit, column_sum.graph, like=column_sum)
    with column_sum.graph.inserting_before(column_sum):
        total = add(aten.sum.dim_IntList, partial_sums, [0])
        shaped = add(aten.reshape.default, total, list(val.shape))
        result = add(prims.convert_element_type.default, shaped, val.dtype)
    column_sum.replace_all_uses_with(result)
