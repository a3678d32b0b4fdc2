"""Operations and bytes of a graph, of which a roofline makes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from fp8pass import compat, graph
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.classify import CREATIONS, Kind, kind
from fp8pass.graph.flops import flops, is_expensive, is_fp8_gemm
from fp8pass.hardware import Work
from fp8pass.tools.fitting.liveness import has_buffer

CAUSAL_SHARE = 0.5


def work_of(g: fx.Graph) -> Work:
    """The work of a graph, of which generated code reads each buffer once for each it writes."""
    total = Work()
    for node in g.nodes:
        if node.op == "call_function" and is_expensive(node):
            total += _multiplied(node)
        elif node.op == "call_function" and has_buffer(node) and not graph.is_getitem(node):
            total += Work(bytes=graph.nbytes(node) + sum(map(graph.nbytes, _read(node))))
    for chunks in chunks_of(g):
        total += work_of(chunks.body.graph).times(chunks.count)
    return total


def work_of_call(operator: Any, arguments: Any, result: Any, new: Sequence[Tensor]) -> Work:
    """The work of an operator that PyTorch runs by itself.

    Args:
        operator: as PyTorch dispatches it.
        arguments: `(args, kwargs)`.
        result: what it returned.
        new: the tensors of that which are no views of its arguments.
    """
    args, kwargs = arguments
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    if formula is not None:
        return Work(bf16_flops=float(formula(*args, **kwargs, out_val=result)))
    if operator in CREATIONS:
        return Work()
    read = (x for x in compat.tree_leaves(arguments) if isinstance(x, Tensor))
    return Work(bytes=float(sum(map(graph.bytes_of, (*read, *new)))))


def _multiplied(node: fx.Node) -> Work:
    if kind(node) is Kind.ATTENTION:
        return Work(attention_flops=flops(node) * (CAUSAL_SHARE if _is_causal(node) else 1.0))
    return Work(fp8_flops=flops(node)) if is_fp8_gemm(node) else Work(bf16_flops=flops(node))


def _is_causal(attention: fx.Node) -> bool:
    """Whether kernels leave out what a causal mask hides."""
    if not compat.is_operator(attention.target):
        return False
    names = [argument.name for argument in compat.schema_of(attention.target).arguments]
    given = dict(zip(names, attention.args, strict=False)) | attention.kwargs
    return given.get("is_causal") is True


def _read(node: fx.Node) -> set[fx.Node]:
    """The buffers that a kernel reads, which computes a node."""
    found: set[fx.Node] = set()
    pending = list(node.all_input_nodes)
    seen: set[fx.Node] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder" or has_buffer(current):
            found.add(current)
        else:
            pending += current.all_input_nodes
    return found
