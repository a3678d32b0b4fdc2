"""How a checkpoint stores the scales of FP8 data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.dialect.quantization import Quantization


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores the scales of a weight.

    Attributes:
        name: the tensor with the scales.
        shape, dtype: of this tensor.
        rows: number of rows of a matrix that share a scale in the checkpoint.
        quantization: the quantization of the weight, with blocks of at most `rows` rows.
        experts: number of stacked matrices.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    rows: int
    quantization: Quantization
    experts: int = 1

    def expand(self, stored: Tensor, rows: int) -> Tensor:
        """Return the fp32 scales of the quantized weight, given the `stored` scales.

        Each matrix of the weight has `rows` rows.
        """
        columns = stored.shape[-1] if self.quantization.is_in_groups else 1
        scales = stored.float().reshape(self.experts, -1, columns)
        count = rows // self.quantization.block[0]
        return scales.repeat_interleave(self._copies, 1)[:, :count].flatten(0, 1).contiguous()

    def collapse(self, scales: Tensor) -> Tensor:
        """Return the scales as the checkpoint stores them."""
        stored = scales.unflatten(0, (self.experts, -1))[:, :: self._copies]
        return stored.reshape(self.shape).to(self.dtype)

    def share(self, scales: Tensor) -> Tensor:
        """Give all rows that share a scale in the checkpoint the largest of their scales."""
        parts = scales.unflatten(0, (self.experts, -1)).split(self._copies, 1)
        return torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in parts], 1).flatten(0, 1)

    @property
    def _copies(self) -> int:
        return self.rows // self.quantization.block[0]
