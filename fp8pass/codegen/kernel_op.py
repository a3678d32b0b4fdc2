"""Kernels as operators: `fp8pass_codegen::<name>(Tensor[] inputs, str program) -> Tensor[]`.

Called eagerly on a GPU they run a Triton kernel generated for the program, elsewhere its reference.
Inductor allocates the results and launches the kernel as it does its own. The program is an
argument, so that graphs can be cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.codegen.buffers import library
from fp8pass.codegen.program import Program, reference


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
    """The operator that runs programs with the kernels that `prepare` makes for them."""

    def on_gpu(inputs: list[Tensor], program: str) -> list[Tensor]:
        parsed = Program.parse(program)
        rows, columns = parsed.sizes(inputs)
        outputs = parsed.empty_outputs(inputs)
        if not rows:
            return [x.zero_() for x in outputs]
        launch = prepare(parsed, rows, columns)
        arguments = {**launch.sizes, **launch.constants, "num_warps": launch.num_warps}
        launch.kernel[launch.grid](*(x.contiguous() for x in inputs), *outputs, **arguments)
        return outputs

    def elsewhere(inputs: list[Tensor], program: str) -> list[Tensor]:
        return reference(Program.parse(program), inputs)

    def fake(inputs: list[Tensor], program: str) -> list[Tensor]:
        return Program.parse(program).empty_outputs(inputs)

    library.define(f"{name}(Tensor[] inputs, str program) -> Tensor[]")
    library.impl(name, on_gpu, "CUDA")
    library.impl(name, elsewhere, "CPU")
    torch.library.register_fake(f"fp8pass_codegen::{name}", fake, lib=library)
    op = getattr(torch.ops.fp8pass_codegen, name).default

    def prepare_shapes(text: str, shapes: list[Sequence[Any]]) -> Launch:
        parsed = Program.parse(text)
        *leading, columns = shapes[parsed.matrix_input]
        return prepare(parsed, math.prod(leading), int(columns))

    compat.lower_to_triton(op, prepare_shapes)
    return op
