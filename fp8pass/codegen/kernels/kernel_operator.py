"""Operators that run kernels: `fp8pass_codegen::<name>(Tensor[] inputs, str programs) -> Tensor[]`.

On a CPU they run the kernel's reference implementation. In compiled graphs, Inductor allocates the
results and launches the kernels. Programs are strings, because graphs with string arguments can be
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.codegen.buffers import library
from fp8pass.codegen.kernels.launch import Launch, LaunchPart, plan_launches
from fp8pass.codegen.program.ir import Program
from fp8pass.codegen.program.program_batch import Batch

# Prepares a program, given M, which may be symbolic, and N.
Prepare = Callable[[Program, Any, int], LaunchPart]

KERNELS: dict[Any, Prepare] = {}


def define_kernel(name: str, prepare: Prepare) -> Any:

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

    compat.lower_to_triton(op, prepare_all)
    KERNELS[op] = prepare
    return op


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
