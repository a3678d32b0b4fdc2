"""What is private of FSDP2."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def fsdp_has_run(module: FSDPModule) -> bool:
    """Whether FSDP2 has seen a forward, and so knows how to gather each parameter."""
    return module._get_fsdp_state()._is_root is not None


def shard_of(parameter: DTensor) -> Tensor:
    """The tensor itself that FSDP2 asks how it is gathered; `to_local` makes another object."""
    return parameter._local_tensor
