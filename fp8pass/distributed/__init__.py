"""Training on several ranks: 8 bits on the wire, memory budgets for pipelines.

pipeline_parallel.py   a memory budget for each stage of a pipeline
layout.py              groups of gradients that begin at each parameter
wire.py                numbers as they cross the wire
wire_kernels.py        the same as Triton kernels
collectives.py         sums over ranks of numbers that cross it so
scaled_sums.py         the same, added up in FP8 on the way
coded_layers.py        which linear layers have weights that FSDP2 can gather in codes
weights.py             how it gathers them
compression.py         `compress`: all that in place of what DDP and FSDP2 send
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8pass.distributed.compression import compress as compress

__all__ = ["compress"]


def __getattr__(name: str) -> Any:
    # Builds without torch.distributed have no `compress`.
    if name != "compress":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fp8pass.distributed.compression import compress

    return compress
