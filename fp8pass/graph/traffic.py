"""Estimate the memory traffic of nodes, and whether generated code can fuse them."""

from __future__ import annotations

import math

import torch
from torch import fx

from fp8pass import compat
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import tensor

# The number that stands for symbolic sizes, which are numbers of tokens. Hints are not used: cache
# keys do not contain them, and the first batch of another size may be a small one.
ROWS = 8192

# Operators that generated code computes, so that casts of their operands and results need no
# kernels of their own.
FUSABLE = (Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT, Kind.QUANTIZE)


def count_elements(x: fx.Node) -> int:
    """Return the number of elements of a tensor, with `ROWS` for all its symbols together.

    Batch and length, [s0, s1, D], count like their product [s0 * s1, D].
    """
    shape = tensor(x).shape
    known = math.prod(size if isinstance(size, int) else compat.coefficient(size) for size in shape)
    return known if all(isinstance(size, int) for size in shape) else known * ROWS


def count_bytes(x: fx.Node) -> int:
    """Return the bytes of a tensor, with `ROWS` for symbolic sizes."""
    return count_elements(x) * tensor(x).element_size()


def assumed_size(size: int | torch.SymInt) -> int:
    """Return a size, with `ROWS` for its symbols."""
    return size if isinstance(size, int) else compat.coefficient(size) * ROWS


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
