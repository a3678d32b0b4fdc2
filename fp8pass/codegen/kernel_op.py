"""Kernels as operators: `fp8pass_codegen::<name>(Tensor[] inputs, str programs) -> Tensor[]`.

Called eagerly on a GPU they run Triton kernels generated for the programs, elsewhere references.
Inductor allocates the results and launches the kernels as it does its own. Programs are an
argument, so that graphs can be cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.codegen.batch import Batch
from fp8pass.codegen.buffers import library
from fp8pass.codegen.program import Program


@dataclass(frozen=True)
class Launch:
    """How to run a kernel on a matrix.

    Attributes:
        kernel: the Triton function, of inputs `in0`, ..., results `out0`, ..., sizes and constants.
        grid: how many programs.
        sizes: run-time arguments.
        constants: compile-time arguments.
        num_warps: of a program.
    """

    kernel: Any
    grid: tuple[Any]
    sizes: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int


# From a program and the sizes M and N of its matrix, of which M may be symbolic.
Prepare = Callable[[Program, Any, int], Launch]


def define_kernel(name: str, prepare: Prepare) -> Any:
    """The operator that runs batches of programs with the kernels that `prepare` makes for them."""

    def on_gpu(inputs: list[Tensor], programs: str) -> list[Tensor]:
        batch = Batch.parse(programs)
        results = batch.empty_outputs(inputs)
        for program, operands, numbers in batch.parts(inputs):
            rows, columns = program.sizes(operands)
            outputs = [results[number] for number in numbers]
            if not rows:
                for x in outputs:
                    x.zero_()
                continue
            launch = prepare(program, rows, columns)
            arguments = {**launch.sizes, **launch.constants, "num_warps": launch.num_warps}
            launch.kernel[launch.grid](*(x.contiguous() for x in operands), *outputs, **arguments)
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

    def prepare_each(programs: str, inputs: list[Any]) -> Iterator[tuple[Launch, list, list[int]]]:
        for program, operands, numbers in Batch.parse(programs).parts(inputs):
            *leading, columns = operands[program.matrix_input].get_size()
            yield prepare(program, math.prod(leading), int(columns)), operands, numbers

    compat.lower_to_triton(op, prepare_each)
    return op
