"""Granularities: which elements of a tensor share a scale (COAT section 5.2).

`TENSOR` and `ROW` are for operands of GEMMs, `group(G)` is for saved values. A scale of one
granularity has one shape, so that it can be told from the scale alone (`of_operand`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale.

    Attributes:
        name: `tensor`, `row` or `group`.
        group_size: elements of a group, along the last dimension; 0 unless these are groups.
    """

    name: str
    group_size: int = 0

    def __str__(self) -> str:
        """As tables show it: `tensor`, `row`, `1×128`."""
        return f"1×{self.group_size}" if self.group_size else self.name

    def scale_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of the scales of a tensor: [], [M, 1] of a matrix, or [..., K / G]."""
        if self.group_size:
            return (*shape[:-1], shape[-1] // self.group_size)
        return (shape[0], 1) if self is ROW else ()


TENSOR = Granularity("tensor")
ROW = Granularity("row")


def group(size: int) -> Granularity:
    """Groups of `size` elements along the last dimension."""
    return Granularity("group", size)


# The granularities of GEMM operands, by name.
OF_OPERANDS = {granularity.name: granularity for granularity in (ROW, TENSOR)}


def of_operand(scale_ndim: int) -> Granularity:
    """The granularity of a GEMM's operand, by the dimensions of its scale."""
    return ROW if scale_ndim else TENSOR
