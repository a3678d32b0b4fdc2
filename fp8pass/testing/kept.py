"""The tensors that a forward keeps for its backward, and those that a plan says it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.plan import Plan
from fp8pass.testing.steps import leaves

Kept = Counter[tuple[str, str]]  # dtype and shape


def kept_tensors(program: Callable[..., Any], args: Sequence[Any], held: Iterable[Tensor]) -> Kept:
    """What autograd saves in a call that is neither a parameter nor among `held`."""
    addresses = {t.data_ptr() for t in held}
    found: Kept = Counter()

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and x.data_ptr() not in addresses:
            found[graph.dtype_text(x.dtype), graph.shape_text(x)] += 1
            assert x.untyped_storage().nbytes() <= max(x.numel() * x.element_size(), 1), (
                f"{x.dtype} {tuple(x.shape)} is a part of a larger tensor, which it holds"
            )
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = leaves(program(*args))
    assert any(y.requires_grad for y in outputs), "no output has a gradient"
    return found


def planned_tensors(plan: Plan) -> Kept:
    """What a plan says is kept, on the device or the host."""
    kept = (s for s in plan.saved if s.bytes or s.host_bytes)
    return Counter((t.dtype, t.shape) for s in kept for t in s.tensors)
