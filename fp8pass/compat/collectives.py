"""Collectives of one tensor that PyTorch has renamed; it warns of the old names on every rank."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

_module: Any = dist
all_gather_single = getattr(_module, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(_module, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)
