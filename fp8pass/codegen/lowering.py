"""Replace the operators of the dialect by traces of their tuned lowerings or references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.codegen.tuned_lowerings import LOWERINGS
from fp8pass.dialect.ops import OPERATORS
from fp8pass.graph.collectives import remove_unused

# Traces by fake mode, then by function and arguments. Each compilation has one fake mode, so its
# repeated layers share traces.
_traces: WeakKeyDictionary[Any, dict[tuple[Any, str], fx.Graph]] = WeakKeyDictionary()


def lower(gm: fx.GraphModule, only: Callable[..., Any] | None = None) -> None:
    lower_graph(gm.graph, only)
    gm.recompile()


def lower_graph(g: fx.Graph, only: Callable[..., Any] | None = None) -> None:
    nodes = [n for n in g.nodes if n.target in OPERATORS and only in (None, n.target)]
    for node in nodes:
        function, arguments = OPERATORS[node.target].reference, node.args
        if lowering := LOWERINGS.get(node.target):
            function, arguments = lowering.function, lowering.arguments(node)
        with g.inserting_before(node):
            node.replace_all_uses_with(_emit_traced(node, function, arguments))
        g.erase_node(node)
    if nodes:
        remove_unused(g)


def _emit_traced(like: fx.Node, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """Copy the trace of `function(*args)`, and return its result node."""
    operands = [n for n in compat.tree_leaves(args) if isinstance(n, fx.Node)]
    traced = _trace(function, args, list(dict.fromkeys(operands)))
    inputs, outputs = traced.find_nodes(op="placeholder"), graph.outputs(traced)
    copies = dict(zip(inputs, dict.fromkeys(operands), strict=True))
    with compat.fake_mode_of(graph.tensor(operands[0])):
        for n in traced.nodes:
            if n.op == "call_function":
                arguments, keywords = fx.map_arg((n.args, n.kwargs), copies.__getitem__)
                copies[n] = graph.emit(like.graph, n.target, *arguments, like=like, **keywords)
    return copies[outputs[0]]


def _trace(
    function: Callable[..., Any], args: tuple[Any, ...], operands: list[fx.Node]
) -> fx.Graph:
    """Return the graph of `function(*args)`, whose inputs correspond to `operands`."""
    fakes = [graph.tensor(n) for n in operands]
    texts = {n: _describe(i, fake) for i, (n, fake) in enumerate(zip(operands, fakes, strict=True))}
    known = _traces.setdefault(compat.fake_mode_of(fakes[0]), {})
    key = function, repr(fx.map_arg(args, texts.__getitem__))
    if key not in known:

        def call(*tensors: torch.Tensor) -> torch.Tensor:
            values = dict(zip(operands, tensors, strict=True))
            return function(*fx.map_arg(args, values.__getitem__))

        known[key] = compat.trace(call, fakes)
    return known[key]


def _describe(number: int, x: torch.Tensor) -> str:
    return f"{number}: {x.dtype} {x.device} {list(x.shape)} {list(x.stride())}"
