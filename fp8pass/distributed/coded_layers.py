"""Which linear layers have weights that FSDP2 can gather in codes, and why others have not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fp8pass.compat.fsdp import Gathered, gathered_parameters
from fp8pass.graph import dtype_text
from fp8pass.graph.linear_layers import why_not_of_this_size
from fp8pass.graph.names import clean_path, warn_about_idle_patterns
from fp8pass.graph.output_heads import is_exact, sizes_of_logits

# That the kernel which codes them reads.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reasons_against_codes(model: nn.Module, skip: tuple[str, ...]) -> dict[nn.Linear, str]:
    """Why the weight of each linear layer of a model is gathered as it was; '' where in codes."""
    modules = model.named_modules()
    linears = {m: clean_path(path) for path, m in modules if isinstance(m, nn.Linear)}
    warn_about_idle_patterns("skip", skip, "linear layer", list(linears.values()))
    logits = sizes_of_logits(model)
    found = dict.fromkeys(linears, "FSDP2 gathers no weight of its own")
    for module in model.modules():
        for each in gathered_parameters(module) if isinstance(module, FSDPModule) else ():
            layer = each.module
            if isinstance(layer, nn.Linear) and each.name == "weight":
                skipped = is_exact(linears[layer], layer, logits, skip)
                found[layer] = "it is an output head, or skipped" if skipped else _why_not(each)
    return found


def _why_not(each: Gathered) -> str:
    weight: Any = each.module.weight
    if not isinstance(weight, DTensor) or weight.dtype not in DTYPES:
        return f"its weight is a {type(weight).__name__} of {dtype_text(weight.dtype)}"
    if each.dtype is not torch.bfloat16:
        return (
            f"it computes in {dtype_text(each.dtype)}, without fully_shard(..., "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    if each.is_kept_in_parts:
        return "reshard_after_forward is a number of ranks"
    return why_not_of_this_size(*weight.shape) or _why_not_in_rows(weight)


def _why_not_in_rows(weight: DTensor) -> str:
    """Why ranks do not have as many whole rows each of a matrix; '' if they have."""
    *replicas, shard = weight.placements
    ranks, rows = weight.device_mesh.size(-1), weight.shape[0]
    if weight.device.type not in (weight.device_mesh.device_type, "meta"):
        return f"it is on the {weight.device.type}"
    if shard != Shard(0) or not all(p.is_replicate() for p in replicas):
        return "its shards are shards of a tensor parallel one"
    if ranks == 1:
        return "one rank has all of it"
    return f"{ranks} ranks cannot share out {rows} rows evenly" if rows % ranks else ""
