"""Running a model without memory: fake tensors, and a look at every operator that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["OperatorObserver", "RealPositions", "WeakIdKeyDictionary", "fake_tensors"]


def fake_tensors() -> Any:
    """A context in which tensors have no memory; real ones may be read as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class OperatorObserver(TorchDispatchMode):
    """Calls `observe` with every operator in its context, its arguments and its result."""

    def __init__(self, observe: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.observe = observe

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles nothing while other modes are on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.observe(func, (args, kwargs), result)
        return result


class RealPositions(TorchDispatchMode):
    """Lets positions, and what follows from them alone, have values among fake tensors.

    Models look at them: Hugging Face's go without a mask where positions say that sequences are
    whole.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles nothing while other modes are on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.overloadpacket is torch.ops.aten.arange if not given else not _any_fake(given):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _any_fake(tensors: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in tensors)
