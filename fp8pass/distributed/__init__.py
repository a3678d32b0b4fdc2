"""Training on several ranks: communication in FP8, and memory budgets for pipelines.

compression.py         `compress`: replaces the communication of DDP and FSDP2
replicas.py            `average_sums`: averages sums of gradients over copies of a model
gradient_sums.py       sums of gradients over ranks, sent in FP8
local_sums.py          quantized sums of gradients that ranks have not reduced yet
weight_gather.py       FSDP2 all-gathers of quantized weights, and which layers allow them
wire.py                packs gradients into FP8 buffers, and adds up received buffers
wire_kernels.py        the Triton kernels of `wire.py` and `weight_gather.py`
pipeline_parallel.py   a memory budget for each stage of a pipeline
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8pass.distributed.compression import compress as compress
    from fp8pass.distributed.pipeline_parallel import pipeline_configs as pipeline_configs
    from fp8pass.distributed.replicas import average_sums as average_sums

_MODULES = {
    "average_sums": "replicas",
    "compress": "compression",
    "pipeline_configs": "pipeline_parallel",
}

__all__ = ["average_sums", "compress", "pipeline_configs"]


def __getattr__(name: str) -> Any:
    # Imported late: builds without torch.distributed cannot import these modules.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
