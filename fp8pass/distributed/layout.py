"""Groups of gradients that begin anew with each parameter.

    row      p p p p p q q s s s s            of parameters p, q, s
    spread   p p p p|p 0 0 0|q q 0 0|s s s s  in groups of 4

A group that ran across a boundary would take its scale from two parameters. Ranks of tensor
parallelism hold equal copies of one parameter (a norm) beside different shards of another: each
rank would round its copy in another way, and the copies would drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where parameters and their groups lie in rows of gradients.

    Attributes:
        sizes: elements of each parameter in a row, in order, of at least one.
        unit: elements of a group.
    """

    sizes: tuple[int, ...]
    unit: int

    @cached_property
    def _runs(self) -> tuple[int, ...]:
        """Elements that stay together: all up to a parameter that does not end with a group."""
        runs = [0]
        for size in self.sizes:
            runs[-1] += size
            if size % self.unit:
                runs.append(0)
        return tuple(run for run in runs if run)

    @cached_property
    def _spaces(self) -> tuple[int, ...]:
        """Elements of the runs with the zeros behind them, of which the last has none."""
        *others, last = self._runs
        return (*(run + -run % self.unit for run in others), last)

    def spread(self, rows: Tensor) -> Tensor:
        """Return rows [R, N] with zeros where groups begin anew; the rows if none do."""
        if len(self._runs) == 1:
            return rows
        spread = rows.new_zeros(len(rows), sum(self._spaces))
        for space, run in zip(spread.split(self._spaces, -1), self._split(rows), strict=True):
            space[:, : run.shape[-1]] = run
        return spread

    def collect(self, spread: Tensor, rows: Tensor) -> None:
        """Write to rows [R, N] what `spread` gave, without the zeros."""
        for space, run in zip(spread.split(self._spaces, -1), self._split(rows), strict=True):
            run.copy_(space[:, : run.shape[-1]])

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self._runs, -1)


@lru_cache(maxsize=1024)
def layout_of(sizes: tuple[int, ...], unit: int) -> Layout:
    """The layout of parameters, some of which may have no elements in a row."""
    return Layout(tuple(size for size in sizes if size), unit)


@lru_cache(maxsize=1024)
def owners_of(layout: Layout, shape: tuple[int, int], device: torch.device) -> Tensor:
    """The number of the parameter of each group, int64 [R, groups]; one more after the last one.

    Groups follow one another through `R` rows if a row is shorter than the layout; else each row
    has the whole layout.
    """
    groups = [i for i, size in enumerate(layout.sizes) for _ in range(-(-size // layout.unit))]
    rows, columns = shape
    if len(groups) == columns:
        return torch.tensor(groups, device=device).expand(shape)
    groups += [len(layout.sizes)] * (rows * columns - len(groups))
    return torch.tensor(groups, device=device).view(shape)
