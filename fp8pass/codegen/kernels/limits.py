"""Which matrices and programs the kernels take: devices, sizes, formats and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from fp8pass import hardware
from fp8pass.codegen.kernels.triton_ops import CODE_TYPES
from fp8pass.codegen.program.ir import Program
from fp8pass.config import BUG
from fp8pass.dialect.quantization import ROW, TENSOR
from fp8pass.graph.nodes import aten, is_call, tensor
from fp8pass.graph.patterns import is_batched_transpose, quantization_of, skip_reshapes, transposes

fp8 = torch.ops.fp8pass

# A kernel computes a matrix if it reads at most this many times the matrix's own bytes for it;
# otherwise the matrix is read from memory.
LARGEST_INPUTS = 2.0


class UnsupportedProgram(ValueError):
    """A program is well formed, but not one that a kernel can run; the message says why.

    Passes ask before they make one.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def check_stores(kernel: str, program: Program, formats: Mapping[str, Set[str]]) -> None:
    """Raise UnsupportedProgram unless a kernel stores all that a program does.

    `formats` are those of the codes that it stores in each layout.
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


def why_no_rows(codes: fx.Node) -> str | None:
    """Why the row kernel does not take a matrix of codes, as far as the matrix alone tells."""
    block = quantization_of(codes).block
    if block != ROW:
        return "one scale for all" if block == TENSOR else "scales vary along rows"
    if _has_columns_for_rows(codes.args[0]):  # type: ignore[arg-type]
        return "its rows are columns in memory"
    return why_no_kernel(codes)


def _has_columns_for_rows(x: fx.Node) -> bool:
    """Whether a matrix is a batch of transposed ones, of which the row kernel would need a copy."""
    copy = skip_reshapes(x)
    return is_call(copy, aten.clone.default) and is_batched_transpose(copy.args[0])  # type: ignore[arg-type]


def why_no_tiles(codes: fx.Node) -> str | None:
    """Why the tile kernel does not take a matrix of codes, as far as the matrix alone tells."""
    block = quantization_of(codes).block
    if block != TENSOR:
        return "scales by row" if block == ROW else "scales vary along rows"
    return why_no_kernel(codes) or (None if transposes(codes) else "not needed transposed")


def why_no_kernel(codes: fx.Node) -> str | None:
    """Why neither kernel takes a matrix of codes: its format, its size or its device."""
    format = quantization_of(codes).format.name
    return why_not_a_matrix(codes) if format in CODE_TYPES else f"no kernel for {format}"


def why_not_a_matrix(x: fx.Node) -> str | None:
    """Why no kernel takes a value: its size or its device."""
    val = tensor(x)
    if val.ndim < 2 or not isinstance(val.shape[-1], int) or val.shape[-1] == 1:
        return "not a matrix of fixed width"
    return hardware.why_no_triton_kernels(val.device)
