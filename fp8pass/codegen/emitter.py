"""Adds aten operators to a graph, as the lowering of one node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.dialect.coding import CONTRACTION_MULTIPLE, padded
from fp8pass.graph.nodes import aten, prims, tensor


class Emitter:
    """Emits aten operators at one place of a graph; `self(op, ...)` adds a node."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return graph.emit(self.node.graph, target, *args, like=self.node, **kwargs)

    def sizes(self, x: fx.Node) -> list[Any]:
        """The sizes of `x` as arguments: numbers, or nodes where they vary."""
        return [
            size if isinstance(size, int) else self(aten.sym_size.int, x, dim)
            for dim, size in enumerate(tensor(x).shape)
        ]

    def padded(self, size: int | fx.Node) -> Any:
        """`dialect.coding.padded` of a size, in its words, so that both are known to be equal."""
        if isinstance(size, int):
            return padded(size)
        parts = self(operator.floordiv, self(operator.neg, size), CONTRACTION_MULTIPLE)
        return self(operator.mul, parts, -CONTRACTION_MULTIPLE)

    def constant(self, like: fx.Node, value: float) -> fx.Node:
        """A scalar tensor with dtype and device of `like`."""
        val = tensor(like)
        with compat.fake_mode_of(val):
            return self(aten.full.default, [], value, dtype=val.dtype, device=val.device)

    def steps(self, like: fx.Node, count: int, step: int) -> fx.Node:
        """0, step, 2·step, ..., as int32 [count] on the device of `like`."""
        val = tensor(like)
        with compat.fake_mode_of(val):
            return self(
                prims.iota.default,
                count,
                start=0,
                step=step,
                dtype=torch.int32,
                device=val.device,
                requires_grad=False,
            )
