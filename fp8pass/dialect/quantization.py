"""Quantizations: a number format, the elements that share a scale, and how scales are stored.

Operators of the dialect receive a text, such as `e4m3 row` or `e2m2 1×128`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.formats import E4M3, FORMATS, Format
from fp8pass.dialect.scaling import amax_quotient, round_up_to_power_of_two, truncate_to_bf16

# Rows and columns of a block. 0 stands for the whole dimension.
Block = tuple[int, int]
TENSOR: Block = (0, 0)
ROW: Block = (1, 0)
# Blocks that cuBLASLt multiplies on Hopper.
TALL: Block = (1, 128)
SQUARE: Block = (128, 128)
# Blocks that users can choose for GEMM operands.
OPERAND_BLOCKS: dict[str, Block] = {"row": ROW, "tensor": TENSOR}

# For each form of scales: the stored dtype, and whether scales are rounded up to powers of two.
SCALE_FORMS = {
    "fp32": ("float32", True),
    "bf16": ("bfloat16", False),
    "e8m0": ("float8_e8m0fnu", True),
}


def group(size: int) -> Block:
    return 1, size


def block_text(block: Block) -> str:
    """Return `tensor`, `row`, or rows × columns, such as `1×128`."""
    names = {b: name for name, b in OPERAND_BLOCKS.items()}
    return names.get(block) or "×".join(map(str, block))


def parse_block(text: str) -> Block:
    if text in OPERAND_BLOCKS:
        return OPERAND_BLOCKS[text]
    rows, columns = map(int, text.split("×"))
    return rows, columns


@dataclass(frozen=True)
class Quantization:
    """How a tensor is quantized: `x ≈ data * scale`, with one scale for each block."""

    format: Format
    block: Block
    # A key of `SCALE_FORMS`. By default bf16 if scales vary along the last dimension, else fp32.
    scales: str = ""

    def __post_init__(self) -> None:
        if not self.scales:
            object.__setattr__(self, "scales", "bf16" if self.block[1] else "fp32")

    def __str__(self) -> str:
        words = [self.format.name, block_text(self.block)]
        is_default = self == Quantization(self.format, self.block)
        return " ".join(words if is_default else [*words, self.scales])

    @property
    def scale_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, SCALE_FORMS[self.scales][0])
        return dtype

    @property
    def is_for_operands(self) -> bool:
        """Whether scales are powers of two, as in GEMM operands but not in saved tensors."""
        return SCALE_FORMS[self.scales][1]

    @property
    def is_in_groups(self) -> bool:
        """Whether scales vary along the last dimension."""
        return self.block[1] > 0

    @property
    def is_within_rows(self) -> bool:
        """Whether each block is a part of one row."""
        return self.block[0] == 1 and self.is_in_groups

    @property
    def survives_transpose(self) -> bool:
        """Whether the scales can be transposed with the tensor: one scale, or square blocks."""
        return self.block[0] == self.block[1]

    def scale_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of the scales of a tensor.

        The shape is [] for one scale, [M, 1] for row scales, [..., K / G] for groups of G elements,
        and [M / m, K / n] for blocks of m × n elements.
        """
        rows, columns = self.block
        if not columns:
            return (shape[0], 1) if rows else ()
        leading = shape[:-1] if rows == 1 else (*shape[:-2], shape[-2] // rows)
        return (*leading, shape[-1] // columns)

    def amax(self, x: Tensor) -> Tensor:
        if self.block == TENSOR:
            return x.abs().amax(dim=-1).amax().float()
        if self.block == ROW:
            return x.abs().amax(dim=-1, keepdim=True).float()
        dims = (-1,) if self.block[0] == 1 else (-3, -1)
        return self.split(x.contiguous()).abs().amax(dim=dims).float()

    def scale(self, amax: Tensor) -> Tensor:
        """Return scales that map `amax` to the format's largest value (LLMQ paper, section 3)."""
        if self.format.lossless:
            return torch.ones_like(amax, dtype=self.scale_dtype)
        round_scale = round_up_to_power_of_two if self.is_for_operands else truncate_to_bf16
        return round_scale(amax_quotient(amax, self.format)).to(self.scale_dtype)

    def split(self, x: Tensor) -> Tensor:
        """Split the dimensions of `x` into blocks. The result of `spread` broadcasts to them."""
        rows, columns = self.block
        groups = x.unflatten(-1, (-1, columns)) if columns else x
        return groups.unflatten(-3, (-1, rows)) if rows > 1 else groups

    def merge(self, blocks: Tensor, shape: Sequence[Any]) -> Tensor:
        return blocks.reshape(shape) if self.is_in_groups else blocks

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scales in fp32, in a shape that broadcasts to the result of `split`."""
        scales = scales.float()
        groups = scales.unsqueeze(-1) if self.block[1] else scales
        return groups.unsqueeze(-3) if self.block[0] > 1 else groups


@cache
def parse(text: str) -> Quantization:
    """Return the quantization that a text describes.

    Raises:
        ValueError: unknown format, block or form of scales, or a packed format without groups.
    """
    match = re.fullmatch(r"(\w+) (tensor|row|\d+×\d+)(?: (\w+))?", text)
    format, block, scales = match.groups("") if match else ("", "", "")
    if format not in FORMATS or (scales and scales not in SCALE_FORMS):
        raise ValueError(f"{text!r} is not a quantization, such as 'e4m3 row' or 'e4m3 1×32 e8m0'")
    found = Quantization(FORMATS[format], parse_block(block), scales)
    if found.format.packed and (found.block[0] != 1 or not found.is_in_groups):
        raise ValueError(
            f"{text!r}: {format} needs a scale for each group, such as '{format} 1×128'"
        )
    return found


# The quantization of `QuantizedWeight`, exported weights, and the operands of expert GEMMs.
BY_ROW = str(Quantization(E4M3, ROW))
