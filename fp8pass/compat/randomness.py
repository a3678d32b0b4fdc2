"""Inductor's random numbers: a function of a seed, in generated code and op by op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch import fx
from torch._dynamo.utils import counters as counters
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor


def seeded_random_ops() -> Iterable[Any]:
    """Inductor's random numbers: a pure function of a seed, so recomputing gives the same."""
    return (
        torch.ops.prims.inductor_random.default,
        torch.ops.prims.inductor_randint.default,
        torch.ops.prims.inductor_lookup_seed.default,
    )


def draw_from_seeds(gm: fx.GraphModule) -> None:
    """Make Inductor's random numbers a function of their seed, as they are in generated code.

    In their eager form they are not: a backward that draws them again would get others.
    """
    prims = torch.ops.prims
    for node in gm.graph.nodes:
        if node.target is prims.inductor_random.default:
            node.target = _seeded_random
        elif node.target is prims.inductor_randint.default:
            node.target = _seeded_randint
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
