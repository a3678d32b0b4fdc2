"""Expert groups: consecutive rows of a matrix that belong to one expert.

`offsets`, int32 [E], contains the end of each group: [3, 3, 7] means that expert 0 has rows 0 to 2,
expert 1 none, and expert 2 rows 3 to 6. Offsets are computed on the device; only reference GEMMs
wait for them. Rows after the last group may have any values.

A GEMM that contracts over rows reads padded groups. Each group is padded with zeros to a multiple
of 16 rows, at least 16.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE, padded_size


def padded_length(rows: Any, experts: int) -> Any:
    """Return an upper limit of the total number of rows of all padded groups."""
    return padded_size(rows) + experts * CONTRACTION_MULTIPLE


def rows_of_padded(length: int, experts: int) -> int:
    """Invert `padded_length`. The result is the number of rows, rounded up to a multiple of 16."""
    return length - experts * CONTRACTION_MULTIPLE


def group_starts(ends: Tensor) -> Tensor:
    # `ends[:-1]` is not used, because indexing a fake GPU tensor needs a PyTorch with CUDA.
    return torch.nn.functional.pad(ends, (1, 0)).narrow(0, 0, ends.shape[0])


def padded_group_ends(offsets: Tensor) -> Tensor:
    """Return the index of the row after each padded group."""
    sizes = offsets - group_starts(offsets)
    multiples = sizes + (CONTRACTION_MULTIPLE - 1) & -CONTRACTION_MULTIPLE
    return multiples.clamp_min(CONTRACTION_MULTIPLE).cumsum(0, dtype=torch.int32)


def expert_of(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the expert of each row index, int64. Rows after the last group get expert E - 1."""
    return (rows.unsqueeze(-1) >= ends).sum(-1).clamp_max(ends.shape[0] - 1)


def padded_rows(count: Any, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each padded row, its original row, whether it is a token, and its expert."""
    ends, starts = padded_group_ends(offsets), group_starts(offsets)
    length = padded_length(count, offsets.shape[0])
    place = torch.arange(length, dtype=torch.int32, device=offsets.device)
    expert = expert_of(place, ends)
    row, end = place - group_starts(ends)[expert] + starts[expert], offsets[expert]
    return torch.minimum(row, end - 1).clamp_min(0), row < end, expert


def group_slices(ends: Tensor) -> list[slice]:
    """Return the rows of each group. The CPU waits until `ends` are computed."""
    return [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
