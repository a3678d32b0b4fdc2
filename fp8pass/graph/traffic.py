"""Estimate the memory traffic of nodes, and whether generated code can fuse them."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fp8pass import compat
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import tensor, value

# The number of rows that linear layers with symbolic sizes are assumed to have. Size hints are not
# used: cache keys do not contain hints, and the batch from which Dynamo takes the hints may be
# unusually small.
ROWS = 8192

# Kinds of operators that generated code computes, so that casts of their operands and results need
# no kernels of their own.
FUSABLE = (Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT, Kind.QUANTIZE)


def count_elements(x: fx.Node) -> int:
    """Return the number of elements of a tensor.

    All symbolic sizes together count as one number. Batch and length, [s0, s1, D], count like their
    product, [s0 * s1, D].
    """
    shape = tensor(x).shape
    known = math.prod(size if isinstance(size, int) else compat.coefficient(size) for size in shape)
    return known if all(isinstance(size, int) for size in shape) else known * _assumed(x.graph)


def count_bytes(x: fx.Node) -> int:
    """Return the bytes of a tensor, with an assumed value for symbolic sizes."""
    return count_elements(x) * tensor(x).element_size()


def assumed_size(size: int | torch.SymInt, g: fx.Graph) -> int:
    """Return a tensor size as an int. An assumed value replaces the product of its symbols."""
    return size if isinstance(size, int) else compat.coefficient(size) * _assumed(g)


_assumptions = WeakKeyDictionary[fx.Graph, int]()


def _assumed(g: fx.Graph) -> int:
    """Return the value assumed for symbols. With it, the GEMM with the most rows has `ROWS` rows.

    For a batch of 16 and a symbolic length s, GEMMs have 16 * s rows, so s is ROWS / 16.
    """
    if g not in _assumptions:
        gemms = (n for n in g.nodes if kind(n) is Kind.GEMM and value(n) is not None)
        heights = [tensor(n).shape[0] for n in gemms if tensor(n).ndim == 2]
        symbolic = [m for m in heights if isinstance(m, torch.SymInt)]
        rows = [compat.coefficient(m) for m in symbolic]  # type: ignore[arg-type]
        _assumptions[g] = max(ROWS // max(rows, default=1), 1)
    return _assumptions[g]


def is_computed(x: fx.Node) -> bool:
    """Whether generated code computes a tensor, so that a cast needs no kernel of its own.

    Parameters, inputs, and results of GEMMs and attention are not computed by generated code.
    """
    return kind(base(x)) in FUSABLE


def base(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory of a view."""
    while kind(node) is Kind.VIEW:
        node = node.all_input_nodes[0]
    return node
