"""What Inductor has operators of its own for, random numbers above all, run op by op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch import fx
from torch._dynamo.utils import counters as counters
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def seeded_random_ops() -> Iterable[Any]:
    """Inductor's random numbers: a pure function of a seed, so recomputing gives the same."""
    return (
        torch.ops.prims.inductor_random.default,
        torch.ops.prims.inductor_randint.default,
        torch.ops.prims.inductor_lookup_seed.default,
    )


def run_op_by_op(gm: fx.GraphModule) -> None:
    """Have a graph of Inductor's give op by op what it gives in generated code.

    Its random numbers are a function of their seed; in their eager form they are not, and a
    backward that draws them again would get others. Positions may be in dtypes that PyTorch has no
    `arange` for.
    """
    prims = torch.ops.prims
    for node in gm.graph.nodes:
        if node.target is prims.inductor_random.default:
            node.target = _seeded_random
        elif node.target is prims.inductor_randint.default:
            node.target = _seeded_randint
        elif node.target is prims.iota.default and node.kwargs.get("dtype") in _UNSIGNED:
            node.kwargs = {**node.kwargs, "dtype": torch.int64}
    gm.recompile()


def _seeded_random(
    size: list[int], seed: torch.Tensor, mode: str, *, align_dtype: torch.dtype | None = None
) -> torch.Tensor:
    draw = getattr(torch, mode)
    return draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def _seeded_randint(low: int, high: int, size: list[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))
