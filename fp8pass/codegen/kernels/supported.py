"""Which matrices and programs the kernels support: devices, sizes, formats and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from fp8pass import hardware
from fp8pass.codegen.kernels.triton_ops import TRITON_TYPES
from fp8pass.codegen.program.ir import Program
from fp8pass.config import BUG
from fp8pass.dialect.quantization import ROW, TENSOR
from fp8pass.graph.nodes import aten, is_call, tensor
from fp8pass.graph.patterns import is_batched_transpose, quantization_of, skip_reshapes, transposes

fp8 = torch.ops.fp8pass

# A kernel that quantizes a matrix can also compute the matrix. It does so if the operands have at
# most this many times the bytes of the matrix. Otherwise it reads the matrix from memory.
LARGEST_INPUTS = 2.0


class UnsupportedProgram(ValueError):
    """A kernel cannot run a well-formed program; the message contains the reason.

    Passes check for support before they emit a program.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def check_stores(kernel: str, program: Program, formats: Mapping[str, Set[str]]) -> None:
    """Raise UnsupportedProgram unless a kernel supports all stores of a program.

    `formats` contains the quantized formats that the kernel can store in each layout.
    """
    for store in program.stores:
        for layout in store.layouts:
            if layout not in formats:
                raise UnsupportedProgram(
                    f"the {kernel} kernel cannot store layout '{layout}' of {store.name}, "
                    f"only {', '.join(sorted(formats))}"
                )
            if store.format and store.format not in formats[layout]:
                raise UnsupportedProgram(
                    f"the {kernel} kernel cannot store format '{store.format}' of {store.name}, "
                    f"only {', '.join(sorted(formats[layout]))}"
                )


def why_no_rows(data: fx.Node) -> str | None:
    """Return why the row kernel cannot compute quantized `data`, or None. Ignores its operands."""
    block = quantization_of(data).block
    if block != ROW:
        return "one scale for the whole matrix" if block == TENSOR else "scales vary along rows"
    if _has_columns_for_rows(data.args[0]):  # type: ignore[arg-type]
        return "it is transposed in memory"
    return why_no_kernel(data)


def _has_columns_for_rows(x: fx.Node) -> bool:
    """Whether `x` is a batch of transposed matrices, which the row kernel would have to copy."""
    copy = skip_reshapes(x)
    return is_call(copy, aten.clone.default) and is_batched_transpose(copy.args[0])  # type: ignore[arg-type]


def why_no_tiles(data: fx.Node) -> str | None:
    """Return why the tile kernel cannot compute quantized `data`, or None. Ignores its operands."""
    block = quantization_of(data).block
    if block != TENSOR:
        return "one scale for each row" if block == ROW else "scales vary along rows"
    return why_no_kernel(data) or (None if transposes(data) else "its transpose is not needed")


def why_no_kernel(data: fx.Node) -> str | None:
    """Return why no kernel supports the format, size or device of quantized `data`, or None."""
    format = quantization_of(data).format.name
    return why_not_a_matrix(data) if format in TRITON_TYPES else f"no kernel for {format}"


def why_not_a_matrix(x: fx.Node) -> str | None:
    """Return why no kernel supports the size or device of a value, or None."""
    val = tensor(x)
    if val.ndim < 2 or not isinstance(val.shape[-1], int) or val.shape[-1] == 1:
        return "not a matrix of fixed width"
    return hardware.why_no_triton_kernels(val.device)
