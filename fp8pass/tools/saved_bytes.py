"""The bytes that a model saves for its backward, measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.tools.running import is_sharded, leaves_of


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            "The model takes derivatives within its forward with torch.func, which does not let "
            "explain count what is saved. It trains all the same, and the line that fp8pass logs "
            "at the second step says what its graphs keep."
        ) from error


def saved_bytes(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that one forward of `model`, compiled or not, saves for its backward.

    Parameters and leaves that require a gradient are not counted, which live on in any case;
    tensors that share a storage count once. Tensors are counted and dropped, so that a model whose
    activations would not fit can be measured; the backward of such a forward cannot run.

    Raises:
        RuntimeError: the forward takes derivatives itself.
    """
    held = (*model.parameters(), *model.buffers(), *leaves_of((args, kwargs)))
    own = {compat.weak_storage(t) for t in held}
    saved: dict[Any, int] = {}
    sharded = is_sharded(model)

    @torch.compiler.disable  # hooks of FSDP2 have it traced, where keys of memory are but shells
    def pack(tensor: Tensor) -> None:
        if sharded:  # what FSDP2 gathers takes the parameters' places for a while
            own.update(map(compat.weak_storage, model.parameters()))
        saved[compat.weak_storage(tensor)] = tensor.untyped_storage().nbytes()

    def unpack(_: None) -> Tensor:
        raise RuntimeError(
            "The model runs a backward within its forward. explain counts what a forward saves and "
            "keeps none of it: give it a forward without one."
        )

    with _explained(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return sum(count for storage, count in saved.items() if storage not in own)
