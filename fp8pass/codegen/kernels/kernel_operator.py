"""Operators that run kernels: `fp8pass_codegen::<name>(Tensor[] inputs, str programs) -> Tensor[]`.

On a CPU they run the kernel's reference implementation. In compiled graphs, Inductor allocates the
results and launches the kernels. Programs are strings, because graphs with string arguments can be
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.codegen.buffers import buffer, library
from fp8pass.codegen.kernels.launch import Launch, LaunchPart, plan_launches
from fp8pass.codegen.program.ir import Load, Program
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.graph.classify import Kind, kind

# Prepares a program for a matrix [M, N], given M, which may be symbolic, and N.
Prepare = Callable[[Program, Any, int], LaunchPart]
# Given a program, N, a load and the index of a store: whether the result of the store may take the
# memory of the load.
MayOverwrite = Callable[[Program, int, Load, int], bool]

KERNELS: dict[Any, Prepare] = {}


def define_kernel(name: str, prepare: Prepare, may_overwrite: MayOverwrite | None = None) -> Any:
    """Define an operator, and return its overload.

    With `may_overwrite`, a result may take the memory of an input that nothing else reads.
    """

    def on_gpu(inputs: list[Tensor], programs: str) -> list[Tensor]:
        batch = Batch.parse(programs)
        results = batch.empty_outputs(inputs)
        run(prepare, batch, inputs, results)
        return results

    def elsewhere(inputs: list[Tensor], programs: str) -> list[Tensor]:
        return Batch.parse(programs).reference(inputs)

    def fake(inputs: list[Tensor], programs: str) -> list[Tensor]:
        return Batch.parse(programs).empty_outputs(inputs)

    library.define(f"{name}(Tensor[] inputs, str programs) -> Tensor[]")
    library.impl(name, on_gpu, "CUDA")
    library.impl(name, elsewhere, "CPU")
    torch.library.register_fake(f"fp8pass_codegen::{name}", fake, lib=library)
    op = getattr(torch.ops.fp8pass_codegen, name).default

    def prepare_all(inputs: Sequence[Any], programs: str) -> list[Launch]:
        sizes = [x.get_size() for x in inputs]
        return plan_launches(prepare_batch(prepare, Batch.parse(programs), sizes))

    def find_overwritten(node: fx.Node) -> dict[int, int]:
        return _find_overwritten(node, may_overwrite) if may_overwrite else {}

    compat.lower_to_triton(op, prepare_all, find_overwritten)
    KERNELS[op] = prepare
    return op


def _find_overwritten(node: fx.Node, may_overwrite: MayOverwrite) -> dict[int, int]:
    """Return a map from results to the inputs whose memory they may take, both by index."""
    inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    results, found = node.meta["val"], {}
    for program, read, numbers in Batch.parse(str(node.args[1])).split(range(len(inputs))):
        firsts = accumulate((load.tensor_count for load in program.loads), initial=0)
        places = [(load, read[i]) for load, i in zip(program.loads, firsts, strict=False)]
        whole = [(load, i) for load, i in places if load.operand == "full" and not load.width]
        free = [x for x in whole if inputs.count(inputs[x[1]]) == 1 and _is_last_use(inputs[x[1]])]
        for store, number in zip(program.stores_of_results, numbers, strict=True):
            result = results[number]
            for load, i in list(free) if program.stores[store].layouts == ("full",) else ():
                x = graph.tensor(inputs[i])
                fits = _is_like(x, result)
                if fits and may_overwrite(program, int(x.shape[-1]), load, store):
                    found[number] = i
                    free.remove((load, i))
                    break
    return found


def _is_like(x: Tensor, other: Tensor) -> bool:
    """Whether the sizes and dtypes of two tensors are known to be equal."""
    if x.ndim != other.ndim or x.dtype is not other.dtype:
        return False
    sizes = zip(x.shape, other.shape, strict=True)
    return all(compat.statically_known_true(a == b) for a, b in sizes)


def _is_last_use(x: fx.Node) -> bool:
    """Whether `x` is a GEMM's result or a graph input, and has only one user."""
    while len(x.users) == 1 and (kind(x) is Kind.VIEW or graph.is_call(x, buffer)):
        x = x.args[0]  # type: ignore[assignment]
    return len(x.users) == 1 and (kind(x) is Kind.GEMM or x.op == "placeholder")


def run(prepare: Prepare, batch: Batch, inputs: Sequence[Tensor], results: list[Tensor]) -> None:
    operands = [x.contiguous() for x in inputs]
    parts = prepare_batch(prepare, batch, [x.shape for x in operands])
    for launch in plan_launches(part for part in parts if part.grid):
        launch.run(operands, results)


def prepare_batch(
    prepare: Prepare, batch: Batch, sizes: Sequence[Sequence[Any]]
) -> Iterator[LaunchPart]:
    """Prepare each program of a batch. `sizes` contains the shape of each input."""
    for program, read, numbers in batch.split(range(len(sizes))):
        rows, columns = program.sizes([sizes[i] for i in read])
        part = prepare(program, rows, int(columns))
        yield replace(part, inputs=tuple(read), outputs=tuple(numbers))
