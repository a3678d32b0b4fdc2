"""Collectives: what a rank sends, and what it was gathered into.

A gather along a dimension other than the first is one along the first whose parts are put side by
side afterwards: `cat(split(wait_tensor(all_gather_into_tensor(shard))), dim)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.graph.nodes import aten, tensor

c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
WAIT_TENSOR = c10d.wait_tensor.default
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


@dataclass(frozen=True)
class Gather:
    """The parts of a tensor that all ranks have, put together on all of them.

    Attributes:
        node: the collective.
        wait: its result, parts of all ranks one after the other.
        whole: the tensor, parts side by side along `dim`; `wait` where that is the first one.
    """

    node: fx.Node
    wait: fx.Node
    whole: fx.Node
    dim: int

    @property
    def shard(self) -> fx.Node:
        """This rank's part."""
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def group(self) -> tuple[Any, ...]:
        """The ranks, as arguments of the collective: their number, the name of their group."""
        return tuple(self.node.args[1:])


def is_collective(node: fx.Node) -> bool:
    """Whether ranks send each other something here, or wait for it."""
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def starts_communication(node: fx.Node) -> bool:
    """Whether ranks send each other something here."""
    return is_collective(node) and node.target is not WAIT_TENSOR


def remove_unused(g: fx.Graph) -> None:
    """Remove what nobody uses, collectives too: FX takes a `wait_tensor` for a side effect.

    All ranks have the same graph, so that none waits for a collective that others leave out.
    """
    g.eliminate_dead_code(lambda node: node.is_impure() and not is_collective(node))


def find_gathers(g: fx.Graph) -> Iterator[Gather]:
    """The gathers of a graph, in order."""
    for node in g.nodes:
        waits = (
            [u for u in node.users if u.target is WAIT_TENSOR]
            if graph.is_call(node, ALL_GATHER)
            else []
        )
        if len(waits) == len(node.users) == 1:
            yield _gather(node, waits[0])


def _gather(node: fx.Node, wait: fx.Node) -> Gather:
    splits = [u for u in wait.users if u.target in SPLITS]
    if len(splits) == len(wait.users) == 1 and (whole := _side_by_side(splits[0], node.args[1])):
        return Gather(node, wait, whole, _dimension(whole))
    return Gather(node, wait, wait, 0)


def _side_by_side(split: fx.Node, ranks: Any) -> fx.Node | None:
    """The tensor that all parts of a split along the first dimension are put together to."""
    along = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    parts = sorted(split.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
    users = {user for part in parts for user in part.users}
    if along != 0 or len(parts) != ranks or len(users) != 1:
        return None
    (whole,) = users
    return whole if graph.is_call(whole, aten.cat.default) and whole.args[0] == parts else None


def _dimension(cat: fx.Node) -> int:
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % tensor(cat).ndim
