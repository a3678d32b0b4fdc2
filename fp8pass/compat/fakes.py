"""Running a model without memory: fake tensors, and a look at every operator that runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "NEEDS_VALUES",
    "OperatorObserver",
    "RealPositions",
    "WeakIdKeyDictionary",
    "autocast_for_cpu",
    "fake_tensors",
]

# What operators raise whose result, or its size, depends on values; `func` is the operator.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# The threads, and how many times each, whose CPU stands for the GPU to `torch.autocast`.
_standing_in: list[int] = []
_lock = threading.Lock()


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


@contextmanager
def autocast_for_cpu() -> Iterator[None]:
    """A context in which this thread's `torch.autocast("cuda")` is that of the CPU.

    For a CPU that stands for the GPU: autocast is by the device of tensors, and where there is no
    GPU PyTorch switches that of the GPU off. Dynamo makes the same objects, and so do its graphs.
    """
    thread = threading.get_ident()
    with _lock:
        if not _standing_in:
            init = torch.autocast.__init__
            torch.autocast.__init__ = _moved_to_cpu(init)  # type: ignore[method-assign]
        _standing_in.append(thread)
    try:
        yield
    finally:
        with _lock:
            _standing_in.remove(thread)
            if not _standing_in:
                init = torch.autocast.__init__.__wrapped__  # type: ignore[attr-defined]
                torch.autocast.__init__ = init  # type: ignore[method-assign]


def _moved_to_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """The initializer of `torch.autocast` for threads whose CPU stands for the GPU."""

    @functools.wraps(init)
    def moved(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and threading.get_ident() in _standing_in:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kwargs)

    return moved


def _any_fake(tensors: Any) -> bool:
    return any(isinstance(x, FakeTensor) for x in tensors)
