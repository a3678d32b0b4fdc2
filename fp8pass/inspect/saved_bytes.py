"""The bytes that a model saves for its backward, measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that one forward of `model`, compiled or not, saves for its backward.

    Parameters are not counted; tensors that share a storage count once. Tensors are counted and
    dropped, so that a model whose activations would not fit can be measured; the backward of such a
    forward cannot run.
    """
    parameters = (*model.parameters(), *model.buffers())
    own = {compat.weak_storage(t) for t in parameters}
    saved: dict[Any, int] = {}

    def pack(tensor: Tensor) -> None:
        saved[compat.weak_storage(tensor)] = tensor.untyped_storage().nbytes()

    def unpack(_: None) -> Tensor:
        raise RuntimeError("the tensors that a measured forward saved were not kept")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return sum(count for storage, count in saved.items() if storage not in own)
