"""Estimate the memory traffic of nodes, and whether generated code can fuse them."""

from __future__ import annotations

import math

import torch
from torch import fx

from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.nodes import tensor

# The number that stands for symbolic sizes, which are numbers of tokens. Hints are not used: cache
# keys do not contain them, and the first batch of another size may be a small one.
ROWS = 8192

# Operators that generated code computes, so that casts of their operands and results need no
# kernels of their own.
FUSABLE = (Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT, Kind.QUANTIZE)


def count_elements(x: fx.Node) -> int:
    """Return the number of elements of a tensor, with `ROWS` for symbolic sizes."""
    return math.prod(map(assumed_size, tensor(x).shape))


def count_bytes(x: fx.Node) -> int:
    """Return the bytes of a tensor, with `ROWS` for symbolic sizes."""
    return count_elements(x) * tensor(x).element_size()


def assumed_size(size: int | torch.SymInt) -> int:
    """Return a size, or `ROWS` if it is symbolic."""
    return size if isinstance(size, int) else ROWS


def is_computed(x: fx.Node) -> bool:
    """Whether generated code computes a tensor, so that a cast needs no kernel of its own.

    Parameters, inputs, and results of GEMMs and attention are not computed by generated code.
    """
    return kind(_source(x)) in FUSABLE


def _source(x: fx.Node) -> fx.Node:
    while kind(x) is Kind.VIEW:
        x = x.all_input_nodes[0]
    return x
