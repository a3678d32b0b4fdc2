"""Expert groups: consecutive rows of a matrix that belong to one expert.

`offsets`, int32 [E], contains for each group the index of the row after its last row. Offsets are
computed on the device at run time, and only the references of GEMMs make the CPU wait for them.
Rows after the last group belong to no expert and may have any values.

Tensor cores support only contractions over a multiple of 16 rows. A GEMM that contracts the rows of
each group therefore reads padded groups, which have a multiple of 16 rows. An empty group is padded
to 16 rows of zeros, so that its product is zero.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8pass.dialect.encoding import CONTRACTION_MULTIPLE, padded_size


def padded_length(rows: Any, experts: int) -> Any:
    """Return an upper limit, in multiples of 16, for the total number of rows of padded groups."""
    return padded_size(rows) + experts * CONTRACTION_MULTIPLE


def rows_of_padded(length: int, experts: int) -> int:
    """Invert `padded_length`: return the number of rows before padding, rounded up to 16."""
    return length - experts * CONTRACTION_MULTIPLE


def group_starts(ends: Tensor) -> Tensor:
    """Return the index of the first row of each group, int32 [E]."""
    # Indexing a fake GPU tensor would need a PyTorch with CUDA; `narrow` does not.
    return torch.nn.functional.pad(ends, (1, 0)).narrow(0, 0, ends.shape[0])


def padded_group_ends(offsets: Tensor) -> Tensor:
    """Return the index of the row after each padded group, int32 [E]."""
    sizes = offsets - group_starts(offsets)
    multiples = sizes + (CONTRACTION_MULTIPLE - 1) & -CONTRACTION_MULTIPLE
    return multiples.clamp_min(CONTRACTION_MULTIPLE).cumsum(0, dtype=torch.int32)


def expert_of(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the index of each row's expert, int64; E - 1 for rows after the last group."""
    return (rows.unsqueeze(-1) >= ends).sum(-1).clamp_max(ends.shape[0] - 1)


def padded_rows(count: Any, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the source of each row of a matrix of padded groups.

    `count` is the number of rows before padding. Returns three tensors with an element for each row
    of the padded matrix: the index of the source row before padding, whether the row has a source
    (False for padding), and the index of the row's expert.
    """
    ends, starts = padded_group_ends(offsets), group_starts(offsets)
    length = padded_length(count, offsets.shape[0])
    place = torch.arange(length, dtype=torch.int32, device=offsets.device)
    expert = expert_of(place, ends)
    row, end = place - group_starts(ends)[expert] + starts[expert], offsets[expert]
    return torch.minimum(row, end - 1).clamp_min(0), row < end, expert


def group_slices(ends: Tensor) -> list[slice]:
    """Return a slice of row indices for each group. The CPU waits until `ends` are computed."""
    return [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
