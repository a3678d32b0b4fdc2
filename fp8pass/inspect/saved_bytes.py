"""What a model keeps for its backward, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat


def saved_bytes(model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes that one forward of `model`, a module, saves for its backward, parameters not counted.

    Tensors that share a storage count once. They are counted, not kept, so that a model whose
    activations would not fit can be measured; so its backward cannot run.
    """
    parameters = (*model.parameters(), *model.buffers())  # type: ignore[attr-defined]
    own = {compat.weak_storage(t) for t in parameters}
    saved: dict[Any, int] = {}

    def pack(tensor: Tensor) -> None:
        saved[compat.weak_storage(tensor)] = tensor.untyped_storage().nbytes()

    def unpack(_: None) -> Tensor:
        raise RuntimeError("what a measured forward saved was not kept")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return sum(count for storage, count in saved.items() if storage not in own)
