"""Inductor's choice between reductions that read a row once and reductions that loop over it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch._inductor.config as inductor_config
from sympy import sympify
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V

__all__ = ["hold_dequantized_rows"]

# The longest rows that Inductor reads once if the kernel reads no scales of groups.
_LONGEST = 1024


def hold_dequantized_rows() -> AbstractContextManager[None]:
    """Read rows of up to 1,024 elements once, even if a kernel reads the scales of their groups.

    Inductor does not hold a row in registers if an index is not contiguous. The index of a group's
    scale, `column // 128`, is not contiguous.
    """
    return V.set_choices_handler(_Choices(V.choices))


class _Choices:
    """Chooses the form of reductions along short rows; the wrapped handler decides the rest."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.others, name)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        if self.others.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not inductor_config.triton.persistent_reductions:
            return False
        is_short = V.graph.sizevars.statically_known_leq(features.reduction_numel, _LONGEST)
        return bool(is_short and _runs_along_rows(features))


def _runs_along_rows(features: Any) -> bool:
    """Whether all operators of a kernel read and write along the rows that it reduces."""
    accesses = chain.from_iterable(
        chain(node.read_writes.reads, node.read_writes.writes)
        for node in features.scheduler_nodes()
    )
    return all(map(_runs_along, accesses))


def _runs_along(access: Any) -> bool:
    """Whether neighboring elements of a row have equal or neighboring addresses."""
    if not isinstance(access, MemoryDep) or not access.var_names:
        return True
    *others, last = access.var_names
    start = dict.fromkeys(others, 0)
    index = sympify(access.index)  # a number if the kernel loads a random seed
    step = index.subs({**start, last: 1}) - index.subs({**start, last: 0})
    return step in (0, 1)
