"""Segments: the rows of a matrix that one expert takes, one expert's after the other's.

`offsets`, int32 [E], says where each segment ends. Only run time knows, and nothing here waits for
it but the references. Rows behind the last segment are nobody's: they may hold anything.

A GEMM that contracts tokens needs segments whose length tensor cores take. So there is a second
place for each, padded: 16 rows at least, so that an empty segment gives a product, which is zero.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.coding import CONTRACTION_MULTIPLE, padded


def padded_length(rows: Any, experts: int) -> Any:
    """The most rows that padded segments of `rows` rows take, a multiple of 16."""
    return padded(rows) + experts * CONTRACTION_MULTIPLE


def rows_of_padded(length: int, experts: int) -> int:
    """The rows, rounded up, that so many rows were padded for: `padded_length` undone."""
    return length - experts * CONTRACTION_MULTIPLE


def starts_of(ends: Tensor) -> Tensor:
    """Where each segment begins, int32 [E], by where it ends."""
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def ends_of_padded(offsets: Tensor) -> Tensor:
    """Where each segment ends, int32 [E], if all are padded."""
    lengths = padded(offsets - starts_of(offsets)).clamp_min(CONTRACTION_MULTIPLE)
    return lengths.cumsum(0, dtype=torch.int32)


def slices_of(ends: Tensor) -> list[slice]:
    """The rows of each segment; waits for the device."""
    return [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
