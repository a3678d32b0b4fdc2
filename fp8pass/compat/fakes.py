"""Run a model without memory, on fake tensors, and observe its operators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fp8pass.compat.operators import tensor_leaves

__all__ = [
    "NEEDS_VALUES", "FakeTensor", "OperatorObserver", "RealPositions", "WeakIdKeyDictionary",
    "autocast_for_cpu", "use_fake_tensors",
]  # fmt: skip

# Raised if a result or its shape depends on values. Their attribute `func` is the operator.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# Ids of the threads in which `torch.autocast("cuda")` applies to the CPU.
_redirected: list[int] = []
_lock = threading.Lock()


def use_fake_tensors() -> Any:
    """Return a mode in which new tensors are fake, and operators accept real tensors, too."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class _CompilableMode(TorchDispatchMode):
    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because Dynamo does not compile under other modes."""
        return True


class OperatorObserver(_CompilableMode):
    """Calls `observe(operator, (args, kwargs), result)` for every operator."""

    def __init__(self, observe: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.observe(func, (args, kwargs), result)
        return result


class RealPositions(_CompilableMode):
    """Makes results of `arange`, and values computed only from them, real tensors.

    Hugging Face models read position ids to decide whether they need an attention mask.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tensor_leaves((args, kwargs))
        any_fake = any(isinstance(x, FakeTensor) for x in operands)
        if func.overloadpacket is torch.ops.aten.arange if not operands else not any_fake:
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def autocast_for_cpu() -> Iterator[None]:
    """Redirect this thread's `torch.autocast("cuda")` to the CPU, also in Dynamo's graphs.

    PyTorch disables `torch.autocast("cuda")` on a machine without a GPU.
    """
    thread = threading.get_ident()
    with _lock:
        if not _redirected:
            init = torch.autocast.__init__
            torch.autocast.__init__ = _redirect_to_cpu(init)  # type: ignore[method-assign]
        _redirected.append(thread)
    try:
        yield
    finally:
        with _lock:
            _redirected.remove(thread)
            if not _redirected:
                init = torch.autocast.__init__.__wrapped__  # type: ignore[attr-defined]
                torch.autocast.__init__ = init  # type: ignore[method-assign]


def _redirect_to_cpu(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kw: Any) -> None:
        if device_type == "cuda" and threading.get_ident() in _redirected:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, *args, **kw)

    return init_on_cpu
