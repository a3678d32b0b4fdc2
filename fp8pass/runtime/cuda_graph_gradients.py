"""Gradient accumulation with CUDA graphs, which own the memory of their outputs.

Autograd assigns the first gradient to `.grad` without a copy. In replays, the next micro-batch
overwrites this memory before autograd adds its gradients (pytorch/pytorch#169545). So gradients in
the memory of a CUDA graph are copied before a forward starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8pass import compat

# Of all compiled graphs, because the first graph of a forward checks all parameters.
_parameters = compat.WeakIdKeyDictionary()


def protect_gradients(program: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled `program`, so that it preserves the gradients of earlier micro-batches."""

    def run(*args: Any) -> Any:
        trained = (x for x in args if isinstance(x, nn.Parameter) and x.requires_grad)
        _parameters.update(dict.fromkeys(trained, True))
        for device in {x.device for x in args if isinstance(x, Tensor)}:
            copy_replayed(device)
        return program(*args)

    return run


def copy_replayed(device: torch.device) -> None:
    """Copy gradients that the next replays on `device` would overwrite."""
    replayed = compat.find_replayed_memory(device)
    # Only the first graph of a forward finds replayed memory; later graphs skip the loop.
    for parameter in _parameters if replayed else ():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part.untyped_storage().data_ptr() in replayed:
            parameter.grad = gradient.detach().clone()
