"""Sums of gradients beside CUDA graphs, which own the memory of what they return.

Autograd makes the first gradient of a parameter its `.grad` as it is, without a copy. A backward
that is a CUDA graph writes the next micro-batch's gradients to the same memory, before these are
added: PyTorch raises an error while graphs are recorded, and adds gradients to themselves when they
are replayed (pytorch/pytorch#169545). So before a forward begins such a `.grad` moves elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8pass import compat

# Parameters that graphs ran with: the first graph of a forward looks after those of all others.
_parameters = compat.WeakIdKeyDictionary()


def keeping_sums(program: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled `program` that leaves gradients of earlier micro-batches as they are."""

    def run(*args: Any) -> Any:
        trained = (x for x in args if isinstance(x, nn.Parameter) and x.requires_grad)
        _parameters.update(dict.fromkeys(trained, True))
        for device in {x.device for x in args if isinstance(x, Tensor)}:
            move_out(device)
        return program(*args)

    return run


def move_out(device: torch.device) -> None:
    """Copy gradients that the next replays on a device would overwrite."""
    replayed = compat.find_replayed_memory(device)
    # All graphs of a forward but the first find nothing, and need not look at every parameter.
    for parameter in _parameters if replayed else ():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if part.untyped_storage().data_ptr() in replayed:
            parameter.grad = gradient.detach().clone()
