"""Which matrices and programs the kernels support: devices, sizes, formats and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from fp8pass import hardware
from fp8pass.codegen.kernels.triton_ops import TRITON_TYPES
from fp8pass.codegen.program.ir import BLOCKS, Program
from fp8pass.config import BUG
from fp8pass.dialect.quantization import ROW, TENSOR
from fp8pass.graph.nodes import aten, is_call, tensor
from fp8pass.graph.patterns import (
    is_batched_transpose,
    quantization_of,
    skip_reshapes,
    skip_transposes,
    transposes,
)

fp8 = torch.ops.fp8pass

# The number formats of scales of groups that the row kernel can store.
GROUP_SCALES = ("bf16", "fp32")
# A kernel computes a matrix, instead of loading it, if the operands have at most this many times
# the bytes of the matrix.
LARGEST_INPUTS = 2.0


class UnsupportedProgram(ValueError):
    """A kernel cannot run a well-formed program; the message contains the reason."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {BUG}")


def check_stores(kernel: str, program: Program, formats: Mapping[str, Set[str]]) -> None:
    """Raise UnsupportedProgram unless `formats` (by layout) contains the format of each store."""
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
    """Return why the row kernel cannot compute `data`, whatever its operands are."""
    how, x = quantization_of(data), data.args[0]
    assert isinstance(x, fx.Node)
    if how.block == TENSOR:
        return "one scale for the whole matrix"
    if how.block[0] > 1 or how.scales not in GROUP_SCALES:
        return f"scales of {how}"
    if skip_transposes(x)[1]:
        return "quantized along columns"
    if _has_columns_for_rows(x):
        return "it is transposed in memory"
    return why_no_kernel(data)


def _has_columns_for_rows(x: fx.Node) -> bool:
    """Whether `x` copies a batch of transposed matrices. The kernel would repeat this copy."""
    copy = skip_reshapes(x)
    return is_call(copy, aten.clone.default) and is_batched_transpose(copy.args[0])  # type: ignore[arg-type]


def why_no_tiles(data: fx.Node) -> str | None:
    """Return why the tile kernel cannot compute `data`, whatever its operands are."""
    how = quantization_of(data)
    if how.block != TENSOR:
        return "one scale for each row" if how.block == ROW else f"scales of {how}"
    return why_no_kernel(data) or (None if transposes(data) else "its transpose is not needed")


def why_no_blocks(data: fx.Node) -> str | None:
    """Return why the tile kernel cannot compute `data`, an operand in blocks, and its scales."""
    how = quantization_of(data)
    if how.block not in BLOCKS.values() or how.scales != "fp32":
        return f"scales of {how}"
    if skip_transposes(data.args[0])[1]:  # type: ignore[arg-type]
        return "quantized along columns"
    return why_no_kernel(data)


def why_no_kernel(data: fx.Node) -> str | None:
    format = quantization_of(data).format.name
    return why_not_a_matrix(data) if format in TRITON_TYPES else f"no kernel for {format}"


def why_not_a_matrix(x: fx.Node) -> str | None:
    val = tensor(x)
    if val.ndim < 2 or not isinstance(val.shape[-1], int) or val.shape[-1] == 1:
        return "not a matrix of fixed width"
    return hardware.why_no_triton_kernels(val.device)
