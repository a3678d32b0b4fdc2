"""Find collectives, and the tensors that all-gathers and all-to-alls produce.

All-gathers concatenate shards along the first dimension. If a tensor is sharded along another
dimension, DTensor splits the result and concatenates the parts along that dimension:
`cat(split(wait_tensor(all_gather_into_tensor(shard))), dim)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.graph.classify import Kind, argument_of, kind
from fp8pass.graph.nodes import aten, tensor
from fp8pass.graph.patterns import filled_with

c10d = torch.ops._c10d_functional

ALL_GATHER = c10d.all_gather_into_tensor.default
ALL_REDUCE = c10d.all_reduce.default
ALL_TO_ALL = c10d.all_to_all_single.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
WAIT_TENSOR = c10d.wait_tensor.default
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


@dataclass(frozen=True)
class Gather:
    """An all-gather of a sharded tensor."""

    node: fx.Node  # the collective
    # The node that waits for the collective. Its value is the shards of all ranks, concatenated
    # along the first dimension.
    wait: fx.Node
    whole: fx.Node  # the node of the unsharded tensor. It is `wait` if `dim` is 0.
    dim: int  # the dimension along which the tensor was sharded

    @property
    def shard(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def group(self) -> tuple[Any, ...]:
        """The size and the name of the process group, as arguments of the collective."""
        return tuple(self.node.args[1:])


@dataclass(frozen=True)
class Exchange:
    """An all-to-all, in which each rank sends some rows of a matrix to each other rank."""

    node: fx.Node  # the collective
    wait: fx.Node  # the node that waits for the collective; its value is the received rows

    @property
    def rows(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def splits(self) -> tuple[Any, ...]:
        """The numbers of received and sent rows, and the group, as arguments of the collective."""
        return tuple(self.node.args[1:])

    @property
    def matrix(self) -> fx.Node:
        """The received rows, or their only reader's result if the reader appends rows of zeros."""
        readers = elements_read(self.wait)
        padded = len(readers) == 1 and skip_zero_rows(readers[0])[1]
        return readers[0] if padded else self.wait

    def replace_sizes(self, rows: fx.Node, matrix: fx.Node) -> None:
        """Redirect nodes that read a number of rows to other tensors.

        They read `rows` instead of the collective and `self.wait`, and `matrix` instead of
        `self.matrix`.
        """
        for node, other in ((self.node, rows), (self.wait, rows), (self.matrix, matrix)):
            for user in [user for user in node.users if kind(user) is Kind.SYMBOL]:
                user.replace_input_with(node, other)


def elements_read(node: fx.Node) -> list[fx.Node]:
    """Return the users that read the elements of a tensor, and not only its sizes, in order."""
    return sorted(user for user in node.users if kind(user) is not Kind.SYMBOL)


def skip_zero_rows(node: fx.Node) -> tuple[fx.Node, int]:
    """If `node` appends rows of zeros to a matrix, return the matrix and the number of these rows.

    Otherwise, return `node` and 0.

    Models append a row of zeros, to which the indices of padding rows point. In the backward, a
    `slice_scatter` appends the row.
    """
    if graph.is_call(node, aten.cat.default):
        parts: Any = node.args[0]
        if len(parts) == 2 and not argument_of(node, "dim") and filled_with(parts[1]) == 0:
            count = tensor(parts[1]).shape[0]
            return (parts[0], count) if isinstance(count, int) else (node, 0)
    if graph.is_call(node, aten.slice_scatter.default):
        zeros, rows, *where = node.args
        is_first = where[:2] == [0, 0] and len(where) == 3 and isinstance(where[2], int)
        if is_first and where[2] < 0 and filled_with(zeros) == 0:  # type: ignore[operator, arg-type]
            return rows, -where[2]  # type: ignore[operator, return-value]
    return node, 0


def find_exchanges(g: fx.Graph) -> Iterator[Exchange]:
    """Yield a graph's exchanges of matrices, in order.

    Exchanges are skipped if several nodes read the elements that the collective returns, or if a
    node reads the number of columns.
    """
    for node in g.find_nodes(op="call_function", target=ALL_TO_ALL):
        waits = elements_read(node)
        if len(waits) == 1 and waits[0].target is WAIT_TENSOR and tensor(node).ndim == 2:
            found = Exchange(node, waits[0])
            sizes = (user for n in (node, found.wait, found.matrix) for user in n.users)
            if all(_counts_rows(user) for user in sizes if kind(user) is Kind.SYMBOL):
                yield found


def _counts_rows(node: fx.Node) -> bool:
    return node.target is aten.sym_size.int and bool(node.args[1] == 0)


def receives_tokens(node: fx.Node, received: Set[fx.Node]) -> bool:
    """Whether a value has the rows of one of the tensors `received`, maybe in another order."""
    while graph.is_call(node, aten.index.Tensor):
        node = node.args[0]  # type: ignore[assignment]
    return skip_zero_rows(node)[0] in received


def is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def starts_communication(node: fx.Node) -> bool:
    return is_collective(node) and node.target is not WAIT_TENSOR


def remove_unused(g: fx.Graph) -> None:
    """Remove unused nodes, including collectives, which FX keeps because they have side effects.

    All ranks remove the same collectives, because all ranks have the same graph.
    """
    g.eliminate_dead_code(lambda node: node.is_impure() and not is_collective(node))


def find_gathers(g: fx.Graph) -> Iterator[Gather]:
    """Yield a graph's all-gathers in order. Skip all-gathers that several nodes read."""
    for node in g.nodes:
        if graph.is_call(node, ALL_GATHER) and len(node.users) == 1:
            (wait,) = node.users
            if wait.target is WAIT_TENSOR:
                yield _gather(node, wait)


def _gather(node: fx.Node, wait: fx.Node) -> Gather:
    split = next(iter(wait.users)) if len(wait.users) == 1 else None
    if split is not None and split.target in SPLITS:
        cat = _concatenation_of(split, node.args[1])
        if cat is not None:
            return Gather(node, wait, cat, (argument_of(cat, "dim") or 0) % tensor(cat).ndim)
    return Gather(node, wait, wait, 0)


def _concatenation_of(split: fx.Node, ranks: Any) -> fx.Node | None:
    parts = sorted(split.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
    users = {user for part in parts for user in part.users}
    if argument_of(split, "dim") or len(parts) != ranks or len(users) != 1:
        return None
    (cat,) = users
    return cat if graph.is_call(cat, aten.cat.default) and cat.args[0] == parts else None
