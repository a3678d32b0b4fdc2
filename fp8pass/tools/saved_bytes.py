"""Measure the bytes that a model saves for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.tools.running import find_leaves, is_sharded


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Return the bytes that one forward of `model`, compiled or not, saves for its backward.

    Parameters, buffers, and arguments that are leaf tensors with `requires_grad` do not count.
    Shared storages count once. Each saved tensor is freed immediately, so their sum may exceed the
    device's memory. The backward cannot run afterwards.
    """
    held = (*model.parameters(), *model.buffers(), *find_leaves((args, kwargs)))
    own = {compat.weak_storage(part) for t in held for part in _parts(t)}
    saved: dict[Any, int] = {}
    sharded = is_sharded(model)

    # FSDP2's hooks would trace `pack` with fake tensors, which have no storage.
    @torch.compiler.disable
    def pack(tensor: Tensor) -> None:
        if sharded:  # while a module runs, FSDP2 replaces its parameters by gathered copies
            own.update(compat.weak_storage(x) for p in model.parameters() for x in _parts(p))
        saved[compat.weak_storage(tensor)] = tensor.untyped_storage().nbytes()

    def unpack(_: None) -> Tensor:
        raise RuntimeError(
            "The model runs a backward within its forward, which explain does not support. Pass a "
            "model that runs only the forward."
        )

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            model(*args, **kwargs)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            "explain cannot count the saved tensors of a model whose forward calls torch.func. "
            "Train the model instead: fp8pass logs the saved bytes at the second step."
        ) from error
    return sum(count for storage, count in saved.items() if storage not in own)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, and the data and scales of a quantized weight, also of a DTensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    found = (getattr(tensor, name) for name in names)
    return [tensor, *(part for x in found if isinstance(x, Tensor) for part in _parts(x))]
